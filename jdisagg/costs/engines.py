"""Describes inference engines for the cost model: kernels, precisions, host times, batching.

Kernel speeds are from public tables of single operations (aiconfigurator's data of vLLM 0.14 to
0.24, SGLang 0.5 and TensorRT-LLM 1.2 to 1.3), not from serving runs. Host times were chosen with
half of the public serving points (benchmarks/results/public_runs.md)."""

from dataclasses import dataclass, replace
from typing import Literal

from jdisagg.costs.hardware import Accelerator
from jdisagg.costs.kernels import Kernels
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import WEIGHT_BITS

Order = Literal["mixed", "prefill_first"]
WITHOUT_FP8 = ("a100",)  # fp8 weights are computed in bfloat16
BLACKWELL = ("b200", "b300", "gb200-nvl72", "gb300-nvl72")
# Speed of matrix products relative to bfloat16.
FP8_SPEED, FP4_SPEED = 1.5, 2.4
# Bits of a matrix value by precision. fp4: nvfp4, or mxfp4 in models that are published in it.
PRECISION_BITS = {**WEIGHT_BITS, "fp4": 4}
# Models published in blocks of fp8 with a scale each. Activations are then quantized by a separate
# operation.
BLOCK_SCALED = frozenset(
    ("deepseek-v3", "qwen3-32b", "qwen3-235b-a22b", "minimax-m2.5", "qwen3.5-397b-a17b")
)
# Routed experts of one layer with the kernels that engines choose: (us to start, memory speed,
# arithmetic speed), before Blackwell and on it. Speeds are relative to those of dense products in
# bfloat16. Least errors over public tables of these kernels, with 1 to 16,384 tokens routed by a
# power law. Memory speeds above 1 result from this law, since it uses fewer experts than even
# routing. In each table, the times for reading and for arithmetic add up.
_EXPERTS = {
    "vllm": {
        "bf16": ((45, 1.3, 0.8), (20, 1.3, 1.0)),
        "fp8": ((50, 1.3, 0.8), (30, 1.3, 0.6)),
        "fp4": ((45, 0.9, 0.5), (20, 1.15, 4.0)),
        "mxfp4": ((45, 0.9, 0.5), (20, 1.2, 1.2)),
        "int4": ((45, 1.0, 0.3), (60, 0.8, 0.15)),
    },
    "sglang": {
        "bf16": ((45, 1.3, 0.4), (30, 1.3, 1.0)),
        "fp8": ((60, 1.3, 1.0), (45, 1.3, 0.6)),
        "fp4": ((30, 0.3, 0.4), (30, 1.15, 4.0)),
        "mxfp4": ((30, 0.3, 0.4), (30, 1.1, 1.0)),
        "int4": ((30, 1.0, 0.3), (30, 0.9, 0.15)),
    },
    "trtllm": {
        "bf16": ((60, 1.3, 0.65), (60, 1.3, 0.85)),
        "fp8": ((100, 1.3, 0.4), (35, 1.3, 0.6)),
        "fp4": ((45, 1.2, 0.4), (20, 1.15, 4.0)),
        "mxfp4": ((45, 0.9, 0.5), (20, 1.2, 1.5)),
        "int4": ((45, 1.0, 0.3), (45, 0.9, 0.15)),
    },
}
# If each device holds whole experts, the busiest device has about twice the mean number of rows in
# the same tables, and no kernel takes longer than this many microseconds to start.
WHOLE_EXPERTS_SPEED, WHOLE_EXPERTS_START = 0.5, 45
# Wide expert parallelism: more devices than a host has. Engines then send tokens in fp8, and use
# DeepGEMM's grouped fp8 products also on Blackwell.
WIDE, GROUPED_FP8_SPEED = 8, 1.0
# Exchange over scale-out links, from DeepEP's published measurements: 43 to 58 of 50 GB/s per NIC
# with EP16 to EP64, decode kernels for up to a few hundred tokens per rank, prefill kernels beyond.
_ACROSS_HOSTS = {"exchange_bandwidth": 0.9, "overlaps": True}
DIRECT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class EnginePreset:
    """An inference engine, as the cost model describes it. This class describes jdisagg itself.

    Attributes:
      order: "mixed" if a step may contain prompt chunks and decode rows, "prefill_first" if waiting
        prompts run in separate steps before any decode step.
      reserved: Fraction of an answer for whose KV there must be free memory before the request
        starts.
      gather_steps: In a pool that prefills and decodes, the number of decode steps for which the
        engine can let prompts wait until each dp rank has a prompt; 0 if it has no such setting.
      step_error: Median relative error of predicted TPOT on public measurements
        (benchmarks/results/public_runs.md). For jdisagg, it is an upper bound of the errors for
        steps and chunks of Llama-3-8B on one H100 (benchmarks/LOG.md, 2026-11-27), which are its
        only measurements on a GPU.
    """

    name: str = "jdisagg"
    order: Order = "prefill_first"
    chunk_tokens: int = 8192
    front_seconds: float = 0.0
    steps_ahead: int = 0
    reserved: float = 1.0
    gather_steps: int = 0
    step_error: float = 0.15

    def shape(self, geometry: CostGeometry, weights: str) -> CostGeometry:
        if weights not in ("", *WEIGHT_BITS):
            raise ConfigError(
                f"weights={weights!r} is not served by {self.name}, which has"
                f" {', '.join(WEIGHT_BITS)}; choose one, or another --engine"
            )
        return replace(geometry, matrix_bits=WEIGHT_BITS[weights]) if weights else geometry

    def card(
        self, card: Accelerator, geometry: CostGeometry, layout: Layout, weights: str
    ) -> Accelerator:
        del geometry, layout, weights
        return card


@dataclass(frozen=True, slots=True)
class GpuEngine(EnginePreset):
    """An engine with hand-written GPU kernels.

    Attributes:
      eager_seconds: Host seconds to issue one layer of a step with prompts that is not captured in
        a CUDA graph. Two values: for layers without experts, and with experts.
      quantizes: Whether activations are quantized by a separate operation, not by the norm before.
      collective_seconds: Latency of a collective. Two values: on GPUs before Blackwell, and on
        Blackwell.
    """

    eager_seconds: tuple[float, float] = (5e-4, 8e-4)
    quantizes: bool = True
    collective_seconds: tuple[float, float] = (5e-6, 8e-6)
    step_seconds: float = 5e-4
    captured_tokens: int = 0

    def shape(self, geometry: CostGeometry, weights: str) -> CostGeometry:
        known = _EXPERTS[self.name] if geometry.experts else PRECISION_BITS
        if weights and weights not in known:
            raise ConfigError(
                f"weights={weights!r} is unknown for {geometry.name} with {self.name}; there are"
                f" {', '.join(name for name in PRECISION_BITS if name in known)}"
            )
        bits = PRECISION_BITS.get(weights, 0)
        # In mixtures of experts with 4 bits, only the experts have 4 bits, as in published
        # checkpoints.
        return replace(geometry, matrix_bits=0 if bits == 4 and geometry.experts else bits)

    def card(
        self, card: Accelerator, geometry: CostGeometry, layout: Layout, weights: str
    ) -> Accelerator:
        new = card.name in BLACKWELL
        part = 0.33 if new else 0.46
        reached = replace(
            card.efficiency,
            attention_seconds=7.3e-6 if new else 9.5e-6,
            collective_seconds=self.collective_seconds[new],
            collective_bandwidth=part,
            large_bandwidth=part,
            step_seconds=self.step_seconds,
            prefill_seconds=self.step_seconds,
            prefill_launch_seconds=self.eager_seconds[bool(geometry.experts)],
        )
        if new:
            reached = replace(reached, gemm_compute=0.7, gemm_memory=0.75, attention_memory=0.87)
        kernels = self._kernels(card, geometry, layout, weights)
        return replace(card, efficiency=reached, kernels=kernels)

    def _kernels(
        self, card: Accelerator, geometry: CostGeometry, layout: Layout, weights: str
    ) -> Kernels:
        new, mixture = card.name in BLACKWELL, bool(geometry.experts)
        few = PRECISION_BITS.get(weights) == 4
        four = FP4_SPEED if weights == "fp4" and new else 1.0
        computed = "" if weights == "fp8" and card.name in WITHOUT_FP8 else weights
        speed = FP8_SPEED if computed == "fp8" else 1.0 if mixture else four
        blocks = weights == "fp8" and geometry.name in BLOCK_SCALED
        kernels = replace(
            card.kernels,
            exchange="all_to_all",
            redundant_experts=True,
            direct_tokens=DIRECT_TOKENS,
            matrix_speed=speed,
            fused=True,
            quantizes=speed > 1 and (self.quantizes or blocks),
            direct=True,
            captured_tokens=self.captured_tokens,
        )
        if not mixture:
            return kernels
        published = few and geometry.name.startswith("gpt-oss")
        table = _EXPERTS[self.name]["mxfp4" if published else computed or "bf16"]
        start, memory, arithmetic = table[new]
        if layout.ep > 1:
            if new and layout.ep > WIDE and weights == "fp8":
                arithmetic = max(arithmetic, GROUPED_FP8_SPEED)
            arithmetic *= WHOLE_EXPERTS_SPEED
            start = min(start, WHOLE_EXPERTS_START)
        if layout.ep > WIDE and weights in ("fp8", "fp4"):
            kernels = replace(kernels, dispatch_bits=8)
        if layout.stage_devices > card.domain_devices:
            kernels = replace(kernels, **_ACROSS_HOSTS)
        return replace(
            kernels,
            expert_speed=arithmetic,
            expert_bits=4 if few else 0,
            expert_operations=round(start * 1e-6 / card.efficiency.op_seconds),
            expert_memory=memory,
            expert_serial=True,
            gathers=True,
        )


JDISAGG = EnginePreset()
ENGINES: dict[str, EnginePreset] = {
    engine.name: engine
    for engine in (
        JDISAGG,
        GpuEngine("vllm", "mixed", 8192, 0.01, 1, 0.1, 0, 0.09, captured_tokens=512),
        GpuEngine(
            "trtllm", "mixed", 8192, 0.01, 1, 1.0, 60, 0.12, quantizes=False,
            collective_seconds=(3.5e-6, 5.5e-6),
        ),
        GpuEngine("sglang", "prefill_first", 8192, 0.01, 1, 0.75, 60, 0.11),
    )
}  # fmt: skip


def engine_named(name: str) -> EnginePreset:
    if name not in ENGINES:
        raise ConfigError(f"no engine named {name!r}; there are {', '.join(ENGINES)}")
    return ENGINES[name]


@dataclass(frozen=True, slots=True)
class Software:
    """The inference engine of a deployment, with its weight precision and speculation.

    Attributes:
      draft_tokens: Number of tokens that each decode step drafts for each sequence (multi-token
        prediction); 0 without speculation.
      acceptance: Probability that a draft is accepted, given that all drafts before it are.
    """

    engine: EnginePreset = JDISAGG
    weights: str = ""
    draft_tokens: int = 0
    acceptance: float = 0.0

    def shape(self, geometry: CostGeometry) -> CostGeometry:
        return self.engine.shape(geometry, self.weights)

    def card(self, card: Accelerator, geometry: CostGeometry, layout: Layout) -> Accelerator:
        card = self.engine.card(card, geometry, layout, self.weights)
        if not self.draft_tokens:
            return card
        drafts = replace(card.kernels, draft_tokens=self.draft_tokens, acceptance=self.acceptance)
        return replace(card, kernels=drafts)

    @classmethod
    def of(cls, engine: str, weights: str | None, speculation: str | None) -> "Software":
        """`speculation`: text "TOKENS:ACCEPTANCE", such as "2:0.8". Raises ConfigError for other
        text."""
        if not speculation:
            return cls(engine_named(engine), weights or "")
        tokens, _, part = speculation.partition(":")
        try:
            drafted, accepted = int(tokens), float(part)
        except ValueError:
            raise ConfigError(
                f"--speculation={speculation} must be TOKENS:ACCEPTANCE, such as 2:0.8"
            ) from None
        Kernels(draft_tokens=drafted, acceptance=accepted)  # checks the values
        return cls(engine_named(engine), weights or "", drafted, accepted)


DEFAULT_SOFTWARE = Software()

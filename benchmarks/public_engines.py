"""How vLLM, SGLang and TensorRT-LLM run a published point: arithmetic and bits by its precision,
what their kernels fuse, how they batch, what their hosts take, what the run's own script sets.

What is said of kernels is from published tables of single operations (aiconfigurator's, data of
vLLM 0.14 to 0.24, SGLang 0.5 and TensorRT-LLM 1.2 to 1.3; no serving point): products reach 0.60 of
the peak in fp8 on H200 where bfloat16 reaches 0.80, and 0.40 to 0.45 in nvfp4 on B200; an
all-reduce takes 3.5 to 5 us (H200) and 5.5 to 8 us (B200) whether over two devices or eight, and
reaches 0.46 and 0.33 of the link; the experts of one layer take 20 to 100 us for one token
(`EXPERTS`), decode attention over a few tokens 9.5 us (H100, H200) and 7.3 us (B200, vLLM's).
Settings are those of the scripts that made InferenceX's runs (`setting`); what hosts take was set
by looking at half of the points."""

from dataclasses import dataclass, replace

from benchmarks.closed_loop import Order
from benchmarks.public_points import Devices, Point
from jdisagg.costs.catalog import CATALOG
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.hardware import Accelerator, accelerator
from jdisagg.costs.kernels import Kernels
from jdisagg.costs.model_geometry import LatentAttention
from jdisagg.layout.axes import Layout

BLACKWELL = ("b200", "b300", "gb200-nvl72", "gb300-nvl72")
# Of products, by the speed of bfloat16.
FP8_SPEED, FP4_SPEED = 1.5, 2.4
# Of the experts of one layer, before Blackwell and on it, with the kernels that engines choose
# there: microseconds to start, memory and arithmetic by those of dense products in bfloat16. Least
# errors over the tables of these kernels, whole experts or cut by tp, 1 to 16,384 tokens routed by
# a power law (so that fewer experts are read than an even choice would touch: memory beyond 1); in
# each table reading and arithmetic add up.
EXPERTS = {
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

# Whole experts on each device: the fullest has about twice the rows of an even choice, by the same
# tables, and no kernel takes longer to start.
WHOLE, WHOLE_START = 0.5, 45


@dataclass(frozen=True, slots=True)
class Host:
    """`order` and `chunk_tokens`: of its steps. Seconds: `front`, from a client to the queue and
    back; `eager`, to issue one layer of a step that carries prompts, which no captured graph has,
    and one with experts; `step`, of a decode step beside the device. `ahead`: steps that are issued
    before a newcomer is seen. `reserved`: the part of an answer whose KV must have room before it
    begins. `quantizes`: by an operation of its own, not by the norm before it. `collective`: its
    latency before Blackwell and on it. `cold`: what the first burst of InferenceX's runs waits for
    beside steps, of which their mean has a part, the same at any number of users, without and with
    latent attention: compilation, it seems."""

    order: Order
    chunk_tokens: int
    eager: tuple[float, float]
    reserved: float
    quantizes: bool
    collective: tuple[float, float] = (5e-6, 8e-6)
    cold: tuple[float, float] = (0.0, 0.0)
    front: float = 0.01
    step: float = 5e-4
    ahead: int = 1


# Models published in blocks of fp8, each with a scale: activations' blocks are quantized by an
# operation of its own by every engine.
BLOCKS = ("deepseek-v3", "qwen3-32b", "qwen3-235b-a22b", "minimax-m2.5", "qwen3.5-397b-a17b")
VLLM_CAPTURED = 512  # of its graphs the largest, where nothing else is set


@dataclass(frozen=True, slots=True)
class Setting:
    """As a run's own script sets it: chunk_tokens and poll as `Batching` has them, KV in bfloat16
    or in 8 bits, captured_tokens as `Kernels` has them."""

    chunk_tokens: int
    poll: int
    kv_dtype: str
    captured_tokens: int


HOSTS = {
    "vllm": Host("mixed", 8192, (5e-4, 8e-4), 0.1, True),
    "trtllm": Host("mixed", 8192, (5e-4, 8e-4), 1.0, False, (3.5e-6, 5.5e-6), (0.0, 1.5)),
    "sglang": Host("prefill_first", 8192, (5e-4, 8e-4), 0.75, True, cold=(2.0, 2.0)),
}


def card(point: Point) -> Accelerator:
    """The table's, with what engines' own collectives reach and with their hosts."""
    found, host = accelerator(point.card), HOSTS[point.engine]
    new = point.card in BLACKWELL
    part = 0.33 if new else 0.46
    reached = replace(
        found.efficiency,
        attention_seconds=7.3e-6 if new else 9.5e-6,
        collective_seconds=host.collective[new],
        collective_bandwidth=part,
        large_bandwidth=part,
        step_seconds=host.step,
        prefill_seconds=host.step,
        prefill_launch_seconds=host.eager[bool(CATALOG[point.model].experts)],
    )
    if new:
        reached = replace(reached, gemm_compute=0.7, gemm_memory=0.75, attention_memory=0.87)
    return replace(found, efficiency=reached)


def setting(point: Point) -> Setting:
    """InferenceX's scripts (SemiAnalysisAI/InferenceX at 843c625, benchmarks/single_node); of what
    they leave alone the engine's own."""
    blackwell, model = point.card in BLACKWELL, point.model
    chunk, poll = HOSTS[point.engine].chunk_tokens, 0
    kv_dtype = "bfloat16" if point.precision == "bf16" else "int8"
    captured = VLLM_CAPTURED if point.engine == "vllm" else 0
    if point.origin != "inferencex" or point.mode == "disagg":
        return Setting(chunk, poll, kv_dtype, captured)
    if point.engine == "sglang":
        chunk = 16384 if model.startswith("qwen3.5") or point.precision == "fp4" else 32768
        chunk = 32768 if point.precision == "bf16" or point.devices.dp > 1 else chunk
        many = point.users > 4 if model.startswith("qwen3.5") else point.users >= 16
        if blackwell and point.devices.dp <= 1:
            poll = 30 if many else 10
        if model.startswith("qwen3.5") and point.card == "b300" and point.precision == "fp8":
            poll = 10
        if model == "deepseek-v3" and point.precision == "fp8" and blackwell:
            chunk, poll = (8192, 10) if point.devices.tp == 4 else (chunk, poll)
        if model == "deepseek-v3" and not blackwell:
            kv_dtype = "bfloat16"
    if point.engine == "trtllm" and model == "gpt-oss-120b":
        chunk, kv_dtype = 20000, kv_dtype if blackwell else "bfloat16"
    if point.engine == "vllm":
        if model == "minimax-m2.5":
            chunk = 2 * point.prompt if blackwell else 32768
        if model == "gpt-oss-120b" or (model == "minimax-m2.5" and point.card == "b300"):
            captured = 2048
        if point.precision == "int4" or (model == "gpt-oss-120b" and not blackwell):
            kv_dtype = "bfloat16"
    return Setting(chunk, poll, kv_dtype, captured)


def cold_seconds(point: Point) -> float:
    """What the first burst waited for."""
    if point.origin != "inferencex":
        return 0.0
    latent = isinstance(CATALOG[point.model].attention, LatentAttention)
    return HOSTS[point.engine].cold[latent]


def matrix_bits(point: Point) -> int:
    """Of the layers' matrices; 0: bfloat16. A mixture of experts in 4 bits has its experts alone in
    them, as published checkpoints do."""
    if point.precision == "fp8":
        return 8
    return 4 if point.precision in ("fp4", "int4") and not CATALOG[point.model].experts else 0


def kernels(point: Point, devices: Devices) -> Kernels:
    """fp8 is multiplied as fp8. Four bits are multiplied as such on Blackwell; elsewhere, and in
    int4, they are restored to bfloat16 on the way."""
    shape = CATALOG[point.model]
    few = point.precision in ("fp4", "int4")
    mixture = bool(shape.experts)
    blocks = point.precision == "fp8" and point.model in BLOCKS
    four = FP4_SPEED if point.precision == "fp4" and point.card in BLACKWELL else 1.0
    speed = {"fp8": FP8_SPEED}.get(point.precision, 1.0 if mixture else four)
    grouped = "mxfp4" if few and point.model.startswith("gpt-oss") else point.precision
    start, memory, arithmetic = EXPERTS[point.engine][grouped][point.card in BLACKWELL]
    operation = accelerator(point.card).efficiency.op_seconds
    if devices.moe_ep > 1:
        arithmetic, start = arithmetic * WHOLE, min(start, WHOLE_START)
    return Kernels(
        exchange="all_to_all",
        matrix_speed=speed,
        expert_speed=arithmetic if mixture else 0.0,
        expert_bits=4 if mixture and few else 0,
        fused=True,
        quantizes=speed > 1 and (HOSTS[point.engine].quantizes or blocks),
        expert_operations=round(start * 1e-6 / operation),
        expert_memory=memory,
        expert_serial=True,
        direct=True,
        gathers=True,
    )


def kv_tokens(costs: CostModel) -> int:
    """Of one rank: a tenth of memory is left alone where that leaves any."""
    return costs.kv_tokens_per_rank() or costs.kv_tokens_per_rank(0.02)


def cost_model(point: Point, devices: Devices, captured_tokens: int | None = None) -> CostModel:
    """Weights and KV in what the point says. `captured_tokens`: as `Kernels` has it, where it is
    not as `setting` says."""
    geometry = CATALOG[point.model]
    layout = devices.layout(experts=bool(geometry.experts))
    assert isinstance(layout, Layout), layout
    geometry = replace(geometry, matrix_bits=matrix_bits(point))
    if captured_tokens is None:
        captured_tokens = setting(point).captured_tokens
    return CostModel(
        geometry,
        card(point),
        layout,
        kv_dtype=setting(point).kv_dtype,
        kernels=replace(kernels(point, devices), captured_tokens=captured_tokens),
    )

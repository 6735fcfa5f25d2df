"""The engines of the measured runs (measured_runs.py), modelled as fleets of our simulator:
batching, admission and hand-off of each.

DistServe prefills whole prompts in order of arrival, as many as wait. Their KV stays on the prefill
side until the decode side has pages for it. One loop reads tokens, fetches KV (and waits for it)
and issues steps, so a new sequence delays all others. The vLLM of that time has one pool and
prefills whole prompts, up to 2048 tokens together, before any decode step. vLLM 0.19 plans a step
while the previous one runs, and runs chunks of prompts in decode steps. It admits a prompt when its
pages are free, and preempts the youngest when none are. Its ranks step together.

`Constants` has the values that a cost model of devices cannot determine: a part of TTFT in which no
device is busy (client, API, polling), and the achieved speed of hand-offs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.simulator_engines.cluster import simulate
from benchmarks.simulator_engines.fleet import StudyFleet
from jdisagg.config import InstanceConfig, Mode, PrefixConfig
from jdisagg.costs.catalog import geometry
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.hardware import Accelerator, Link, accelerator
from jdisagg.costs.kernels import OURS, Kernels
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.layout.axes import Layout
from jdisagg.simulator.fleet import INSTANCE, LIMITS, Pool
from jdisagg.simulator.report import RequestOutcome
from jdisagg.simulator.step_costs import ModelCosts
from jdisagg.simulator.workloads import Arrival

GIBI = float(1 << 30)
# KV waits with the prefill side as long as it must.
PATIENT = replace(
    LIMITS, handoff_lease_seconds=3600.0, reservation_lease_seconds=3600.0, pull_seconds=600.0
)
BLOCK_TOKENS = 16  # of its prefix cache
# Runs of an engine with pipeline stages, and how much later a request comes in one of them: whom a
# batch gets depends on where the loop stands when he comes, and the fuller batch gets more, so that
# a moment decides over minutes.
DRAWS = 5
JITTER_SECONDS = 1e-3
OPT = geometry("opt-13b")
# DistServe's kernels (SwiftTransformer, fused_decoding_stage_attention_mha.cu) are after vLLM's
# first: both read a whole context with one block of threads a head.
ON_A100 = Kernels(multiprocessors=108, whole_contexts=True)
INSTANT = Link("none", 1e18, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of one engine on one machine that a fit may change."""

    accelerator: Accelerator
    front_seconds: float = 0.0
    link_bytes_per_second: float = 60e9


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """How a run is simulated.

    Attributes:
        stages: Number of pipeline stages of decode.
        live_turns: Whether batches take turns at the stages as on live decode workers, and not in
            the engine's own loop.
        kv_tokens: KV capacity if it was observed, otherwise the capacity that the model computes.
        step_seen: Fraction of a decode step by which TTFT starts later than the arrival.
        weights: Data type of the weights."""

    kind: str
    constants: Constants
    stages: int = 1
    live_turns: bool = False
    model: str = "opt-13b"
    kv_tokens: int | None = None
    step_seen: float = 0.0
    prefill_tp: int = 2
    decode_tp: int = 1
    slots: int = 256
    chunk_tokens: int = 2048
    ranks: int = 1
    weights: str = "bfloat16"
    kernels: Kernels = OURS

    @property
    def layout(self) -> Layout:
        """Layout of the decode side. Experts are spread over all ranks."""
        return Layout(
            dp=self.ranks,
            tp=self.decode_tp,
            ep=self.ranks * self.decode_tp if self.ranks > 1 else 1,
            pp=self.stages,
        )

    def fleet(self) -> StudyFleet:
        common = replace(INSTANCE, page_size=16, growth_tokens=16, ahead_sequences=0)
        decode = replace(common, slots_per_rank=self.slots, layout=self.layout)
        if self.kind == "distserve":
            # Four chunks of KV may wait to be fetched: what the memory of two such cards holds
            # beside the weights.
            prefill = replace(common, chunk_tokens=40960, layout=Layout(tp=self.prefill_tp))
            return StudyFleet(
                OPT,
                self._pool(OPT, decode),
                self._pool(OPT, prefill),
                limits=PATIENT,
                # The pull is the insertion: its time is the decode side's, between two steps
                # (`_pool`).
                link=INSTANT,
                overlap=1,
                run_ahead=0,
                drains=True,
                serial=not self.live_turns,
                late_reservation=True,
                # launched with 95 % of the memory, of which it leaves 1 % to activations
                memory_reserve=0.06,
            )
        if self.kind == "vllm":
            return StudyFleet(
                OPT,
                self._pool(OPT, replace(decode, chunk_tokens=self.chunk_tokens)),
                mode=Mode.UNIFIED,
                limits=PATIENT,
                run_ahead=0,
            )
        model = geometry(self.model)
        instance = replace(decode, chunk_tokens=self.chunk_tokens)
        fleet = StudyFleet(
            model,
            self._pool(model, instance),
            mode=Mode.CHUNKED,
            limits=PATIENT,
            dtype=self.weights,
            kv_dtype="bfloat16",
            run_ahead=1,
            fused=True,
            context_tokens=8192,
        )
        if self.kv_tokens is None:
            return fleet
        # Where memory is short a preempted prompt is found again in the prefix cache, as long as
        # nobody needed its pages.
        pool = self._pool(model, replace(instance, pages_per_rank=self.kv_tokens // 16))
        return replace(
            fleet,
            decode=pool,
            prefix=PrefixConfig(reuse=True, grain_tokens=BLOCK_TOKENS),
            block_tokens=BLOCK_TOKENS,
        )

    def _pool(self, model: CostGeometry, instance: InstanceConfig) -> Pool:
        """Returns one instance. Its costs are given, so the router has no hardware description and,
        like the routers of these engines, predicts nothing."""
        card = self.constants.accelerator
        costs = self.cost_model(model, card, instance.layout)
        return Pool(
            1,
            card,
            instance,
            ModelCosts(costs, insert_bytes_per_second=self.constants.link_bytes_per_second),
        )

    def cost_model(self, model: CostGeometry, card: Accelerator, layout: Layout) -> CostModel:
        return CostModel(
            model, card, layout, dtype=self.weights, kv_dtype="bfloat16", kernels=self.kernels
        )

    def run(self, arrivals: Sequence[Arrival]) -> tuple[np.ndarray, np.ndarray]:
        """Returns (TTFT, TPOT) in seconds of each request, as defined by the measured runs; nan for
        a request without TPOT. With several stages, returns the median of runs with slightly
        different arrivals."""
        if self.stages == 1:
            return self._run_once(arrivals)
        drawn = [self._run_once(_jittered(arrivals, draw)) for draw in range(DRAWS)]
        ttft, tpot = (np.median(values, axis=0) for values in zip(*drawn, strict=True))
        return ttft, tpot

    def _run_once(self, arrivals: Sequence[Arrival]) -> tuple[np.ndarray, np.ndarray]:
        front = self.constants.front_seconds
        shifted = [replace(item, at_seconds=item.at_seconds + front) for item in arrivals]
        if self.kv_tokens is not None:
            shifted = [
                replace(item, block_hashes=_own_blocks(number, item))
                for number, item in enumerate(shifted)
            ]
        outcomes = simulate(self.fleet(), shifted).outcomes
        unfinished = [item for item in outcomes if item.end != "finished"]
        if unfinished:
            raise RuntimeError(
                f"{len(unfinished)} requests did not finish, the first because:"
                f" {unfinished[0].reason}"
            )
        tpot = np.array([np.nan if item.tpot is None else item.tpot for item in outcomes])
        ttft = np.array([_ttft(item) for item in outcomes]) + front
        if self.step_seen:
            ttft = np.maximum(1e-3, ttft - self.step_seen * self._steps_at(arrivals, ttft, tpot))
        return ttft, tpot

    def _steps_at(
        self, arrivals: Sequence[Arrival], ttft: np.ndarray, tpot: np.ndarray
    ) -> np.ndarray:
        """Returns the seconds of the decode step that was running at each request's arrival."""
        costs = self.cost_model(geometry(self.model), self.constants.accelerator, self.layout)
        at, prompts, outputs = (
            np.array([getattr(item, name) for item in arrivals])
            for name in ("at_seconds", "prompt_tokens", "output_tokens")
        )
        first, each = at + ttft, np.nan_to_num(tpot)
        steps = np.zeros(len(at))
        for index, now in enumerate(at):
            running = (first <= now) & (first + each * (outputs - 1) > now)
            if running.any():
                held = prompts[running] + (now - first[running]) / each[running]
                steps[index] = costs.decode_of(
                    math.ceil(running.sum() / self.ranks), float(held.sum()) / self.ranks
                ).seconds
        return steps


def _jittered(arrivals: Sequence[Arrival], draw: int) -> list[Arrival]:
    """Returns the arrivals, each delayed by up to a millisecond, in the same order."""
    at = np.array([item.at_seconds for item in arrivals])
    later = np.random.default_rng(draw).uniform(0.0, JITTER_SECONDS, len(at))
    moved = np.maximum.accumulate(at + later)
    return [
        replace(item, at_seconds=float(seconds))
        for item, seconds in zip(arrivals, moved, strict=True)
    ]


def _own_blocks(number: int, arrival: Arrival) -> tuple[int, ...]:
    count = -(-(arrival.prompt_tokens + arrival.output_tokens) // BLOCK_TOKENS)
    return tuple(range(1 + (number << 20), 1 + (number << 20) + count))


def _ttft(outcome: RequestOutcome) -> float:
    assert outcome.ttft is not None
    return outcome.ttft


def a100() -> Accelerator:
    """Returns the A100 of the hardware table, with the memory that the driver reports and host
    times of an engine in Python as the start of fits."""
    card = accelerator("a100")
    host = replace(
        card.efficiency,
        step_seconds=5e-3,
        prefill_seconds=5e-3,
        sequence_seconds=2e-4,
        collective_bandwidth=0.4,
    )
    return replace(card, memory_bytes=80 * GIBI, efficiency=replace(host, large_bandwidth=0.4))


def starts() -> dict[str, SimulatedEngine]:
    """Returns the start values of each engine before fitting."""
    eager = {"step_seconds": 2e-3, "prefill_seconds": 2e-3, "sequence_seconds": 1e-5}
    # Cards without a link of their own; and steps that carry prompts are no captured graph: PyTorch
    # issues them operation by operation.
    apart = {
        "collective_seconds": 5e-5,
        "collective_bandwidth": 0.3,
        "prefill_launch_seconds": 5e-4,
    }
    ada, blackwell = accelerator("rtx-4090"), accelerator("rtx-pro-6000")
    return {
        "distserve": SimulatedEngine(
            "distserve", Constants(a100(), 5e-3), slots=1024, kernels=ON_A100
        ),
        "vllm": SimulatedEngine("vllm", Constants(a100(), 5e-3), slots=1024, kernels=ON_A100),
        "RTX4090/Llama-3.1-8B": SimulatedEngine(
            "chunked",
            Constants(
                replace(ada, memory_bytes=24 * GIBI, efficiency=replace(ada.efficiency, **eager))
            ),
            model="llama-3.1-8b",
            step_seen=0.5,
        ),
        # As its source's description of the run has it: two cards, each with half of the experts
        # and with sequences of its own, all stepping together; between them PCIe.
        "RTXPRO6000/Qwen3-30B-A3B-Instruct-2507": SimulatedEngine(
            "chunked",
            Constants(
                replace(
                    blackwell,
                    memory_bytes=96 * GIBI,
                    domain_devices=2,
                    efficiency=replace(blackwell.efficiency, **eager, **apart),
                )
            ),
            model="qwen3-30b-a3b",
            step_seen=0.5,
            slots=128,
            ranks=2,
        ),
    }

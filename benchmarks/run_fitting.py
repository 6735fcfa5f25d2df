"""Fits an engine's constants to one measured run.

In a run at a low rate, single steps can be identified (`from_lone_steps`). A request that arrived
while no prefill ran was prefilled alone, and its TTFT is the prefill plus the time in which no
device is busy. A request that arrived during another prefill got its first token one whole prefill
after the other request's, without this extra time, which separates the two parts. A request's TPOT
is the mean step of its batches, whose sizes follow from the run's times. The cost of requests that
arrived meanwhile is subtracted: their prefills in one pool, the fetches of their KV in two. A first
token waits for half a step. These few batches do not show how a step grows with its batch, so the
device's part is taken from the engine's published profile. The observations have the form of
`costs/fitting.py`.

In a crowded run (`from_replay`), the fit searches for the constants whose simulated run has the
measured TTFT and TPOT, request by request. Must not use held-out data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.engines import OPT, SimulatedEngine
from benchmarks.measured_runs import MeasuredRun
from jdisagg.costs.cost_model import CostModel, wire_bytes_per_token
from jdisagg.costs.fitting import Observation, bounded, descend, fit, sigma
from jdisagg.layout.axes import Layout

OUTSIDE = ("front_seconds", "link_bytes_per_second")
LONE = (
    "gemm_compute",
    "gemm_memory",
    "attention_compute",
    "attention_memory",
    "prefill_seconds",
    "step_seconds",
    "sequence_seconds",
)
COLLECTIVE = ("collective_bandwidth", "collective_seconds")
CROWDED = ("gemm_compute", "gemm_memory", "attention_memory", "step_seconds", "prefill_seconds")
FREE = {
    "distserve": (*LONE, *COLLECTIVE, *OUTSIDE),
    "vllm": (*LONE, "front_seconds"),
    "chunked": CROWDED,
    "chunked ranks": (*CROWDED, *COLLECTIVE),
}
# Seconds of a decode step of OPT-13B on one A100: (base, for each token of context, for each
# sequence), as DistServe's authors fitted them to steps of fewer than 95 sequences that are equally
# long, with no server around the engine (LLMServe/DistServe at 82831f1,
# simdistserve/estimators/profile_data, Apache-2.0).
PROFILES = {"distserve": (19.935e-3, 0.6269e-6, 38.51e-6), "vllm": (23.475e-3, 0.5929e-6, 60.73e-6)}
PROFILED_TOKENS = 60_000  # at once: what memory holds
# What a profile settles. The host's part of a step it only begins: a server adds its own.
SETTLED = ("gemm_memory", "attention_memory")
WARM_UP = 3  # requests: the first ones meet cold programs
LEAST_TOKENS = 50  # of a request whose TPOT tells of steps
TICK = 0.02  # seconds between looks at who decodes
TTFT_NOISE, TPOT_NOISE = 0.1, 0.05
LONG_WAIT = 5.0  # seconds that no engine with room lets a request wait


@dataclass(frozen=True, slots=True)
class Load:
    """Number of decoding sequences, their tokens, and the tokens of the longest sequence, at every
    tick."""

    at: np.ndarray
    sequences: np.ndarray
    contexts: np.ndarray
    longest: np.ndarray

    @classmethod
    def of(cls, run: MeasuredRun) -> "Load":
        at = np.arange(0.0, run.finish.max() + TICK, TICK)
        sequences, contexts, longest = np.zeros((3, len(at)))
        for first, finish, prompt, output in zip(
            run.first, run.finish, run.prompts, run.outputs, strict=True
        ):
            if output > 1:
                begin, end = int(first / TICK), int(finish / TICK) + 1
                sequences[begin:end] += 1
                held = prompt + np.linspace(1, output, end - begin)
                contexts[begin:end] += held
                longest[begin:end] = np.maximum(longest[begin:end], held)
        return cls(at, sequences, contexts, longest)

    def during(self, first: float, finish: float) -> tuple[float, float, float]:
        """Returns means of (sequences, tokens, tokens of the longest sequence) over an interval."""
        within = slice(int(first / TICK), int(finish / TICK) + 1)
        each = (self.sequences, self.contexts, self.longest)
        sequences, contexts, longest = (float(values[within].mean()) for values in each)
        return sequences, contexts, longest


@dataclass(frozen=True, slots=True)
class MeasuredPrefills:
    """(prompt tokens, seconds) of prompts that were prefilled alone, and of prompts that followed
    directly after another one."""

    alone: tuple[tuple[int, float], ...]
    behind: tuple[tuple[int, float], ...]


def prefills_of(run: MeasuredRun, one_pool: bool) -> MeasuredPrefills:
    alone, behind = [], []
    at, first = run.at, run.first
    for index in range(WARM_UP, len(at)):
        before = first[:index].max()
        if before < at[index] - TICK:
            decoding = (
                (first[:index] <= at[index])
                & (run.finish[:index] > at[index])
                & (run.outputs[:index] > 1)
            )
            wait = (
                float(np.mean(run.tpot[:index][decoding])) / 2
                if one_pool and decoding.any()
                else 0.0
            )
            alone.append((int(run.prompts[index]), float(run.ttft[index]) - wait))
        elif (
            first[index - 1] > at[index] + 0.01
            and at[index] - at[index - 1] > 0.012
            and first[: index - 1].max() < at[index - 1] - TICK
            and first[index] > first[index - 1] + 0.004
        ):
            behind.append((int(run.prompts[index]), float(first[index] - first[index - 1])))
    return MeasuredPrefills(tuple(alone), tuple(behind))


def steps_of(
    run: MeasuredRun, load: Load, stall: Callable[[int], float], one_pool: bool
) -> list[tuple[float, float, float, float]]:
    """Returns (sequences, their tokens, tokens of the longest, seconds) of mean steps. `stall`:
    seconds for which decode pauses when a prompt joins: while it is computed in one pool, or while
    its KV is fetched with two pools."""
    found = []
    half = 0.0 if one_pool else 0.5  # a hand-off waits for the step under way, and for its own KV
    for index in np.flatnonzero(run.outputs >= LEAST_TOKENS):
        begin, end = float(run.first[index]), float(run.finish[index])
        others = np.flatnonzero((run.first > begin + 1e-3) & (run.first <= end + TICK))
        stalled = sum(stall(int(run.prompts[other])) for other in others) + (
            0.0 if one_pool else stall(int(run.prompts[index]))
        )
        found.append(
            (
                *load.during(begin, end),
                (end - begin - stalled) / (int(run.outputs[index]) - 1 + half),
            )
        )
    return found


def from_lone_steps(engine: SimulatedEngine, run: MeasuredRun, rounds: int = 3) -> SimulatedEngine:
    """Returns the engine with constants fitted to a run at a low rate."""
    one_pool = engine.kind == "vllm"
    layouts = Layout(tp=1 if one_pool else engine.prefill_tp), Layout(tp=engine.decode_tp)
    names = tuple(name for name in FREE[engine.kind] if name not in OUTSIDE + SETTLED)
    prefills, load = prefills_of(run, one_pool), Load.of(run)
    profiled = fit(
        engine.constants.accelerator,
        published_steps(engine, layouts[1]),
        (*SETTLED, "step_seconds", "sequence_seconds"),
    )
    front, link = engine.constants.front_seconds, engine.constants.link_bytes_per_second
    card = profiled
    for _ in range(rounds):
        computing = engine.cost_model(OPT, card, layouts[0])
        seen = [
            Observation(
                OPT,
                layouts[0],
                "prefill",
                ((tokens, 0),),
                max(1e-3, seconds - front),
                kernels=engine.kernels,
            )
            for tokens, seconds in prefills.alone
        ]
        fetched = wire_bytes_per_token(OPT, computing.kv_value_bytes) / link

        def stall(tokens: int, model: CostModel = computing, fetched: float = fetched) -> float:
            return model.prefill([(tokens, 0)]).seconds if one_pool else tokens * fetched

        for sequences, tokens, longest, seconds in steps_of(run, load, stall, one_pool):
            batch = max(1, round(sequences))
            seen.append(
                Observation(
                    OPT,
                    layouts[1],
                    "decode",
                    _rows(batch, tokens, longest),
                    seconds,
                    kernels=engine.kernels,
                )
            )
        card = fit(profiled, seen, names)
        computing = engine.cost_model(OPT, card, layouts[0])
        late = [
            computing.prefill([(tokens, 0)]).seconds - seconds
            for tokens, seconds in prefills.behind
        ]
        front = max(0.0, front + float(np.median(late)))
        if not one_pool:
            link = _link_speed(run, load, engine.cost_model(OPT, card, layouts[1]))
    return replace(
        engine,
        constants=replace(
            engine.constants, accelerator=card, front_seconds=front, link_bytes_per_second=link
        ),
    )


def _link_speed(run: MeasuredRun, load: Load, decode: CostModel) -> float:
    """Fits the speed of the link from requests with few tokens. The time that remains of their
    decode without the steps and half a step of waiting is divided by the bytes fetched meanwhile,
    by least squares through the origin."""
    bytes_per_token = wire_bytes_per_token(decode.geometry, decode.kv_value_bytes)
    moved, left = [], []
    for index in np.flatnonzero((run.outputs >= 2) & (run.outputs <= 16)):
        sequences, tokens, longest = load.during(float(run.first[index]), float(run.finish[index]))
        step = decode.decode_of(max(1, round(sequences)), tokens, longest).seconds
        others = (run.first > run.first[index] + 1e-3) & (run.first <= run.finish[index])
        moved.append(float(run.prompts[index] + run.prompts[others].sum()) * bytes_per_token)
        left.append(
            float(run.finish[index] - run.first[index]) - (int(run.outputs[index]) - 0.5) * step
        )
    sizes, seconds = np.array(moved), np.array(left)
    return float((sizes**2).sum() / max(1e-9, (sizes * seconds).sum()))


def _rows(batch: int, tokens: float, longest: float) -> tuple[tuple[int, int], ...]:
    """Returns a batch's contexts: the longest one, and equal lengths for the others."""
    if batch == 1:
        return ((1, int(tokens)),)
    return ((1, int(longest)), (batch - 1, max(1, int((tokens - longest) / (batch - 1)))))


def published_steps(engine: SimulatedEngine, layout: Layout) -> list[Observation]:
    """Returns decode steps from the profile that the engine's authors published, for equally long
    sequences, as many as memory holds."""
    base, each_token, each_sequence = PROFILES[engine.kind]
    return [
        Observation(
            OPT,
            layout,
            "decode",
            ((batch, context),),
            base + each_token * batch * context + each_sequence * batch,
            kernels=engine.kernels,
        )
        for batch in (1, 4, 16, 32, 64)
        for context in (128, 512, 1024, 1536)
        if batch * context <= PROFILED_TOKENS
    ]


# ---- a crowded run


def from_replay(
    engine: SimulatedEngine,
    run: MeasuredRun,
    count: int,
    rounds: int = 5,
    start: SimulatedEngine | None = None,
) -> SimulatedEngine:
    """Returns the engine with the constants whose simulated run is nearest to the first `count`
    requests of a measured run. Errors are logarithmic, TTFT with a scale of 10 % and TPOT of 5 %. A
    prior pulls constants to those of `engine`, as in costs/fitting.py. `start`: start of the
    search, if not `engine`."""
    names = _free(engine)
    centre = _logarithms(engine, names)
    width = np.array([sigma(name) for name in names])

    def against(point: np.ndarray) -> np.ndarray:
        ttft, tpot = with_constants(engine, names, point).run(run.arrivals)
        first = np.log(np.maximum(ttft, 1e-3) / run.ttft)[:count] / TTFT_NOISE
        each = np.log(tpot / run.tpot)[:count] / TPOT_NOISE
        return np.concatenate([first, each, (point - centre) / width])

    _, point = descend(against, _logarithms(start or engine, names), rounds=rounds, step=0.1)
    return with_constants(engine, names, point)


def kv_tokens_seen(run: MeasuredRun, count: int) -> int:
    """Returns the most KV, in tokens, that an engine held when it admitted one of the first `count`
    requests, before any of them had to wait. This estimates its capacity. (Later, preempted
    requests may hold none.) Contexts are assumed to grow evenly between first and last token."""
    late = np.flatnonzero(run.queued[:count] > LONG_WAIT)
    known = int(late[0]) if len(late) else count
    admitted, most = run.at + run.queued, 0.0
    for now in admitted[:known]:
        held = (admitted <= now) & (run.finish > now)
        held[known:] = False
        grown = np.clip((now - run.first) / np.maximum(run.finish - run.first, 1e-9), 0, 1) * (
            run.outputs - 1
        )
        most = max(most, float(((run.prompts + grown) * held).sum()))
    return int(most)


# ---- constants by name


def with_constants(
    engine: SimulatedEngine, names: Sequence[str], point: np.ndarray
) -> SimulatedEngine:
    values = {
        name: bounded(name, float(value)) for name, value in zip(names, np.exp(point), strict=True)
    }
    outside = {name: values.pop(name) for name in OUTSIDE if name in values}
    card = engine.constants.accelerator
    card = replace(card, efficiency=replace(card.efficiency, **values))
    return replace(engine, constants=replace(engine.constants, accelerator=card, **outside))


def _free(engine: SimulatedEngine) -> tuple[str, ...]:
    return FREE[engine.kind if engine.ranks == 1 else f"{engine.kind} ranks"]


def report_constants(engine: SimulatedEngine) -> dict[str, float]:
    names = _free(engine)
    return {
        name: float(f"{value:.4g}")
        for name, value in zip(names, np.exp(_logarithms(engine, names)), strict=True)
    }


def from_report(engine: SimulatedEngine, values: dict[str, float]) -> SimulatedEngine:
    """Returns the engine with constants in the form of `report_constants`."""
    names = tuple(values)
    return with_constants(engine, names, np.log([values[name] for name in names]))


def _logarithms(engine: SimulatedEngine, names: Sequence[str]) -> np.ndarray:
    constants, card = engine.constants, engine.constants.accelerator
    return np.log(
        [
            max(1e-9, getattr(constants if name in OUTSIDE else card.efficiency, name))
            for name in names
        ]
    )

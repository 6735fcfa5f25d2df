"""Computes upper bounds on candidates' request rates, to rank candidates before simulation.

A candidate is a mode, layouts and numbers of instances. A bound is the highest request rate of the
whole candidate that one resource or objective allows. The dp ranks that prefill share an M/G/c
queue whose waiting time has an exponential tail. All sequences of a decode rank are assumed to have
the mean context length. Bursts, packing and scheduling are ignored, because the simulator models
them afterwards. Has no side effects."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jdisagg.config import Mode
from jdisagg.costs.cost_model import CostModel, wire_bytes_per_token
from jdisagg.costs.hardware import Link
from jdisagg.costs.kv_facts import sent_part
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.simulator.planning.candidates import Candidate, Fitting, Site, handoff_path
from jdisagg.simulator.planning.fused import FusedChunks, FusedPace, StepTable, each_once
from jdisagg.simulator.report import SloLimits
from jdisagg.simulator.workloads import Arrival

SAMPLE = 128  # number of requests whose times are estimated one by one
HEADROOM = 1.1  # factor on KV pages for pages allocated ahead and prompts in transfer
FULL = 0.98  # usable fraction of a server's time


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of a plan: at least the fraction `attainment` of all requests meets the limits on
    TTFT and on TPOT, in seconds."""

    ttft_seconds: float
    tpot_seconds: float
    attainment: float = 0.9

    def __post_init__(self) -> None:
        for name in ("ttft_seconds", "tpot_seconds"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(
                    f"goal: {name} must be positive seconds, got {getattr(self, name)!r}"
                )
        if not 0 < self.attainment < 1:
            raise ConfigError(
                f"goal: attainment must be between 0 and 1, got {self.attainment!r}; 0.9 is usual"
            )

    @property
    def slo(self) -> SloLimits:
        return SloLimits(self.ttft_seconds, self.tpot_seconds)


@dataclass(frozen=True)
class Demand:
    """The request lengths of a workload, in tokens."""

    prompts: np.ndarray
    outputs: np.ndarray
    sample_prompts: np.ndarray
    sample_outputs: np.ndarray

    @classmethod
    def of(cls, arrivals: Sequence[Arrival]) -> "Demand":
        if not arrivals:
            raise ConfigError("the workload has no requests to plan for; give at least one")
        prompts = np.array([item.prompt_tokens for item in arrivals])
        outputs = np.array([item.output_tokens for item in arrivals])
        order = np.argsort(prompts, kind="stable")
        chosen = order[np.linspace(0, len(order) - 1, min(SAMPLE, len(order))).astype(int)]
        return cls(prompts, outputs, prompts[chosen], outputs[chosen])

    @property
    def longest_tokens(self) -> int:
        return int((self.prompts + self.outputs).max())

    @property
    def prompt_mean(self) -> float:
        return float(self.prompts.mean())

    @property
    def steps_mean(self) -> float:
        """Mean number of decode steps of a request. Prefill computes the first output token, so a
        request has one step less than output tokens."""
        return float((self.outputs - 1).mean())

    @property
    def context_mean(self) -> float:
        steps = self.outputs - 1
        if not steps.sum():
            return self.prompt_mean
        return float(((self.prompts + self.outputs / 2) * steps).sum() / steps.sum())


@dataclass(frozen=True, slots=True)
class Bounds:
    """The highest request rate of a whole candidate under each limit, in requests per second.
    `link_share`: fraction of the link's achieved bandwidth that one request per second needs."""

    limits: tuple[tuple[str, float], ...]
    link_share: float = 0.0

    @property
    def rate(self) -> float:
        return self.binding[1]

    @property
    def binding(self) -> tuple[str, float]:
        return min(self.limits, key=lambda limit: limit[1])


class Estimator:
    """Computes upper bounds on the request rates of candidates, for one site and workload. `fused`:
    whether chunked prefill runs a chunk and a decode step as one step. If not, chunks run between
    decode steps."""

    def __init__(
        self,
        site: Site,
        demand: Demand,
        goal: Goal,
        fitting: Sequence[Fitting],
        codec: str = "none",
        fused: bool = False,
    ) -> None:
        self.site, self.demand, self.goal, self.codec = site, demand, goal, codec
        self.fused = fused
        self.models = {item.layout: item.model for item in fitting}
        self.rooms = {item.layout: item.kv_tokens for item in fitting}
        self._known: dict[tuple[object, ...], tuple[tuple[str, float], ...]] = {}
        self._times: dict[tuple[Layout, int], np.ndarray] = {}
        self._steps: dict[tuple[Layout, int, bool], FusedChunks] = {}
        self._tables: dict[Layout, StepTable] = {}

    def under(self, goal: Goal) -> "Estimator":
        other = copy.copy(self)
        other.goal, other._known = goal, {}
        return other

    def bounds(self, candidate: Candidate) -> Bounds:
        """Returns the bounds of a candidate. Raises KeyError if one of its layouts does not fit the
        model or the memory."""
        decode_ranks = candidate.decode_instances * candidate.decode.dp
        if candidate.prefill is None:
            key = (candidate.decode, candidate.chunk_tokens, decode_ranks)
            if self.fused and candidate.mode is Mode.CHUNKED and self.demand.steps_mean:
                gathers = candidate.gather_steps > 0
                limits = self._once(("fused", gathers, *key), lambda: self._fused(*key, gathers))
            else:
                limits = self._once(key, lambda: self._one_pool(*key))
            return Bounds(_times(decode_ranks, limits))
        prefill_ranks = candidate.prefill_instances * candidate.prefill.dp
        link, parallel = handoff_path(self.site, candidate)
        first = (candidate.prefill, candidate.chunk_tokens, prefill_ranks)
        second = (candidate.prefill, candidate.decode, candidate.chunk_tokens, link, parallel)
        model = self.models[candidate.prefill]
        wire = (
            wire_bytes_per_token(model.geometry, model.kv_value_bytes, self.codec)
            * self.demand.prompt_mean
            * sent_part(model.geometry, max(1, int(self.demand.prompt_mean)))
        )
        reached = (
            link.bytes_per_second * link.efficiency * parallel * min(prefill_ranks, decode_ranks)
        )
        limits = _times(
            prefill_ranks, self._once(("prefill", *first), lambda: self._prefill(*first))
        )
        limits += ((f"link {link.name}", reached / wire),)
        limits += _times(
            decode_ranks, self._once(("decode", *second), lambda: self._decode(*second))
        )
        return Bounds(limits, wire / reached)

    def _once(
        self, key: tuple[object, ...], make: Callable[[], tuple[tuple[str, float], ...]]
    ) -> tuple[tuple[str, float], ...]:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def prefill_seconds(self, layout: Layout, chunk: int) -> np.ndarray:
        """Returns the seconds to prefill each sampled prompt. A long prompt takes several chunks. A
        short prompt is assumed to share a chunk with prompts of equal length."""
        if (layout, chunk) not in self._times:
            model = self.models[layout]
            self._times[layout, chunk] = each_once(
                self.demand.sample_prompts, lambda tokens: _prefill_one(model, tokens, chunk)
            )
        return self._times[layout, chunk]

    def _one_pool(self, layout: Layout, chunk: int, ranks: int) -> tuple[tuple[str, float], ...]:
        model, demand, goal = self.models[layout], self.demand, self.goal
        times, tokens = self.prefill_seconds(layout, chunk), self.rooms[layout]
        each, context, steps = float(times.mean()), demand.context_mean, demand.steps_mean
        chunks = np.ceil(demand.sample_prompts / chunk)

        def free(rate: float, step: float) -> float:
            together = min(layout.dp, max(1.0, rate * layout.dp * (each + step)))
            return 1 - rate * layout.dp * each / together

        def batch(rate: float) -> float:
            def following(count: float) -> float:
                step = _step(model, count, context)
                left = free(rate, step)
                return rate * steps * step / left if left > 0 else math.inf

            return _settled(following)

        def tpot_met(rate: float) -> bool:
            if not steps:
                return True  # outputs of one token have no TPOT
            count = batch(rate)
            step = _step(model, count, context) if count < math.inf else math.inf
            return count < math.inf and step <= goal.tpot_seconds * free(rate, step)

        def pages_met(rate: float) -> bool:
            return batch(rate) * context * HEADROOM <= tokens

        def ttft_met(rate: float) -> bool:
            count = batch(rate)
            between = _step(model, count, context) if 0.5 <= count < math.inf else 0.0
            waits = times * (0.5 if layout.dp > 1 else 0.0)  # waits for another rank's chunk
            return (
                count < math.inf
                and _attained(times + waits + chunks * between, rate, ranks, goal)
                >= goal.attainment
            )

        most = FULL / each
        tests = (
            ("compute", lambda rate: batch(rate) < math.inf),
            ("TTFT", ttft_met),
            ("TPOT", tpot_met),
            ("KV memory", pages_met),
        )
        return tuple((name, _largest(met, most)) for name, met in tests)

    def _fused(
        self, layout: Layout, chunk: int, ranks: int, gathers: bool
    ) -> tuple[tuple[str, float], ...]:
        demand, goal, tokens = self.demand, self.goal, self.rooms[layout]
        key = (layout, chunk, gathers)
        if key not in self._steps:
            if layout not in self._tables:
                self._tables[layout] = StepTable(self.models[layout])
            self._steps[key] = FusedChunks(
                self._tables[layout],
                chunk,
                demand.sample_prompts,
                demand.context_mean,
                demand.steps_mean,
                gathers=gathers,
            )
        steps = self._steps[key]

        def kept(rate: float, holds: Callable[[FusedPace], bool]) -> bool:
            pace = steps.pace(rate)
            return pace is not None and holds(pace)

        def ttft_met(pace: FusedPace, rate: float) -> bool:
            part = _attained(pace.held, rate, ranks, goal, pace.spent)
            return part >= goal.attainment

        def tpot_met(pace: FusedPace) -> bool:
            part = steps.within(pace, goal.tpot_seconds, demand.sample_outputs)
            return part >= goal.attainment

        def pages_met(pace: FusedPace) -> bool:
            return pace.sequences * demand.context_mean * HEADROOM <= tokens

        most = 1 / float(self.prefill_seconds(layout, chunk).mean())
        while steps.pace(most) is not None:
            most *= 2  # chunks in a step's idle arithmetic take no extra time
        tests = (
            ("compute", lambda rate: kept(rate, lambda pace: pace.busy <= FULL)),
            ("TTFT", lambda rate: kept(rate, lambda pace: ttft_met(pace, rate))),
            ("TPOT", lambda rate: kept(rate, tpot_met)),
            ("KV memory", lambda rate: kept(rate, pages_met)),
        )
        # 11 bisections: a thousandth is more precise than this arithmetic.
        return tuple((name, _largest(met, most, 11)) for name, met in tests)

    def _prefill(self, layout: Layout, chunk: int, ranks: int) -> tuple[tuple[str, float], ...]:
        times, dp, goal = self.prefill_seconds(layout, chunk), layout.dp, self.goal
        mean, sharing = float(times.mean()), max(1.0, chunk / self.demand.prompt_mean)
        uneven = (_longest(times, dp) / mean - 1) / math.sqrt(sharing)
        # Seconds of the instance per prompt. A prompt may enter the first of several pipeline
        # stages when the prompt before it leaves this stage.
        occupied = times * ((1 + uneven) / dp / layout.pp)
        most = FULL / float(occupied.mean()) / dp
        # The chunks of a prompt follow each other through the stages.
        chunks = np.ceil(self.demand.sample_prompts / chunk)
        times = times * (1 + (layout.pp - 1) / chunks) / layout.pp

        def ttft_met(rate: float) -> bool:
            together = _batch(times, dp, dp * rate)
            with_others = _longest_with(times, together - 1) if together > 1 else times
            # Wait for the running batch.
            running = dp * rate * _longest(times, together) ** 2 / (2 * together) if dp > 1 else 0.0
            return (
                _attained(occupied, dp * rate, ranks // dp, goal, with_others + running)
                >= goal.attainment
            )

        return ("prefill compute", most), ("TTFT", _largest(ttft_met, most))

    def _decode(
        self, prefill: Layout, layout: Layout, chunk: int, link: Link, parallel: int
    ) -> tuple[tuple[str, float], ...]:
        model, demand, goal = self.models[layout], self.demand, self.goal
        prompts, steps = demand.sample_prompts, demand.sample_outputs - 1
        one, two = (model.transfer(tokens, link, self.codec, parallel).seconds for tokens in (1, 2))
        moved = one + (two - one) * (prompts - 1)  # a line: latency and bytes
        exposed = exposed_seconds(moved, self.prefill_seconds(prefill, chunk), prompts, chunk)
        allowed = np.where(steps > 0, goal.tpot_seconds - exposed / np.maximum(steps, 1), math.inf)
        step_limit = float(np.quantile(allowed, 1 - goal.attainment, method="lower"))
        context = demand.context_mean
        rooms = self.rooms[layout] / (context * HEADROOM)
        most = _largest(
            lambda count: _step(model, count, context) <= step_limit, max(1.0, 4 * rooms)
        )
        name = "TPOT" if step_limit > 0.9 * goal.tpot_seconds else f"hand-off over {link.name}"
        return ("KV memory", _rate_of_batch(model, rooms, demand)), (
            name,
            _rate_of_batch(model, most, demand),
        )


# ---- parts


def _step(model: CostModel, count: float, context: float) -> float:
    count /= model.stages
    whole = max(1, math.ceil(count))
    return model.decode_seconds(whole, max(1.0, count) * context)


def _rate_of_batch(model: CostModel, count: float, demand: Demand) -> float:
    if not demand.steps_mean:
        return math.inf
    return (
        count / (demand.steps_mean * _step(model, count, demand.context_mean))
        if count >= 1
        else 0.0
    )


def _times(ranks: int, limits: tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
    return tuple((name, ranks * rate) for name, rate in limits)


def exposed_seconds(
    moved: np.ndarray, prefill: np.ndarray, prompts: np.ndarray, chunk: int
) -> np.ndarray:
    """Returns for each prompt the seconds of its KV transfer that do not overlap with its prefill.

    The KV of the last chunk is always transferred after the prefill. If the link is slower than the
    prefill, part of the KV of earlier chunks is also transferred after the prefill."""
    return np.maximum(moved * np.minimum(prompts, chunk) / prompts, moved - prefill)


def alone_seconds(model: CostModel, tokens: int, chunk: int) -> float:
    done, seconds = 0, 0.0
    while done < tokens:
        new = min(chunk, tokens - done)
        seconds += model.prefill([(new, done)]).seconds
        done += new
    return seconds


def _prefill_one(model: CostModel, tokens: int, chunk: int) -> float:
    if tokens <= chunk:
        together = max(1, min(8, chunk // tokens))
        return model.prefill([(tokens, 0)] * together).seconds / together
    return alone_seconds(model, tokens, chunk)


def _longest(times: np.ndarray, count: float) -> float:
    ordered = np.sort(times)
    below = (np.arange(len(ordered) + 1) / len(ordered)) ** count
    return float(ordered @ np.diff(below))


def _longest_with(times: np.ndarray, count: float) -> np.ndarray:
    order = np.argsort(times)
    ordered = times[order]
    below = (np.arange(len(ordered) + 1) / len(ordered)) ** count
    # Draws up to a time count as this time, and longer draws as themselves.
    longer = np.cumsum((ordered * np.diff(below))[::-1])[::-1]
    found = np.empty_like(ordered)
    found[order] = ordered * below[1:] + np.append(longer[1:], 0.0)
    return found


def _batch(times: np.ndarray, ranks: int, rate: float, rounds: int = 30) -> float:
    count = 1.0
    for _ in range(rounds):
        count = min(float(ranks), max(1.0, rate * _longest(times, count)))
    return count


def _attained(
    times: np.ndarray, rate: float, servers: int, goal: Goal, spent: np.ndarray | None = None
) -> float:
    mean = float(times.mean())
    busy = rate * mean
    if busy >= 1:
        return 0.0
    chance = busy ** ((2 * (servers + 1)) ** 0.5 - 1)
    # Mean wait of requests that wait at all.
    waiting = float((times**2).mean()) / mean / (2 * servers * (1 - busy))
    left = goal.ttft_seconds - (times if spent is None else spent)
    late = chance * np.exp(-np.maximum(left, 0) / waiting)
    return float(np.where(left >= 0, 1 - late, 0.0).mean())


def _settled(next_count: Callable[[float], float], rounds: int = 60) -> float:
    count = 0.0
    for _ in range(rounds):
        following = next_count(count)
        if following > 1e6:
            return math.inf
        if abs(following - count) <= 1e-3 * max(1.0, count):
            return following
        count = following
    return count if next_count(count) <= 1.05 * count else math.inf


def _largest(met: Callable[[float], bool], most: float, rounds: int = 24) -> float:
    if met(most):
        return most
    low, high = 0.0, most
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if met(middle) else (low, middle)
    return low if low > most * 1e-6 else 0.0

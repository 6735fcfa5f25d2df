"""Computes ceilings on candidates' request rates, which order candidates before they are stepped.

A ceiling is the highest rate that one resource allows whatever the schedule: the arithmetic of all
prompts, the link, and the batch that memory and the limit on TPOT allow. All sequences of a decode
rank are assumed to have the mean context length. Queues, packing and scheduling are ignored,
because stepping models them. Has no side effects."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jdisagg.config import Mode
from jdisagg.costs.cost_model import CostModel, wire_bytes_per_token
from jdisagg.costs.hardware import Link
from jdisagg.costs.kv_facts import sent_part
from jdisagg.costs.speeds import exposed_seconds
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.simulator.planning.candidates import Candidate, Fitting, Site, handoff_path
from jdisagg.simulator.report import SloLimits
from jdisagg.simulator.workloads import Arrival

SAMPLE = 128  # number of requests whose times are estimated one by one
HEADROOM = 1.1  # factor on KV pages for pages allocated ahead and prompts in transfer


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
    """Ceilings on the request rate of a whole candidate, in requests per second, by their names.
    `link_share`: fraction of the link's achieved bandwidth that one request per second needs."""

    limits: tuple[tuple[str, float], ...]
    link_share: float = 0.0

    @property
    def rate(self) -> float:
        return self.binding[1]

    @property
    def binding(self) -> tuple[str, float]:
        return min(self.limits, key=lambda limit: limit[1])


class RateCeilings:
    """Computes ceilings on the request rates of candidates, for one site and workload.

    Attributes:
        models, decodes: Cost model of each layout, on the accelerators that prefill and on those
            that decode.
        rooms: Number of KV tokens of a dp rank of each layout that decodes.
    """

    def __init__(
        self,
        site: Site,
        demand: Demand,
        goal: Goal,
        fitting: Sequence[Fitting],
        codec: str = "none",
        decoding: Sequence[Fitting] = (),
        fused: bool = True,
    ) -> None:
        self.site, self.demand, self.goal, self.codec = site, demand, goal, codec
        self.fused = fused
        self.fitting, self.decoding = list(fitting), list(decoding)
        self.models = {item.layout: item.model for item in fitting}
        self.decodes = {item.layout: item.model for item in decoding or fitting}
        self.rooms = {item.layout: item.kv_tokens for item in decoding or fitting}
        self._times: dict[tuple[Layout, int], np.ndarray] = {}
        self._rates: dict[tuple[Layout, float], float] = {}

    def bounds(self, candidate: Candidate) -> Bounds:
        """Raises KeyError if a layout of the candidate does not fit the model or the memory."""
        layout, prefill = candidate.decode, candidate.prefill
        decode_ranks = candidate.decode_instances * layout.dp
        if prefill is None:
            limits = self._one_pool(candidate)
            return Bounds(tuple((name, decode_ranks * rate) for name, rate in limits))
        prefill_ranks = candidate.prefill_instances * prefill.dp
        room = self._sequences(layout)
        memory = ("KV memory", decode_ranks * self._rate_of_batch(layout, room))
        link, parallel = handoff_path(self.site, candidate)
        wire = self._wire_bytes(prefill)
        lanes = parallel * min(prefill_ranks, decode_ranks)
        reached = link.bytes_per_second * link.efficiency * lanes
        times = self.prefill_seconds(prefill, candidate.chunk_tokens)
        # All dp ranks wait for the longest prompt on any of them.
        sharing = max(1.0, candidate.chunk_tokens / self.demand.prompt_mean)
        mean = float(times.mean()) + (_longest(times, prefill.dp) - times.mean()) / sharing**0.5
        step_limit = self._step_limit(candidate, link, parallel)
        name = "TPOT" if step_limit > 0.9 * self.goal.tpot_seconds else f"hand-off over {link.name}"
        limits = (
            ("prefill compute", prefill_ranks * prefill.pp / mean),
            (f"link {link.name}", reached / wire),
            memory,
            (name, decode_ranks * self._rate_within(layout, step_limit)),
        )
        return Bounds(limits, wire / reached)

    def _one_pool(self, candidate: Candidate) -> tuple[tuple[str, float], ...]:
        """Returns the rates of a dp rank with the most prompt tokens per step that a chunk, KV
        memory and the limit on TPOT allow. A chunk holds one prompt, or the tokens that arrive in a
        step if these are more. Chunks of the dp ranks come at times of their own, and each extends
        the step of all ranks."""
        layout, chunk, demand = candidate.decode, candidate.chunk_tokens, self.demand
        model, prompt, steps = self.decodes[layout], demand.prompt_mean, demand.steps_mean
        ranks = 1 if candidate.gather_steps else layout.dp
        fused = self.fused and candidate.mode is Mode.CHUNKED

        def step(tokens: float) -> float:
            sequences, new = tokens * steps / prompt, round(min(chunk, max(prompt, tokens)))
            alone = self._step(layout, sequences) if steps else 0.0
            if fused:
                context, pairs = sequences * demand.context_mean, model.pairs(new) * prompt / new
                others = round((layout.dp - 1) * (tokens + sequences))
                mixed = model.mixed_of(new, pairs, new, 1, round(sequences), context, others)
                added = max(0.0, mixed.seconds - alone)
            else:
                added = model.prefill([(new, 0)]).seconds
            return alone + added * (1 - (1 - min(1.0, tokens / new)) ** ranks)

        room = self._sequences(layout) * prompt / steps if steps else math.inf
        tpot = self.goal.tpot_seconds
        limits = (
            ("compute", chunk),
            *((("KV memory", room),) if room < chunk else ()),
            ("TPOT", _largest(lambda tokens: not steps or step(tokens) <= tpot, chunk)),
        )
        return tuple((name, tokens / prompt / step(tokens)) for name, tokens in limits)

    def prefill_seconds(self, layout: Layout, chunk: int) -> np.ndarray:
        """Returns the seconds to prefill each sampled prompt. A long prompt takes several chunks. A
        short prompt is assumed to share a chunk with prompts of equal length."""
        if (layout, chunk) not in self._times:
            model = self.models[layout]
            lengths, places = np.unique(self.demand.sample_prompts, return_inverse=True)
            seconds = [_prefill_one(model, tokens, chunk) for tokens in lengths.tolist()]
            self._times[layout, chunk] = np.array(seconds)[places]
        return self._times[layout, chunk]

    def _wire_bytes(self, layout: Layout) -> float:
        model, mean = self.models[layout], self.demand.prompt_mean
        each = wire_bytes_per_token(model.geometry, model.kv_value_bytes, self.codec)
        return each * mean * sent_part(model.geometry, max(1, int(mean)))

    def _step_limit(self, candidate: Candidate, link: Link, parallel: int) -> float:
        """Returns the longest decode step with which enough requests meet the limit on TPOT after
        the part of the hand-off that is exposed."""
        assert candidate.prefill is not None
        goal, prompts = self.goal, self.demand.sample_prompts
        steps, chunk = self.demand.sample_outputs - 1, candidate.chunk_tokens
        model = self.decodes[candidate.decode]
        one, two = (model.transfer(tokens, link, self.codec, parallel).seconds for tokens in (1, 2))
        moved = one + (two - one) * (prompts - 1)  # a line: latency and bytes
        prefill = self.prefill_seconds(candidate.prefill, chunk)
        exposed = exposed_seconds(moved, prefill, np.ceil(prompts / chunk))
        allowed = np.where(steps > 0, goal.tpot_seconds - exposed / np.maximum(steps, 1), math.inf)
        return float(np.quantile(allowed, 1 - goal.attainment, method="lower"))

    def _rate_within(self, layout: Layout, step_limit: float) -> float:
        key = layout, step_limit
        if key not in self._rates:
            room = max(1.0, self._sequences(layout))
            most = _largest(lambda count: self._step(layout, count) <= step_limit, room)
            met = self._step(layout, 1.0) <= step_limit
            self._rates[key] = self._rate_of_batch(layout, most) if met else 0.0
        return self._rates[key]

    def _sequences(self, layout: Layout) -> float:
        return self.rooms[layout] / (self.demand.context_mean * HEADROOM)

    def _rate_of_batch(self, layout: Layout, count: float) -> float:
        if not self.demand.steps_mean:
            return math.inf
        return count / (self.demand.steps_mean * self._step(layout, count)) if count >= 1 else 0.0

    def _step(self, layout: Layout, count: float) -> float:
        model = self.decodes[layout]
        count /= model.stages
        whole = max(1, math.ceil(count))
        return model.decode_seconds(whole, max(1.0, count) * self.demand.context_mean)


def alone_seconds(model: CostModel, tokens: int, chunk: int) -> float:
    chunks = [(min(chunk, tokens - done), done) for done in range(0, tokens, chunk)]
    return sum([model.prefill([one]).seconds for one in chunks])


def _prefill_one(model: CostModel, tokens: int, chunk: int) -> float:
    if tokens <= chunk:
        together = max(1, min(8, chunk // tokens))
        return model.prefill([(tokens, 0)] * together).seconds / together
    return alone_seconds(model, tokens, chunk)


def _largest(met: Callable[[float], bool], most: float, rounds: int = 11) -> float:
    if met(most):
        return most
    low, high = 0.0, most
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if met(middle) else (low, middle)
    return high


def _longest(times: np.ndarray, count: float) -> float:
    """The mean of the longest of `count` draws."""
    ordered = np.sort(times)
    below = (np.arange(len(ordered) + 1) / len(ordered)) ** count
    return float(ordered @ np.diff(below))

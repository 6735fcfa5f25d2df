"""Answers the guide's question: compares three modes on the same workload and accelerators.

Unified instances prefill whole prompts between decode steps. Chunked instances prefill in pieces,
each within a decode step. Disaggregated instances prefill and decode on separate meshes joined by a
link. Every fourth prompt is long, and its prefill delays other requests. The answer has the
planner's stepped rate of each mode (`advice`), figures of a simulation, and the times of the first
requests' tokens. Has no side effects."""

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

import msgspec

from jdisagg.config import Mode
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import link
from jdisagg.dispatch.frontend import ServingPath
from jdisagg.errors import InvalidRequestError, JdisaggError
from jdisagg.guide.advice import (
    GuideAdvice,
    ModeAdvice,
    Objectives,
    Simulated,
    Workplace,
    advice,
    carried,
    verdict_of,
)
from jdisagg.guide.facts import GUIDE_HARDWARE, GUIDE_LINKS, GUIDE_MODELS, check_choice
from jdisagg.messages.ports import SessionCall, SessionReport
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.request import Request, StreamEvent
from jdisagg.simulator.cluster import SimulatedCluster
from jdisagg.simulator.fleet import INSTANCE, Fleet, Pool
from jdisagg.simulator.planning.candidates import Candidate
from jdisagg.simulator.planning.verdict import FUSED
from jdisagg.simulator.report import Percentiles, RequestOutcome, SloLimits, summarise
from jdisagg.simulator.run import simulate
from jdisagg.simulator.timeline import gap_runs
from jdisagg.simulator.workloads import Arrival, Fixed, Mixture, poisson

SHORT_TOKENS = 200
LONG_PART = 0.25
SECONDS = 12.0
FEWEST_REQUESTS, MOST_REQUESTS = 24, 160
SHOWN_REQUESTS = 36
SHOWN_RUNS = 48
GUIDE_INSTANCES = (2, 4, 8)
GUIDE_CHUNKS = (256, 512, 1024, 2048, 4096, 8192)

Asked = TypeVar("Asked")


class GuideQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The user's choices.

    Attributes:
        instances: Number of instances of the smallest layout in which the model fits.
        prompt_tokens: Tokens of each long prompt.
        link: Name of the link between prefill and decode instances.
    """

    model: str = "llama-3.1-8b"
    hardware: str = "h100"
    instances: int = 2
    prompt_tokens: Annotated[int, msgspec.Meta(ge=256, le=32768)] = 4096
    output_tokens: Annotated[int, msgspec.Meta(ge=16, le=1024)] = 128
    rate: Annotated[float, msgspec.Meta(ge=0.5, le=64.0)] = 4.0
    link: str = "infiniband-ndr"
    chunk_tokens: int = 512
    ttft_seconds: Annotated[float, msgspec.Meta(ge=0.01, le=600.0)] = 1.0
    tpot_seconds: Annotated[float, msgspec.Meta(ge=0.001, le=10.0)] = 0.02

    def __post_init__(self) -> None:
        check_choice("model", self.model, tuple(GUIDE_MODELS))
        check_choice("hardware", self.hardware, GUIDE_HARDWARE)
        check_choice("instances", self.instances, GUIDE_INSTANCES)
        check_choice("link", self.link, GUIDE_LINKS)
        check_choice("chunk_tokens", self.chunk_tokens, GUIDE_CHUNKS)
        tokens, most = self.prompt_tokens + self.output_tokens, geometry(self.model).context_tokens
        if tokens > most:
            raise InvalidRequestError(
                f"prompt_tokens and output_tokens must be at most {most:,} together, the context of"
                f" {self.model}, got {tokens:,}"
            )

    @property
    def objectives(self) -> Objectives:
        return Objectives(self.ttft_seconds, self.tpot_seconds)


class GuideRequest(msgspec.Struct, frozen=True):
    """One request of a simulation, for the page's plot of requests.

    Attributes:
        arrival, first_token, finish: Times in seconds since the first arrival. `first_token` is
            None if the request received no token.
        gaps: Times between consecutive tokens in order, as runs of equal gaps: (seconds, number of
            gaps).
    """

    arrival: float
    first_token: float | None
    finish: float
    prompt_tokens: int
    gaps: list[tuple[float, int]]
    missed: tuple[str, ...]


class GuideWay(msgspec.Struct, frozen=True):
    """Simulated results of one mode. All percentiles are over requests, in seconds.

    Attributes:
        tpot_p90: Time per token after the first token, hand-off gap included.
        pause_p90: Longest gap between two tokens of a request.
        stalled: Fraction of the requests with a gap above the objective.
    """

    mode: str
    ttft_p90: float | None
    tpot_p90: float | None
    pause_p90: float | None
    pause_longest: float | None
    met: float
    goodput: float
    stalled: float
    tokens_per_second: float
    verdict: str
    requests: list[GuideRequest]


class GuideAnswer(msgspec.Struct, frozen=True):
    """The guide's answer to a question.

    Attributes:
        long_part: Fraction of the requests that have long prompts.
        short_tokens: Number of tokens of the other prompts.
        pause_seconds: Longest gap between tokens that the objectives allow.
        note: Text on how the duration of fused steps was estimated.
    """

    devices: int
    layout: str
    requests: int
    long_part: float
    short_tokens: int
    pause_seconds: float
    note: str
    advice: GuideAdvice
    ways: tuple[GuideWay, ...]


def parse_question(body: bytes, kind: type[Asked]) -> Asked:
    """Parses the user's choices from JSON into a question of type `kind`. Raises
    InvalidRequestError for invalid JSON or fields."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"the guide's question: {error}; ask as the page at / does"
        ) from None


def arrivals_of(question: GuideQuestion) -> list[Arrival]:
    count = max(FEWEST_REQUESTS, min(MOST_REQUESTS, math.ceil(question.rate * SECONDS)))
    lengths = Mixture(
        (
            (1 - LONG_PART, Fixed(SHORT_TOKENS, question.output_tokens)),
            (LONG_PART, Fixed(question.prompt_tokens, question.output_tokens)),
        )
    )
    return list(poisson(question.rate, count, lengths, seed=1))


def answer(question: GuideQuestion) -> GuideAnswer:
    """Compares the three modes by stepping and by simulation. Takes seconds of processor time.

    Raises:
        NothingFits: The model does not fit on the accelerators.
    """
    arrivals = arrivals_of(question)
    place = Workplace.of(question.model, question.hardware, question.instances, question.link)
    objectives, rate = question.objectives, question.rate
    modes = carried(place, arrivals, rate, question.chunk_tokens, objectives)
    found = [(mode, *_way(place, question, arrivals, mode)) for mode in modes]
    return GuideAnswer(
        place.fitting.layout.devices,
        str(place.fitting.layout),
        len(arrivals),
        LONG_PART,
        SHORT_TOKENS,
        objectives.pause_seconds,
        FUSED,
        advice(place, [(mode, seen) for mode, seen, _ in found], rate, objectives),
        tuple(way for _, _, way in found),
    )


def _way(
    place: Workplace, question: GuideQuestion, arrivals: Sequence[Arrival], mode: ModeAdvice
) -> tuple[Simulated, GuideWay]:
    tokens: dict[str, list[int]] = {}
    kept: list[SimulatedCluster] = []

    async def watch(cluster: SimulatedCluster) -> None:
        kept.append(cluster)
        cluster.front = _Watched(cluster.front, tokens)

    fleet = _fleet(place, place.candidate(mode), question.link)
    outcomes = simulate(fleet, arrivals, hooks=[watch]).outcomes
    slo = question.objectives.slo
    report = summarise(outcomes, slo)
    pauses = Percentiles.of([item.gaps.longest for item in outcomes if item.gaps is not None])
    seen = Simulated(tuple(_missed(item, slo) for item in outcomes), pauses.longest)
    shown = [
        _shown(outcome, gap_runs(kept[0].timelines, tokens.get(outcome.request_id, [])), slo)
        for outcome in outcomes[:SHOWN_REQUESTS]
    ]
    return seen, GuideWay(
        mode=mode.mode,
        ttft_p90=report.ttft.p90,
        tpot_p90=report.tpot.p90,
        pause_p90=pauses.p90,
        pause_longest=pauses.longest,
        met=report.attainment or 0.0,
        goodput=report.goodput_per_second or 0.0,
        stalled=seen.count("pause") / len(outcomes),
        tokens_per_second=report.output_tokens_per_second,
        verdict=verdict_of(mode, seen, question.objectives),
        requests=shown,
    )


@dataclass(slots=True)
class _Watched:
    front: ServingPath
    tokens: dict[str, list[int]]

    async def stream(self, request: Request) -> AsyncGenerator[StreamEvent, None]:
        mine = self.tokens.setdefault(request.request_id, [])
        events = self.front.stream(request)
        try:
            async for event in events:
                mine += event.token_ids
                yield event
        finally:
            await events.aclose()

    async def status(self) -> tuple[WorkerStatus, ...]:
        return await self.front.status()

    async def suspend(self, tenant: str, request_id: str) -> None:
        await self.front.suspend(tenant, request_id)

    def resume(self, tenant: str, request_id: str) -> None:
        self.front.resume(tenant, request_id)

    def end(self, tenant: str, request_id: str, error: JdisaggError) -> None:
        self.front.end(tenant, request_id, error)

    async def reset_cache(self) -> int:
        return await self.front.reset_cache()

    async def session(self, call: SessionCall) -> tuple[SessionReport, ...]:
        return await self.front.session(call)

    async def drain(self) -> None:
        await self.front.drain()


def _fleet(place: Workplace, candidate: Candidate, between: str) -> Fleet:
    instance = replace(INSTANCE, layout=candidate.decode, chunk_tokens=candidate.chunk_tokens)

    def pool(count: int) -> Pool:
        return Pool(count, place.card, instance)

    return Fleet(
        place.fitting.model.geometry,
        pool(candidate.decode_instances),
        pool(candidate.prefill_instances) if candidate.prefill else None,
        candidate.mode,
        link=link(between),
        fused=candidate.mode is Mode.CHUNKED,
    )


def _missed(outcome: RequestOutcome, slo: SloLimits) -> tuple[str, ...]:
    limits = (
        ("ttft", SloLimits(ttft_seconds=slo.ttft_seconds)),
        ("tpot", SloLimits(tpot_seconds=slo.tpot_seconds)),
        ("pause", SloLimits(longest_gap_seconds=slo.longest_gap_seconds)),
    )
    return tuple(name for name, limit in limits if not limit.attained(outcome))


def _shown(
    outcome: RequestOutcome, runs: Sequence[tuple[float, int]], slo: SloLimits
) -> GuideRequest:
    return GuideRequest(
        round(outcome.arrival, 4),
        None if outcome.first_token is None else round(outcome.first_token, 4),
        round(outcome.finish, 4),
        outcome.prompt_tokens,
        [(round(seconds, 5), count) for seconds, count in _fewer(list(runs))],
        _missed(outcome, slo),
    )


def _fewer(runs: list[tuple[float, int]]) -> list[tuple[float, int]]:
    while len(runs) > SHOWN_RUNS:
        at = min(range(len(runs) - 1), key=lambda at: abs(runs[at][0] - runs[at + 1][0]))
        (one, times), (other, more) = runs[at : at + 2]
        mean = (one * times + other * more) / (times + more)
        runs[at : at + 2] = [(mean, times + more)]
    return runs

"""Computes the planning guide of the web page, which compares three modes on the same workload and
accelerators.

Unified instances prefill whole prompts between decode steps. Chunked instances prefill in pieces,
each within a decode step. Disaggregated instances prefill and decode on separate meshes joined by a
link. Every fourth prompt is long, and its prefill delays other requests. The answer has percentiles
for each mode, and the times of the first requests' tokens.

Pure except for `main`, which reads the question as JSON from stdin and writes the answer to stdout,
in a separate process that keeps the load off the server."""

import math
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec

from jdisagg.config import Mode
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import LINKS, accelerator, link
from jdisagg.dispatch.frontend import ServingPath
from jdisagg.errors import InvalidRequestError
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.request import Request, StreamEvent
from jdisagg.simulator.cluster import SimulatedCluster
from jdisagg.simulator.fleet import INSTANCE, Fleet, Pool
from jdisagg.simulator.report import RequestOutcome, summarise
from jdisagg.simulator.run import simulate
from jdisagg.simulator.timeline import gap_runs
from jdisagg.simulator.workloads import Fixed, Mixture, poisson

MODEL, HARDWARE = "llama-3.1-8b", "h100"
INSTANCES = 2  # of one accelerator each
SHORT_TOKENS, OUTPUT_TOKENS = 200, 128
LONG_PART = 0.25
CHUNK_TOKENS = 512
WHOLE_TOKENS = 32768
SECONDS = 12.0
MOST_REQUESTS = 160
SHOWN_REQUESTS = 36
SHOWN_RUNS = 48
GUIDE_LINKS = (
    "nvlink4",
    "pcie5",
    "infiniband-ndr",
    "ethernet-100g",
    "ethernet-25g",
    "ethernet-10g",
)


class GuideQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The user's choices. `prompt_tokens`: number of tokens of each long prompt. `rate`: requests
    per second. `link`: name of the link between prefill and decode instances."""

    prompt_tokens: Annotated[int, msgspec.Meta(ge=256, le=16384)] = 4096
    rate: Annotated[float, msgspec.Meta(ge=0.5, le=16.0)] = 4.0
    link: str = "infiniband-ndr"

    def __post_init__(self) -> None:
        if self.link not in GUIDE_LINKS:
            raise InvalidRequestError(
                f"link must be one of {', '.join(GUIDE_LINKS)}, got {self.link[:80]!r}"
            )


class GuideRequest(msgspec.Struct, frozen=True):
    """Times of one request in seconds since the first arrival. `gaps`: times between consecutive
    tokens in order, as runs of equal gaps: (seconds, number of gaps)."""

    arrival: float
    first_token: float | None
    finish: float
    prompt_tokens: int
    gaps: list[tuple[float, int]]


class GuideWay(msgspec.Struct, frozen=True):
    """Results of one mode. `ttft`, `tbt`: p50, p99 and maximum of the time to first token and of
    the time between tokens, in seconds."""

    mode: str
    ttft: tuple[float | None, float | None, float | None]
    tbt: tuple[float | None, float | None, float | None]
    tokens_per_second: float
    requests: list[GuideRequest]


class GuideAnswer(msgspec.Struct, frozen=True):
    model: str
    hardware: str
    accelerators: int
    requests: int
    long_part: float
    short_tokens: int
    links: tuple[tuple[str, float], ...]
    ways: tuple[GuideWay, ...]


def parse_question(body: bytes) -> GuideQuestion:
    """Parses the user's choices from JSON. Raises InvalidRequestError for invalid fields."""
    try:
        return msgspec.json.decode(body, type=GuideQuestion)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"the guide's question: {error}; ask as the page at / does"
        ) from None


def answer(question: GuideQuestion) -> GuideAnswer:
    """Simulates the three modes and returns their results. Takes seconds of processor time."""
    count = max(12, min(MOST_REQUESTS, math.ceil(question.rate * SECONDS)))
    lengths = Mixture(
        (
            (1 - LONG_PART, Fixed(SHORT_TOKENS, OUTPUT_TOKENS)),
            (LONG_PART, Fixed(question.prompt_tokens, OUTPUT_TOKENS)),
        )
    )
    arrivals = poisson(question.rate, count, lengths, seed=1)
    ways = []
    for mode in (Mode.UNIFIED, Mode.CHUNKED, Mode.DISAGGREGATED):
        tokens: dict[str, list[int]] = {}
        kept: list[SimulatedCluster] = []

        async def watch(
            cluster: SimulatedCluster, tokens: dict[str, list[int]] = tokens, kept: list = kept
        ) -> None:
            kept.append(cluster)
            cluster.front = _Watched(cluster.front, tokens)

        result = simulate(_fleet(mode, question.link), arrivals, hooks=[watch])
        report = summarise(result.outcomes)
        ways.append(
            GuideWay(
                mode.value,
                (report.ttft.p50, report.ttft.p99, report.ttft.longest),
                (report.tbt.p50, report.tbt.p99, report.tbt.longest),
                report.output_tokens_per_second,
                [
                    _shown(outcome, gap_runs(kept[0].timelines, tokens.get(outcome.request_id, [])))
                    for outcome in result.outcomes[:SHOWN_REQUESTS]
                ],
            )
        )
    speeds = tuple((name, LINKS[name].bytes_per_second) for name in GUIDE_LINKS)
    return GuideAnswer(
        MODEL, HARDWARE, INSTANCES, count, LONG_PART, SHORT_TOKENS, speeds, tuple(ways)
    )


@dataclass(slots=True)
class _Watched:
    """Wraps the cluster's request path and records the token ids of each request."""

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

    async def suspend(self, tenant: str, request_id: str, keep_seconds: float | None) -> None:
        await self.front.suspend(tenant, request_id, keep_seconds)

    async def reset_cache(self) -> int:
        return await self.front.reset_cache()

    async def drain(self) -> None:
        await self.front.drain()


def _fleet(mode: Mode, between: str) -> Fleet:
    one = mode is not Mode.DISAGGREGATED
    chunk = CHUNK_TOKENS if mode is Mode.CHUNKED else WHOLE_TOKENS
    instance = replace(INSTANCE, chunk_tokens=chunk)
    hardware = accelerator(HARDWARE)
    return Fleet(
        geometry(MODEL),
        Pool(INSTANCES if one else INSTANCES // 2, hardware, instance),
        None if one else Pool(INSTANCES // 2, hardware, instance),
        mode,
        link=link(between),
        fused=mode is Mode.CHUNKED,
    )


def _shown(outcome: RequestOutcome, runs: Sequence[tuple[float, int]]) -> GuideRequest:
    return GuideRequest(
        round(outcome.arrival, 4),
        None if outcome.first_token is None else round(outcome.first_token, 4),
        round(outcome.finish, 4),
        outcome.prompt_tokens,
        [(round(seconds, 5), count) for seconds, count in _fewer(list(runs))],
    )


def _fewer(runs: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Merges the most similar adjacent runs of gaps until SHOWN_RUNS runs are left. A merged run
    has the mean gap of its parts."""
    while len(runs) > SHOWN_RUNS:
        at = min(range(len(runs) - 1), key=lambda at: abs(runs[at][0] - runs[at + 1][0]))
        (one, times), (other, more) = runs[at : at + 2]
        mean = (one * times + other * more) / (times + more)
        runs[at : at + 2] = [(mean, times + more)]
    return runs


def main() -> None:
    os.nice(19)  # the serving process has priority
    question = parse_question(sys.stdin.buffer.read())
    sys.stdout.buffer.write(msgspec.json.encode(answer(question)))


if __name__ == "__main__":
    main()

"""Thousands of calls at once: our own admission answers each of them, never gRPC's queue."""

import asyncio
import collections
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from jdisagg.client import AsyncClient
from jdisagg.config import LimitsConfig, Mode, ServiceConfig
from jdisagg.dispatch.frontend import Frontend
from jdisagg.errors import OverloadedError
from jdisagg.messages.step_commands import StepCommand, StepResult
from jdisagg.service.server import GenerationServer
from tests.observe.observed import ObservedCluster
from tests.service.doors import MODEL, FakePath, byte_tokenizer
from tests.service.http_doors import running

CALLS = 3_000


class BusyCluster(ObservedCluster):
    """Its mesh runs nothing before `refused` is set: however fast the machine, a burst finds all
    slots and the whole queue taken."""

    def __init__(self) -> None:
        limits = LimitsConfig(max_waiting_requests=64, default_deadline_seconds=300.0)
        super().__init__(mode=Mode.UNIFIED, limits=limits)
        self.refused = asyncio.Event()
        run = self.decode_mesh.run

        async def held(command: StepCommand) -> StepResult:
            await self.refused.wait()
            return await run(command)

        self.decode_mesh.run = lambda command: asyncio.ensure_future(held(command))


@asynccontextmanager
async def busy_server() -> AsyncIterator[tuple[str, BusyCluster]]:
    """A server over a fake mesh that is too small for the burst."""
    async with BusyCluster() as cluster:
        frontend = Frontend(cluster.observed, byte_tokenizer(), MODEL, cluster.limits)
        server = GenerationServer(frontend, ServiceConfig(port=0))
        async with running(FakePath(), server) as door:
            yield door.target, cluster


async def counted(cluster: ObservedCluster) -> collections.Counter[str]:
    text = await cluster.observer.metrics.scrape()
    rows = [row for row in text.decode().splitlines() if "requests_finished_total{" in row]
    return collections.Counter(
        {row.split('result="')[1].split('"')[0]: int(float(row.split()[-1])) for row in rows}
    )


def check(outcomes: collections.Counter[str], cluster_counts: collections.Counter[str]) -> None:
    assert set(outcomes) == {"length", "OverloadedError"}, outcomes
    assert outcomes.total() == CALLS
    assert outcomes == cluster_counts


@pytest.mark.ci
async def test_our_client_gets_an_answer_or_a_typed_refusal_to_each_call_of_a_burst() -> None:
    async with busy_server() as (target, cluster), AsyncClient(target) as client:

        async def outcome() -> str:
            try:
                completion = await client.complete(token_ids=[3, 4], max_tokens=2, temperature=0)
                assert len(completion.choices[0].token_ids) == 2
                return "length"
            except OverloadedError as error:
                cluster.refused.set()
                assert error.retry_after_seconds
                return "OverloadedError"

        outcomes = collections.Counter(await asyncio.gather(*(outcome() for _ in range(CALLS))))
        check(outcomes, await counted(cluster))

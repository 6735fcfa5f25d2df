"""Which source restores the blocks of a prompt, for how long the prompt waits, and what is kept,
over sources that do as the test says. What real sources do is in the tests of each tier."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.errors import UnavailableError
from jdisagg.request import CachedTokens
from jdisagg.scheduler.page_ledger import PageLedger
from jdisagg.scheduler.prices import Prices
from jdisagg.scheduler.residency import Residency
from jdisagg.telemetry import Counters
from jdisagg.worker.kv_sources import (
    KvSource,
    KvSources,
    Origin,
    Restore,
    RestoredBlocks,
    RestorePlan,
    RestoreQuery,
)
from tests.fakes.cluster import toy_request
from tests.worker.conversations import NAMES

PAGE, SIZE = 4, 16
REQUEST = toy_request(0)


class Source(KvSource):
    """Holds the first `blocks` of any chain and brings one in each `seconds`; then it ends with
    `cause`, or raises."""

    most_restores = 2
    most_seconds = None

    def __init__(self, name: Origin, blocks: int, seconds: float = 0.01, cause: str = "") -> None:
        self.name, self.blocks, self.seconds, self.cause = name, blocks, seconds, cause
        self.prices = Prices()
        self.failures: list[str] = []

    def worth(self, query: RestoreQuery) -> RestorePlan | None:
        rank = query.known.index(max(query.known))
        chain = query.chain[: self.blocks]
        tokens = max(0, len(chain) - query.known[rank]) * SIZE
        if not self.prices.worth(tokens, tokens + query.ahead_tokens):
            return None
        return RestorePlan(self, rank, chain, tokens, tokens, query.ahead_tokens)

    async def bring(self, restore: Restore) -> str:
        for index in range(restore.first, len(restore.plan.chain)):
            await asyncio.sleep(self.seconds)
            restore.origins[index] = self.name
        restore.moved_tokens = len(restore.origins) * SIZE
        if self.cause == "raise":
            raise UnavailableError("the mesh failed")
        if self.cause == "bug":
            raise TypeError("a bug of the source")
        return self.cause

    def failed(self, cause: str) -> None:
        self.failures.append(cause)


class Bench:
    def __init__(self, *sources: Source, pages: int = 40) -> None:
        self.ledger = PageLedger(pages)
        self.kept = Residency([self.ledger], PAGE, NAMES)
        self.chain = self.kept.chain(REQUEST, range(5 * SIZE))
        self.counters = Counters()
        self.restored = RestoredBlocks(SIZE)
        self.sources = KvSources(self.kept, PAGE, self.counters, self.now, sources)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def best(self, ahead: int = 0) -> RestorePlan | None:
        known = self.kept.match(0, self.chain)
        return self.sources.best(RestoreQuery(self.chain, (known,), ahead))

    async def run(self) -> float:
        """Restores by the best plan; returns for how long the prompt waited."""
        plan, began = self.best(), self.now()
        assert plan is not None
        await self.sources.begin(plan, self.restored)
        waited = self.now() - began
        assert self.ledger.free_pages == self.ledger.total_pages, "kept pages count as free"
        return waited


async def test_all_are_asked_once_and_the_one_that_saves_most_time_brings() -> None:
    host, disk, peer = Source("host", 2), Source("disk", 4), Source("peer", 5)
    bench = Bench(host, disk, peer)
    for source, each in ((host, 1e-4), (disk, 5e-4), (peer, 8e-4)):
        for blocks in (1, 5):
            source.prices.moved_in(blocks * SIZE, each * blocks * SIZE)
    bench.sources.computed_in(SIZE, 1e-3 * SIZE)
    plan = bench.best()
    assert plan is not None and plan.source is disk  # saves 32 of 64 ms; host 29, peer 16
    assert len(plan.chain) == 4
    await bench.run()
    assert bench.kept.match(0, bench.chain) == 4
    assert bench.restored.split(0, 79) == CachedTokens(pages=15, disk=64)
    assert bench.counters["disk_blocks_restored"] == 4
    assert bench.counters["disk_tokens_restored"] == 64


async def test_where_nothing_is_measured_the_one_that_has_most_brings_and_the_first_of_equals():
    host, disk, peer = Source("host", 3), Source("disk", 4), Source("peer", 4)
    plan = Bench(host, disk, peer).best()
    assert plan is not None and plan.source is disk
    assert Bench(Source("host", 0)).best() is None
    assert Bench().best() is None


async def test_a_prompt_waits_no_longer_than_computing_takes_and_what_has_come_stays() -> None:
    slow = Source("peer", 5, seconds=0.1)
    bench = Bench(slow)
    slow.prices.computed_in(SIZE, 0.05)
    assert await bench.run() == pytest.approx(0.25)
    assert slow.failures == ["late"]
    assert bench.kept.match(0, bench.chain) == 2
    assert bench.restored.split(0, 32) == CachedTokens(peer=32)
    assert bench.best() is None, "it would take twice as long as was waited"
    assert bench.best(ahead=200) is not None, "behind other prompts it is hidden"


async def test_a_prompt_that_has_ended_stops_its_restore() -> None:
    source = Source("host", 5, seconds=0.1)
    bench = Bench(source)
    plan = bench.best()
    assert plan is not None
    task = bench.sources.begin(plan, bench.restored)
    await asyncio.sleep(0.25)
    assert not bench.sources.quiet and bench.ledger.free_pages < 40
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert source.failures == ["unwanted"] and bench.sources.quiet
    assert bench.kept.match(0, bench.chain) == 2 and bench.ledger.free_pages == 40


@pytest.mark.parametrize("cause", ["gone", "raise", "bug"])
async def test_a_source_that_brings_less_costs_time_and_is_counted(cause: str) -> None:
    source = Source("host", 3, cause=cause)
    bench = Bench(source)
    await bench.run()
    assert source.failures == [cause if cause == "gone" else "failed"]
    assert bench.kept.match(0, bench.chain) == 3, "what was verified stays"


async def test_without_pages_nothing_is_brought() -> None:
    source = Source("host", 5)
    bench = Bench(source, pages=4)
    await bench.run()
    assert source.failures == ["room"] and bench.counters["host_blocks_restored"] == 0


async def test_nothing_that_a_reset_should_have_removed_is_kept() -> None:
    source = Source("host", 5, seconds=0.1)
    bench = Bench(source)
    asyncio.get_running_loop().call_later(0.25, bench.kept.clear)
    await bench.run()
    assert source.failures == ["reset"] and bench.kept.match(0, bench.chain) == 0
    assert bench.restored.split(0, 32) == CachedTokens(pages=32)


async def test_a_source_runs_so_many_restores_and_no_more() -> None:
    bench = Bench(Source("host", 5, seconds=0.1), pages=80)
    for _ in range(2):
        plan = bench.best()
        assert plan is not None
        bench.sources.begin(plan, bench.restored)
    await asyncio.sleep(0.01)
    assert bench.best() is None
    bench.sources.stop()
    await asyncio.sleep(0.01)
    assert bench.best() is not None and bench.sources.quiet


ORIGINS = st.sampled_from(["host", "disk", "peer"])
RUNS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 6), st.lists(ORIGINS, max_size=5)))


@given(st.sampled_from([1, 4, 16]), RUNS, st.integers(0, 200))
def test_each_token_counts_once_where_its_block_came_from_last(
    size: int, runs: list[tuple[int, int, list[Origin]]], tokens: int
) -> None:
    restored = RestoredBlocks(size)
    labels: list[list[str]] = [["pages"] * 200 for _ in range(2)]  # by rank and token
    for rank, first, origins in runs:
        came: dict[int, Origin] = dict(enumerate(origins, first))
        restored.add(rank, came)
        for at, origin in enumerate(origins, first):
            for token in range(at * size, min(200, (at + 1) * size)):
                labels[rank][token] = origin
    for rank in range(2):
        known = labels[rank][:tokens]
        found = restored.split(rank, tokens)
        assert found.by_tier() == {tier: known.count(tier) for tier in CachedTokens().by_tier()}
        assert found.total == tokens

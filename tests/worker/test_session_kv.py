"""The KV of sessions over fake meshes that check what lies in every page they read: in a pause it
leaves pages before that of others, comes back when the pause ends, and no token changes."""

import asyncio
import random
from dataclasses import replace

import pytest

from jdisagg.config import Mode
from jdisagg.messages.ports import SessionAction, SessionCall, SessionReport
from jdisagg.messages.step_commands import SaveBlock, StepCommand, StepResult
from jdisagg.prompt.hints import Hints, Retention
from jdisagg.request import CachedTokens, Request, SamplingParams
from jdisagg.scheduler.executor import Executor
from jdisagg.scheduler.host_blocks import TierRoom
from tests.fakes.cluster import Cluster, until
from tests.fakes.fake_disk import FakeDisk
from tests.fakes.fake_executor import Costs
from tests.worker.conversations import NAMES, SEEDS, Talk, asked, limits, storm
from tests.worker.preempting import Stream
from tests.worker.tiers import BLOCK_BYTES, FAST, other, room

SWEPT = 3.0  # seconds in which a worker looks at its sessions
PROMPT = 80  # tokens of `other`: five blocks, of which four are known to the next turn
KNOWN = 64


def fleet(host_blocks: int = 64, pages: int = 66, **more: object) -> Cluster:
    """A worker that computes prompts and decodes, with pages for three prompts."""
    options: dict[str, object] = {
        "decode": limits(pages=pages),
        "names": NAMES,
        "costs": FAST,
        "decode_tiers": TierRoom(host_blocks * BLOCK_BYTES, always=True),
    }
    return Cluster(Mode.CHUNKED, **(options | more))  # type: ignore[arg-type]


def of_session(number: int, hints: Hints | None, name: str = "") -> Request:
    return replace(other(number), request_id=name or f"r{number}", hints=hints)


async def told(
    cluster: Cluster, action: SessionAction, key: str = "s", tenant: str = ""
) -> SessionReport | None:
    reports = await cluster.path.session(SessionCall(tenant, "", key, action, 5.0))
    return reports[-1] if reports else None


async def pushed_out(cluster: Cluster) -> SessionReport:
    """A session is in host memory alone in its pause."""
    await cluster.ask(of_session(1, PAUSE))
    await asyncio.sleep(SWEPT)
    for number in range(2, 6):
        await cluster.ask(other(number))
    away = await shown(cluster)
    assert away.pages_tokens == 0 and away.host_tokens == PROMPT
    return away


async def shown(cluster: Cluster, key: str = "s") -> SessionReport:
    report = await told(cluster, SessionAction.SHOW, key)
    assert report is not None
    return report


PAUSE = Hints("s", pause_seconds=60.0)


@pytest.mark.parametrize("pauses", [False, True])
async def test_under_pressure_a_paused_session_leaves_pages_first_and_host_memory_keeps_it(
    pauses: bool,
) -> None:
    """Of two cached prompts the newer one is in a pause. A third needs pages of one."""
    async with fleet() as cluster:
        await cluster.ask(other(1))
        await cluster.ask(of_session(2, PAUSE if pauses else Hints("s")))
        await asyncio.sleep(SWEPT)
        report = await shown(cluster)
        assert (report.tokens, report.pages_tokens) == (PROMPT, PROMPT)
        assert report.host_tokens == (PROMPT if pauses else 0)
        for number in (3, 4):
            await cluster.ask(other(number))
        kept = cluster.decode._kept
        first = kept.chain(other(1), other(1).prompt_token_ids)
        assert (kept.match(0, first) == len(first)) == pauses
        report = await shown(cluster)
        assert (report.pages_tokens < PROMPT) == pauses
        again = await cluster.ask(of_session(2, Hints("s"), "again"))
        assert again.cached_tokens == KNOWN and (again.cached_by_tier.host > 0) == pauses


@pytest.mark.parametrize("called", [False, True])
async def test_a_session_is_back_in_pages_when_its_pause_ends_by_the_clock_or_by_a_call(
    called: bool,
) -> None:
    async with fleet() as cluster:
        away = await pushed_out(cluster)
        assert 50.0 < away.pause_seconds < 60.0 and away.idle_seconds > SWEPT - 0.1
        if called:
            assert await told(cluster, SessionAction.PREFETCH, tenant="other") is None
            report = await told(cluster, SessionAction.PREFETCH)
            assert report is not None and report.pause_seconds == 0.0
        else:
            await asyncio.sleep(60.0)
        assert (await shown(cluster)).pages_tokens == PROMPT
        again = await cluster.ask(of_session(1, None, "again"))
        assert again.cached_by_tier == CachedTokens(pages=KNOWN)


async def test_without_host_memory_a_pause_changes_no_order() -> None:
    async with fleet(host_blocks=0) as cluster:
        await cluster.ask(other(1))
        await cluster.ask(of_session(2, PAUSE))
        await asyncio.sleep(SWEPT)
        for number in (3, 4):
            await cluster.ask(other(number))
        assert (await shown(cluster)).pages_tokens == PROMPT
        assert (await cluster.ask(of_session(2, PAUSE, "again"))).cached_tokens == KNOWN


async def test_what_host_memory_drops_is_evicted_from_pages_like_others() -> None:
    async with fleet() as cluster:
        await cluster.ask(other(1))
        await cluster.ask(of_session(2, PAUSE))
        await asyncio.sleep(SWEPT)
        tier = cluster.decode._host
        tier._drop(tier.blocks, tier.blocks.clear(), "room")
        for number in (3, 4):
            await cluster.ask(other(number))
        assert (await shown(cluster)).pages_tokens == PROMPT


async def test_a_block_that_others_use_stays_in_pages_through_a_pause() -> None:
    """The other prompt shares the first three blocks of the session's."""
    common = other(1).prompt_token_ids[:48]
    async with fleet() as cluster:
        await cluster.ask(of_session(1, PAUSE))
        await cluster.ask(asked(2, (*common, *other(2).prompt_token_ids[:30])))
        await asyncio.sleep(SWEPT)
        assert (await shown(cluster)).host_tokens == PROMPT - 48


async def test_a_dropped_session_frees_its_own_blocks_in_all_tiers_and_its_retention() -> None:
    common = other(1).prompt_token_ids[:48]
    hints = Hints("s", Retention(4.0, 600.0), pause_seconds=60.0)
    cluster = fleet(decode_tiers=room(64, 200))
    cluster.decode_mesh.disk = disk = FakeDisk()
    async with cluster:
        await cluster.ask(of_session(1, hints, "first"))
        await cluster.ask(of_session(1, hints, "second"))
        await cluster.ask(asked(2, (*common, *other(2).prompt_token_ids[:30])))
        await cluster.ask(of_session(1, hints, "third"))
        await asyncio.sleep(SWEPT)
        report = await shown(cluster)
        assert report.pages_tokens == PROMPT and report.host_tokens and report.disk_tokens
        assert 590.0 < report.retention_seconds < 600.0
        assert await told(cluster, SessionAction.DROP, tenant="other") is None
        report = await told(cluster, SessionAction.DROP)
        assert report is not None and report.dropped_tokens == PROMPT - 48
        assert await told(cluster, SessionAction.SHOW) is None
        worker, chain = (
            cluster.decode,
            cluster.decode._kept.chain(other(1), other(1).prompt_token_ids),
        )
        assert worker._kept.match(0, chain) == 3
        for tier in (worker._host.blocks, worker._disk.blocks):
            assert not any(name in tier for name in chain[3:])
        assert not any(worker._kept.retained.of(name) for name in chain[3:])
        await asyncio.sleep(SWEPT)
        assert not {name for _, name in disk.blocks} & set(chain[3:])
        assert (await cluster.ask(of_session(1, None, "again"))).cached_tokens == 48


async def test_a_session_that_is_dropped_while_it_is_copied_leaves_nothing() -> None:
    async with fleet(costs=Costs(pull=1e-5, other=0.05)) as cluster:
        await cluster.ask(of_session(1, PAUSE))
        tier = cluster.decode._host
        await until(lambda: len(tier.blocks) > 1 and tier.blocks.writing)
        before = cluster.clock.now()
        report = await told(cluster, SessionAction.DROP)
        assert report is not None and report.dropped_tokens == PROMPT
        assert cluster.clock.now() == before
        await asyncio.sleep(SWEPT)
        assert not len(tier.blocks) and not cluster.decode_mesh.host
        assert (await cluster.ask(of_session(1, None, "again"))).cached_tokens == 0


async def test_a_session_that_is_dropped_while_it_is_restored_does_not_come_back() -> None:
    async with fleet(costs=Costs(pull=0.5, other=1e-5)) as cluster:
        await pushed_out(cluster)
        prefetching = asyncio.ensure_future(told(cluster, SessionAction.PREFETCH))
        await until(lambda: not cluster.decode._sources.quiet)
        await asyncio.sleep(0.7)  # some blocks are in pages
        assert await told(cluster, SessionAction.DROP) is not None
        await prefetching
        await asyncio.sleep(SWEPT)
        worker, tokens = cluster.decode, other(1).prompt_token_ids
        assert worker.counters["host_blocks_restored"] > 0
        assert worker._kept.match(0, worker._kept.chain(other(1), tokens)) == 0
        assert (await cluster.ask(of_session(1, None, "again"))).cached_tokens == 0


class LateDisk:
    """A mesh whose disk answers a write after some seconds."""

    def __init__(self, mesh: Executor) -> None:
        self._mesh = mesh
        self.limits, self.card, self.close = mesh.limits, mesh.card, mesh.close

    def run(self, command: StepCommand) -> "asyncio.Future[StepResult]":
        ran = asyncio.ensure_future(self._mesh.run(command))
        saves = isinstance(command, SaveBlock)
        return asyncio.ensure_future(self._late(ran)) if saves else ran

    async def _late(self, ran: "asyncio.Future[StepResult]") -> StepResult:
        await asyncio.sleep(SWEPT)
        return await ran


async def test_a_session_that_is_dropped_while_it_is_written_to_disk_leaves_no_file() -> None:
    cluster = fleet(decode_tiers=room(64, 200), wrap_mesh=lambda _, mesh: LateDisk(mesh))
    cluster.decode_mesh.disk = disk = FakeDisk()
    async with cluster:
        await cluster.ask(of_session(1, Hints("s"), "first"))
        await cluster.ask(of_session(1, Hints("s"), "second"))
        tier = cluster.decode._disk
        assert tier.blocks.writing and disk.blocks
        assert await told(cluster, SessionAction.DROP) is not None
        await asyncio.sleep(2 * SWEPT)
        assert tier.quiet and not len(tier.blocks) and not disk.blocks
        chain = cluster.decode._kept.chain(other(1), other(1).prompt_token_ids)
        assert not any(name in cluster.decode._kept.log for name in chain)


@pytest.mark.parametrize("pages", [66, 26])
async def test_a_dropped_session_leaves_no_tail_of_an_answer_that_rests(pages: int) -> None:
    """In pages, or in host memory after another prompt took the pages."""
    async with fleet(pages=pages) as cluster:
        request = replace(of_session(1, Hints("s")), sampling=SamplingParams(20, temperature=0.0))
        stream = Stream(cluster, request)
        await stream.until(5)
        await stream.suspend()
        await asyncio.sleep(0.2)
        if pages == 26:
            await cluster.ask(asked(2, other(2).prompt_token_ids, 16, cache_scope="another"))
        kept, shelf = cluster.decode._kept, cluster.decode._host.blocks
        scopes = 0 if pages == 66 else 5
        assert kept.blocks + len(shelf) == PROMPT // 16 + 1 + scopes
        await told(cluster, SessionAction.DROP)
        assert kept.blocks + len(shelf) == scopes and not len(kept.tails)
        stream.resume()
        await stream.end()


class Sessions(Talk):
    """Requests of sessions whose pauses are shorter or longer than the time between turns."""

    def next(self) -> Request:
        request = super().next()
        pause, session = self.random.choice((0.0, 0.5, 2.0, 30.0)), self.random.choice("abc")
        retention = self.random.choice((None, Retention(4.0, 3.0)))
        hints = self.random.choice((None, Hints(session, retention, pause_seconds=pause)))
        return replace(request, hints=hints)


@SEEDS
@pytest.mark.parametrize(
    ("mode", "page_size", "ranks", "blocks"),
    [(Mode.CHUNKED, 4, 1, 24), (Mode.DISAGGREGATED, 8, 2, 12), (Mode.DISAGGREGATED, 4, 1, 40)],
)
async def test_streams_are_the_oracles_in_pauses_and_whatever_is_asked_of_sessions(
    seed: int, mode: Mode, page_size: int, ranks: int, blocks: int
) -> None:
    tiers = room(blocks, 40)
    cluster = Cluster(
        mode,
        decode=limits(ranks, 320 // page_size, page_size),
        prefill=limits(ranks, 320 // page_size, page_size),
        names=NAMES,
        costs=FAST,
        tiers=tiers,
        decode_tiers=tiers,
        wire=True,
        seed=seed,
    )
    for mesh in (cluster.prefill_mesh, cluster.decode_mesh):
        mesh.disk = FakeDisk()
    seen: set[tuple[SessionAction, bool]] = set()
    async with cluster:
        talk, rng, over = Sessions(seed, tenants=("", "a")), random.Random(seed), asyncio.Event()

        async def meddle() -> None:
            while not over.is_set():
                await asyncio.sleep(rng.random())
                action, tenant = rng.choice([*SessionAction]), rng.choice(("", "a"))
                report = await told(cluster, action, rng.choice("abc"), tenant)
                seen.add((action, report is not None))

        meddling = asyncio.ensure_future(meddle())
        for _ in range(6):
            await storm(cluster, talk, 12, at_once=4, cancels=0.1)
        over.set()
        await meddling
        assert {(action, True) for action in SessionAction} <= seen
        workers = [process.worker for process in cluster.processes.values()]
        assert sum(worker.counters["host_tokens_restored"] for worker in workers) > 0
        assert not any(worker.counters["host_blocks_broken"] for worker in workers)

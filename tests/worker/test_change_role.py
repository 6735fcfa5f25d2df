"""A worker changes between prefill and decode on its mesh: streams go on with the same tokens, its
cached KV stays, every page comes back, and prompts that are not for its role are refused."""

import asyncio
from dataclasses import replace

import pytest

from jdisagg.errors import DeadlineExceededError, UnavailableError
from jdisagg.messages.ports import FetchCall, FetchReply
from jdisagg.messages.step_commands import DecodeSteps, ExtractBlock, PrefillChunk
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.worker import given_kv
from tests.fakes.cluster import Fleet, toy_request, until
from tests.fakes.fake_executor import toy_limits
from tests.worker.calls import prefill_call, reserve_call
from tests.worker.conversations import NAMES
from tests.worker.conversations import limits as roomy
from tests.worker.tiers import FAST, other

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
LIMITS = replace(toy_limits(), append_buckets=(8,))


async def streams(fleet: Fleet, count: int, seconds: float = 0.004) -> None:
    """One more stream every few milliseconds, each checked."""
    asked = []
    for number in range(1, count):
        request = toy_request(number, prompt_tokens=5 + number % 30, max_tokens=20)
        asked.append(asyncio.ensure_future(fleet.ask(request)))
        await asyncio.sleep(seconds)
    await asyncio.gather(*asked)


@pytest.mark.parametrize("name", ["prefill1", "decode1"])
async def test_a_worker_changes_there_and_back_under_load_and_no_token_does(name: str) -> None:
    async with Fleet(2, 2, LIMITS, LIMITS, names=NAMES) as fleet:
        worker, mesh = fleet.processes[name].worker, fleet.processes[name].mesh
        before = worker.role
        load = asyncio.ensure_future(streams(fleet, 90, 0.012))
        for role in (before.other, before):
            await asyncio.sleep(0.1)
            await fleet.change_role(name)
            status = await worker.status()
            assert (worker.role, status.role, status.draining) == (role, role, False)
            assert status.chunk_tokens == {PREFILL: 16, DECODE: 8}[role]
            pair, kind = ("prefill0", name), DecodeSteps
            if role is PREFILL:
                pair, kind = (name, "decode0"), PrefillChunk
            ran = len(mesh.ran(kind))
            await fleet.ask(toy_request(900 + ran, prompt_tokens=30), fleet.new_path(*pair))
            assert len(mesh.ran(kind)) > ran
            assert not load.done(), "the changes happen under load"
        await load
        assert not worker.counters["drains_cut_short"]


async def test_streams_that_cannot_move_in_time_go_on_elsewhere() -> None:
    async with Fleet(1, 2) as fleet:
        load = asyncio.ensure_future(streams(fleet, 20, 0.001))
        await until(lambda: fleet.decode_worker("decode1")._state.groups)
        await fleet.change_role("decode1", seconds=0.0)
        worker = fleet.processes["decode1"].worker
        assert worker.role is PREFILL and worker.counters["drains_cut_short"] == 1
        await load


@pytest.mark.parametrize(("name", "dies"), [("prefill1", "decode0"), ("decode1", "decode0")])
async def test_another_worker_may_die_meanwhile(name: str, dies: str) -> None:
    async with Fleet(3, 3) as fleet:
        load = asyncio.ensure_future(streams(fleet, 40))
        worker = fleet.processes[name].worker
        await until(lambda: worker._prompts.placed or worker._state.groups)
        change = asyncio.ensure_future(fleet.change_role(name))
        await asyncio.sleep(0)
        assert not change.done()
        await fleet.kill(dies)
        await change
        await fleet.start(dies)
        await fleet.change_role(name)
        await load


async def test_what_a_worker_cached_in_one_role_is_a_hit_in_the_other() -> None:
    async with Fleet(2, 2, names=NAMES, fetches=False) as fleet:
        request = toy_request(1, prompt_tokens=41, max_tokens=3)
        await fleet.ask(request, fleet.new_path("prefill0", "decode1"))
        await fleet.change_role("decode1")
        mesh = fleet.processes["decode1"].mesh
        again = await fleet.ask(request, fleet.new_path("decode1", "decode0"))
        assert again.cached_tokens == 32, "whole blocks"
        (chunk,) = mesh.ran(PrefillChunk)
        assert [len(row.tokens) for row in chunk.rows] == [41 - again.cached_tokens]


async def test_a_change_that_cannot_be_prepared_leaves_the_role() -> None:
    async with Fleet(2, 2) as fleet:
        worker = fleet.decode_worker("decode1")

        async def fails(pages: tuple[tuple[int, ...], ...]) -> None:
            raise DeadlineExceededError("no programs")

        with pytest.raises(DeadlineExceededError):
            await worker.change_role(PREFILL, 1.0, fails)
        assert worker.role is DECODE and not (await worker.status()).draining
        await streams(fleet, 10)
        assert fleet.processes["decode1"].mesh.ran(DecodeSteps)


async def test_prompts_for_another_role_are_refused_with_the_role_that_the_worker_has() -> None:
    async with Fleet(2, 2) as fleet:
        worker = fleet.processes["prefill1"].worker
        with pytest.raises(UnavailableError, match="is a prefill worker now"):
            await worker.reserve(reserve_call(1))
        await fleet.change_role("prefill1")
        with pytest.raises(UnavailableError, match="is a decode worker now"):
            await worker.prefill(prefill_call(2))


LONG = other(1, tokens=200)  # twelve blocks of 16


async def fetched(fleet: Fleet, name: str, handoff_id: int) -> FetchReply:
    """Asks a worker for what it cached of `LONG`."""
    worker = fleet.processes[name].worker
    chain = worker._kept.chain(LONG, LONG.prompt_token_ids)
    return await worker.fetch(FetchCall(handoff_id, "prefill0", chain, 0, 16, 60.0))


async def test_nothing_is_fetched_from_a_worker_that_changes() -> None:
    """It would hold pages, and its mesh would run other commands while it is measured."""
    async with Fleet(2, 2, roomy(), roomy(), names=NAMES) as fleet:
        await fleet.ask(LONG, fleet.new_path("prefill1", "decode0"))
        worker, replies = fleet.processes["prefill1"].worker, []

        async def prepare(pages: tuple[tuple[int, ...], ...]) -> None:
            replies.append(await fetched(fleet, "prefill1", 70))
            raise DeadlineExceededError("no programs")

        with pytest.raises(DeadlineExceededError):
            await worker.change_role(DECODE, 1.0, prepare)
        assert replies == [FetchReply()]
        assert (await fetched(fleet, "prefill1", 71)).blocks == 12, "afterwards it gives again"
        await worker.abort(71, "not wanted any more")


async def test_transfers_that_a_prefill_worker_ended_let_it_extract_no_more_as_decode_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(given_kv, "BETWEEN_STEPS", 4)
    async with Fleet(2, 2, roomy(), roomy(), names=NAMES, costs=FAST) as fleet:
        await fleet.ask(LONG, fleet.new_path("prefill1", "decode0"))
        worker, mesh = fleet.processes["prefill1"].worker, fleet.processes["prefill1"].mesh
        for handoff_id in range(70, 90):
            assert (await fetched(fleet, "prefill1", handoff_id)).blocks == 12
            await asyncio.sleep(0.01)
            await worker.abort(handoff_id, "not wanted any more")
        await fleet.change_role("prefill1")
        before = len(mesh.ran(ExtractBlock))
        assert (await fetched(fleet, "prefill1", 90)).blocks == 12
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(mesh.ran(ExtractBlock)) - before == given_kv.BETWEEN_STEPS
        await worker.abort(90, "not wanted any more")

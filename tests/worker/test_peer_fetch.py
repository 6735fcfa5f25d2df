"""What one prefill worker keeps another one fetches, over fake meshes that check what lies in every
page they read: streams are those of the oracle whatever becomes of holder, asker and blocks on
their way, and afterwards every page is free on both sides."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from jdisagg.errors import InvalidRequestError
from jdisagg.messages.ports import FetchCall, FetchReply
from jdisagg.request import Adapter
from jdisagg.scheduler.host_blocks import TierRoom
from jdisagg.scheduler.residency import BlockNames
from tests.fakes.cluster import until
from tests.fakes.fake_executor import Costs, Faults
from tests.worker.conversations import limits
from tests.worker.peering import PROMPT, at, counted, failed, faults_of, fleet, settled
from tests.worker.tiers import BLOCK_BYTES, PIECES, other

FETCHED = 64


async def test_what_another_worker_keeps_is_fetched_and_not_computed() -> None:
    async with fleet(wire=True) as both:
        assert await at(both, "prefill0") == 80
        assert await at(both, "prefill1") == 80 - FETCHED
        asker = counted(both, "prefill1")
        assert asker("peer_blocks_fetched") == 4
        assert asker("peer_tokens_restored") == FETCHED
        assert asker("peer_fetch_failed") == 0
        assert counted(both, "prefill0")("peer_blocks_given") == 4
        # it is the asker's now
        await both.kill("prefill0")
        assert await at(both, "prefill1") == 80 - FETCHED


async def test_what_the_holder_has_in_host_memory_alone_it_gives_too() -> None:
    room = TierRoom(64 * BLOCK_BYTES, always=True)
    async with fleet(prefill=limits(pages=20), tiers=room) as both:
        assert await at(both, "prefill0") == 80
        holder = both.prefill_worker("prefill0")
        await at(both, "prefill0", other(2))  # takes the pages
        assert holder.counters["host_blocks_written"] > 0
        assert await at(both, "prefill1") == 80 - FETCHED
        assert holder.counters["host_tokens_restored"] > 0


async def test_what_the_holder_cannot_restore_in_time_is_not_given() -> None:
    room, slow = TierRoom(64 * BLOCK_BYTES, always=True), Costs(pull=1e-5, other=0.1)
    async with fleet(prefill=limits(pages=20), tiers=room, costs=slow) as both:
        await at(both, "prefill0")
        await at(both, "prefill0", other(2))  # takes the pages
        holder = both.prefill_worker("prefill0")
        await until(lambda: holder.at_rest())
        chain = holder._kept.chain(PROMPT, PROMPT.prompt_token_ids)[:4]
        for handoff_id, seconds, blocks in ((70, 1.0, 0), (71, 60.0, 4)):
            began = both.clock.now()
            reply = await holder.fetch(FetchCall(handoff_id, "prefill1", chain, 0, 16, seconds))
            assert reply.blocks == blocks
            await until(lambda: not len(holder._given))
            assert both.clock.now() - began < seconds + 2, "the asker waits no longer"
        await settled(both)


async def test_a_holder_that_dies_midway_costs_no_token_and_what_has_come_stays() -> None:
    pulls = 0

    def slow_after_two_blocks(_: int) -> str:
        nonlocal pulls
        pulls += 1
        return "" if pulls <= 2 * PIECES else "stall"

    faults = faults_of("prefill1", Faults(pull_error=slow_after_two_blocks))
    async with fleet(faults=faults) as both:
        assert await at(both, "prefill0") == 80
        running = asyncio.ensure_future(at(both, "prefill1"))
        while pulls <= 2 * PIECES:
            await asyncio.sleep(1e-3)
        await both.kill("prefill0")
        assert await running == 80 - 32
        assert failed(both, "prefill1") == {"lost": 1}
        assert counted(both, "prefill1")("peer_blocks_fetched") == 2
        await settled(both)


async def test_a_byte_that_is_spoiled_on_the_way_is_computed_again() -> None:
    faults = faults_of("prefill1", Faults(pull_error=lambda _: "garble"))
    async with fleet(faults=faults) as both:
        assert await at(both, "prefill0") == 80
        assert await at(both, "prefill1") == 80
        assert failed(both, "prefill1") == {"spoiled": 1}
        assert counted(both, "prefill1")("peer_blocks_fetched") == 0
        await settled(both)


@pytest.mark.parametrize("left", [0, 1, 3])
async def test_what_the_holder_has_given_away_is_computed(left: int) -> None:
    """The hint promises four blocks, of which the first `left` are there."""
    async with fleet() as both:
        assert await at(both, "prefill0") == 80
        holder = both.prefill_worker("prefill0")
        given = holder._given.give

        async def stale(call: FetchCall) -> FetchReply:
            chain = call.names[:left]
            if not chain:
                return FetchReply()
            return await given(msgspec.structs.replace(call, names=chain))

        holder._given.give = stale  # type: ignore[method-assign]
        assert await at(both, "prefill1") == 80 - 16 * left
        assert failed(both, "prefill1") == {"gone": 1}
        assert counted(both, "prefill1")("peer_blocks_fetched") == left
        await settled(both)


async def test_a_prompt_that_is_given_up_ends_its_fetch_and_the_holder_lets_go() -> None:
    async with fleet(costs=Costs(pull=2.0, other=1e-5)) as both:
        assert await at(both, "prefill0") == 80
        holder, asker = both.prefill_worker("prefill0"), both.prefill_worker("prefill1")
        running = asyncio.ensure_future(at(both, "prefill1"))
        await until(lambda: len(holder._given))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.sleep(1.0)
        assert not len(holder._given)  # long before its lease ends
        assert asker._sources.quiet
        assert failed(both, "prefill1") == {"unwanted": 1}
        await settled(both)


async def test_an_asker_that_dies_midway_leaves_the_holder_all_its_pages() -> None:
    async with fleet(costs=Costs(pull=2.0, other=1e-5)) as both:
        assert await at(both, "prefill0") == 80
        holder = both.prefill_worker("prefill0")
        running = asyncio.ensure_future(at(both, "prefill1"))
        await until(lambda: len(holder._given))
        await both.kill("prefill1")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await settled(both)
        assert holder.counters["leases_expired"] == 1
        assert await at(both, "prefill0") == 80 - FETCHED


async def test_a_worker_of_another_model_is_not_asked() -> None:
    async with fleet() as both:
        assert await at(both, "prefill0") == 80
        holder = both.prefill_worker("prefill0")
        theirs = msgspec.structs.replace(holder._hello, model_fingerprint="another")
        holder._outgoing._hello = theirs
        assert await at(both, "prefill1") == 80
        assert failed(both, "prefill1") == {"refused": 1}
        await settled(both)


async def test_nobody_is_given_what_he_cannot_name() -> None:
    async with fleet() as both:
        holder = both.prefill_worker("prefill0")
        await at(both, "prefill0")
        names = holder._kept.chain(PROMPT, PROMPT.prompt_token_ids)
        wanted = FetchCall(1, "prefill1", names, 0, 32, 1.0)
        assert await holder.fetch(wanted) == FetchReply()  # of 32 tokens, not of 16
        stranger = BlockNames(b"another secret", "toy", 16)
        names = stranger.chain(PROMPT, PROMPT.prompt_token_ids, 16)
        assert await holder.fetch(FetchCall(1, "p", names, 0, 16, 1.0)) == FetchReply()
        adapted = replace(PROMPT, adapter=Adapter("mine", "/adapter", "digest"))
        for theirs in (replace(PROMPT, tenant="another"), adapted):
            names = holder._kept.chain(theirs, PROMPT.prompt_token_ids)
            assert await holder.fetch(FetchCall(1, "p", names, 0, 16, 1.0)) == FetchReply()
        with pytest.raises(InvalidRequestError, match="names"):
            await holder.fetch(FetchCall(1, "p", (), 0, 16, 1.0))
        await settled(both)


async def test_after_a_reset_nothing_that_was_fetched_before_is_used() -> None:
    """Neither what is on its way, nor what a worker that was not reset yet would give."""
    async with fleet(costs=Costs(pull=0.5, other=1e-5)) as both:
        assert await at(both, "prefill0") == 80
        running = asyncio.ensure_future(at(both, "prefill1"))
        await until(lambda: len(both.prefill_worker("prefill0")._given))
        await both.prefill_worker("prefill1").reset_cache()
        assert await running == 80
        assert failed(both, "prefill1") == {"reset": 1}
        await both.prefill_worker("prefill1").reset_cache()  # again: the prompt has ended
        assert await at(both, "prefill1") == 80
        assert both.counted("peer_blocks_fetched") == 0
        await settled(both)


async def test_kv_of_old_weights_is_fetched_by_no_worker_with_new_ones() -> None:
    async with fleet() as both:
        assert await at(both, "prefill0") == 80
        workers = [both.prefill_worker("prefill0"), both.prefill_worker("prefill1")]
        old = workers[0]._kept.chain(PROMPT, PROMPT.prompt_token_ids)
        for worker in (*workers, both.decode_worker("decode0")):
            worker.forget_weights(False, "new@f00")
        assert await workers[0].fetch(FetchCall(1, "p", old, 0, 16, 1.0)) == FetchReply()
        assert not set(old) & set(workers[0]._kept.chain(PROMPT, PROMPT.prompt_token_ids))
        assert await at(both, "prefill1") == 80
        assert both.counted("peer_blocks_fetched") == 0
        await settled(both)

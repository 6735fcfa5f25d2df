"""What one prefill worker keeps of a model with recurrent state another one fetches: the KV and the
snapshot at its end."""

from dataclasses import replace

import pytest

from jdisagg.scheduler.host_blocks import TierRoom
from tests.fakes.cluster import Fleet
from tests.fakes.fake_executor import Faults
from tests.worker.conversations import SEEDS, Talk
from tests.worker.peering import at, counted, failed, faults_of, fleet
from tests.worker.states import stateful


def stateful_fleet(**more: object) -> Fleet:
    decode = replace(stateful(pages=400), snapshots_per_rank=0)
    return fleet(prefill=stateful(), decode=decode, wire=True, **more)


async def all_settled(both: Fleet) -> None:
    await both.check_quiet()
    for name in ("prefill0", "prefill1"):
        for kept in both.prefill_worker(name)._kept.snapshots:
            assert kept.pending == 0 and kept.free + len(kept) == kept.total


async def test_a_prefix_is_fetched_with_the_snapshot_at_its_end() -> None:
    async with stateful_fleet() as both:
        assert await at(both, "prefill0") == 80
        assert await at(both, "prefill1") == 16
        asker = counted(both, "prefill1")
        assert asker("peer_blocks_fetched") == 4 and asker("peer_snapshots_fetched") == 1
        assert asker("peer_fetch_failed") == 0
        assert await at(both, "prefill1") == 16
        await all_settled(both)


async def test_a_snapshot_alone_is_fetched_where_the_blocks_are_known() -> None:
    async with stateful_fleet() as both:
        assert await at(both, "prefill0") == 80
        assert await at(both, "prefill1") == 16
        (kept,) = both.prefill_worker("prefill1")._kept.snapshots
        kept.clear()
        assert await at(both, "prefill1") == 16
        asker = counted(both, "prefill1")
        assert asker("peer_blocks_fetched") == 4 and asker("peer_snapshots_fetched") == 2
        await all_settled(both)


async def test_a_holder_without_a_snapshot_gives_nothing() -> None:
    async with stateful_fleet() as both:
        assert await at(both, "prefill0") == 80
        (kept,) = both.prefill_worker("prefill0")._kept.snapshots
        kept.clear()
        assert await at(both, "prefill1") == 80
        assert failed(both, "prefill1") == {"gone": 1}
        await all_settled(both)


@pytest.mark.parametrize("fault", ["lost", "garble"])
async def test_a_fetch_that_fails_is_a_miss(fault: str) -> None:
    faults = Faults(pull_error=lambda number: fault if number < 100 else "")
    async with stateful_fleet(faults=faults_of("prefill1", faults)) as both:
        assert await at(both, "prefill0") == 80
        assert await at(both, "prefill1") == 80
        assert failed(both, "prefill1") == {"spoiled" if fault == "garble" else "lost": 1}
        assert counted(both, "prefill1")("peer_snapshots_fetched") == 0
        await all_settled(both)


async def test_a_bit_of_a_snapshot_that_flips_on_its_way_is_a_miss() -> None:
    """The blocks have arrived."""
    async with stateful_fleet() as both:
        assert await at(both, "prefill0") == 80
        offer, holder, flipped = both.channel.offer, both.processes["prefill0"].mesh, []

        def spoiled(owner, offer_id, band, entries, ready_at) -> None:
            if owner is holder and len(entries) == 1:
                ((tokens, zero, chain),) = entries
                entries = [(tokens, zero, chain ^ 1)]
                flipped.append(offer_id)
            offer(owner, offer_id, band, entries, ready_at)

        both.channel.offer = spoiled  # type: ignore[method-assign]
        assert await at(both, "prefill1") == 80
        assert len(flipped) == 1
        assert failed(both, "prefill1") == {"spoiled": 1}
        assert counted(both, "prefill1")("peer_snapshots_fetched") == 0
        both.channel.offer = offer  # type: ignore[method-assign]
        await all_settled(both)


@SEEDS
async def test_conversations_over_two_workers_that_fetch_have_the_oracles_tokens(seed: int) -> None:
    tiers = TierRoom(1 << 20, always=True)
    async with stateful_fleet(seed=seed, tiers=tiers) as both:
        talk = Talk(seed)
        for _ in range(30):
            request = talk.next()
            path = both.new_path(talk.random.choice(("prefill0", "prefill1")))
            collected = await both.ask(request, path)
            talk.heard(request, collected)
        assert both.counted("peer_snapshots_fetched") > 0
        await all_settled(both)

"""The receiver alone: what it does with blocks when it was closed, and what it refuses to call
complete."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import msgspec
import pytest

from jdisagg.errors import HandoffError, UnavailableError
from jdisagg.layout.kv_spec import KvKind, KVSpec
from jdisagg.messages.ports import FirstToken, HandoffEnd, Offer, PeerMessage
from jdisagg.messages.step_commands import CopyPages, DropBlocks, InsertBlock
from tests.fakes.fake_executor import Costs, FakeChannel
from tests.worker.receiving import Receiving, ScriptedPeer, blocks, sums


async def test_a_block_of_several_layer_groups_counts_for_each_and_must_not_overlap_another():
    channel, offers = blocks(10)
    entries = channel.offered[1000][1]
    channel.offered[7] = (range(2), list(entries), 0.0)
    both = Offer(7, 0, 0, 4, 4, 0, 2)
    rest = [offer for offer in offers if offer.start]
    received = await Receiving(channel, [both, *rest, HandoffEnd(5, 10, ())]).receive()
    assert len(received.blocks) == 5
    for wrong, count in (
        ([both, *offers], 7),
        ([msgspec.structs.replace(both, groups=1), *rest], 5),
        (rest, 4),
    ):
        channel, _ = blocks(10)
        first = wrong[0].group
        channel.offered[7] = (range(first, first + wrong[0].groups), list(entries), 0.0)
        with pytest.raises(HandoffError, match="do not cover 10 positions of 2 layer groups"):
            await Receiving(channel, [*wrong, HandoffEnd(count, 10, ())]).receive()


async def test_what_windows_see_must_come_whole_and_may_come_in_any_order() -> None:
    """Of eleven positions those from the eighth on, of one group."""
    handoff = Receiving(FakeChannel(), []).handoff
    spec = KVSpec.attention(2, 1, 1, "float32", windows=(None, 4))
    mesh = dataclasses.replace(handoff._to.mesh, kv_spec=spec, windows_apart=True)
    handoff._to = dataclasses.replace(handoff._to, mesh=mesh, snapshot=lambda *_: ())
    all_of_it = [Offer(1, 0, 0, 11, 12, 0, 2)]
    seen = [Offer(2, 0, start, 1, 4, 0, kind=KvKind.WINDOW) for start in (9, 8, 10)]
    for came, whole in (
        ([*seen, *all_of_it], True),
        (all_of_it, False),
        ([*all_of_it, *seen[:2]], False),
        ([*all_of_it, *seen[:2], seen[0]], False),
    ):
        handoff.blocks.verified[:] = came
        assert handoff.blocks.kept_tokens() == 11
        end = HandoffEnd(len(came), 11, ())
        if whole:
            handoff._check_coverage(end)
        else:
            with pytest.raises(HandoffError, match="or not what windows see"):
                handoff._check_coverage(end)


async def test_blocks_are_inserted_then_acknowledged_and_counted() -> None:
    channel, offers = blocks(10)
    receiving = Receiving(channel, [*offers, HandoffEnd(6, 10, (FirstToken(0, 3),))])
    received = await receiving.receive()
    await asyncio.sleep(0.001)
    assert received.end.firsts == (FirstToken(0, 3),) and received.bytes_moved == 2 * 10 * 8
    assert sorted(receiving.peer.acknowledged) == sorted(offer.offer_id for offer in offers)


class DeafPeer(ScriptedPeer):
    """Loses the first words about blocks, more than there are blocks, and ends when it has heard
    of every block, as one who moves a sequence does."""

    lost = 0

    async def offers(self, handoff_id: int, attempt: int) -> AsyncIterator[PeerMessage]:
        for message in self.messages[:-1]:
            yield message
        while len(set(self.acknowledged)) < len(self.messages) - 1:
            await asyncio.sleep(0.1)
        yield self.messages[-1]

    async def acknowledge(self, handoff_id: int, offer_ids: tuple[int, ...]) -> None:
        if offer_ids and self.lost < 8:
            self.lost += 1
            raise UnavailableError("the call was lost")
        await super().acknowledge(handoff_id, offer_ids)


async def test_acknowledgements_that_were_lost_are_said_again_while_the_sender_waits_for_them():
    channel, offers = blocks(10)
    told = [*offers, HandoffEnd(6, 10, (FirstToken(0, 3),))]
    receiving = Receiving(channel, told, kind=DeafPeer)
    async with asyncio.timeout(30):
        received = await receiving.receive()
    assert isinstance(receiving.peer, DeafPeer) and receiving.peer.lost == 8
    assert received.end.firsts == (FirstToken(0, 3),)


async def test_blocks_of_a_sequence_that_moves_are_acknowledged_once_more_at_its_end() -> None:
    channel, offers = blocks(10)
    receiving = Receiving(channel, [*offers, HandoffEnd(6, 10, (FirstToken(0, 3),), moved=(3,))])
    await receiving.receive()
    await asyncio.sleep(0.001)
    ids = [offer.offer_id for offer in offers]
    assert sorted(receiving.peer.acknowledged) == sorted(2 * ids)


async def test_a_closed_receiver_inserts_nothing_and_drops_what_arrives() -> None:
    channel, offers = blocks(10)
    closing = Receiving(channel, [*offers, HandoffEnd(6, 10, ())])
    task = asyncio.create_task(closing.receive())
    await asyncio.sleep(0.001)
    closing.handoff.close()
    with pytest.raises(HandoffError):
        await task
    await asyncio.sleep(1.0)
    assert not closing.mesh.ran(InsertBlock)
    assert closing.mesh.ran(DropBlocks) and not closing.mesh.pulled


@pytest.mark.parametrize("missing", ["a block", "a position", "the end", "a layer group"])
async def test_an_incomplete_hand_off_is_refused(missing: str) -> None:
    channel, offers = blocks(10)
    messages: list[PeerMessage] = {
        "a block": [*offers[:-1], HandoffEnd(6, 10, ())],
        "a position": [*offers, HandoffEnd(6, 11, ())],
        "the end": [*offers],
        "a layer group": [*offers[:3], HandoffEnd(3, 10, ())],
    }[missing]
    with pytest.raises(HandoffError):
        await Receiving(channel, messages).receive()


@pytest.mark.parametrize("order", ["with its block", "before any block", "after all blocks"])
async def test_a_hand_off_is_whole_only_when_every_block_sums_to_what_the_sender_computed(
    order: str,
) -> None:
    channel, offers = blocks(10)
    checksums = sums(channel, offers)
    paired: list[PeerMessage] = [
        message for pair in zip(offers, checksums, strict=True) for message in pair
    ]
    messages = {
        "with its block": paired,
        "before any block": [*checksums, *offers],
        "after all blocks": [*offers, *checksums],
    }[order]
    receiving = Receiving(channel, [*messages, HandoffEnd(6, 10, ())], verify=True)
    assert len((await receiving.receive()).blocks) == 6
    assert receiving.counters["checksums_mismatched"] == 0


@pytest.mark.parametrize("garbled", [{1}, {1, 2, 3}, {2, 5}])
async def test_a_block_that_came_out_wrong_is_pulled_again(garbled: set[int]) -> None:
    channel, offers = blocks(10)
    messages = [*offers, *sums(channel, offers), HandoffEnd(6, 10, ())]
    receiving = Receiving(
        channel, messages, lambda nth: "garble" if nth in garbled else "", verify=True
    )
    assert len((await receiving.receive()).blocks) == 6
    assert receiving.counters["checksums_mismatched"] == len(garbled)
    assert receiving.counters["blocks_pulled_again"] == len(garbled)


@pytest.mark.parametrize(
    ("fault", "counter"),
    [("garble", "checksums_mismatched"), ("lost", "pulls_failed"), ("stall", "pulls_timed_out")],
)
async def test_a_block_that_never_comes_out_right_fails_after_three_tries(
    fault: str, counter: str
) -> None:
    channel, offers = blocks(4)
    messages = [*offers, *sums(channel, offers), HandoffEnd(2, 4, ())]
    receiving = Receiving(channel, messages, lambda nth: "" if nth == 2 else fault, verify=True)
    with pytest.raises(HandoffError, match="in 3 tries"):
        await receiving.receive()
    assert receiving.counters[counter] == 3
    await asyncio.sleep(1)
    assert not receiving.mesh.pulled


async def test_a_checksum_that_never_comes_fails_the_hand_off() -> None:
    channel, offers = blocks(4)
    messages: list[PeerMessage] = [*offers, *sums(channel, offers)[:1], HandoffEnd(2, 4, ())]
    receiving = Receiving(channel, messages, verify=True)
    with pytest.raises(HandoffError, match="no checksum"):
        await receiving.receive()
    # a block counts as come only once it is verified, in every layer group
    assert receiving.handoff.blocks.kept_tokens() == 0


async def test_a_long_pull_keeps_the_senders_lease_alive_and_a_silent_sender_is_given_up() -> None:
    channel, offers = blocks(4)
    told = [*offers, HandoffEnd(2, 4, ())]
    slow = Receiving(channel, told, costs=Costs(pull=9.0))
    received = await slow.receive()
    assert slow.peer.heartbeats == 4 and received.exposed_seconds == pytest.approx(9.0, abs=0.01)
    silent = Receiving(channel, told, costs=Costs(pull=9.5))
    silent.peer.silent = True
    with pytest.raises(HandoffError, match="does not answer"):
        await silent.receive()
    assert asyncio.get_running_loop().time() < 9.1 + 9.0


async def test_a_pull_that_a_busy_mesh_does_not_get_to_is_no_failure_of_its_sender() -> None:
    channel, offers = blocks(4)
    now = asyncio.get_running_loop().time
    busy_until = now() + 100.0
    receiving = Receiving(
        channel,
        [*offers, HandoffEnd(2, 4, ())],
        lambda _: "stall" if now() < busy_until else "",
        Costs(other=100.0),
    )
    receiving.loop.fire(CopyPages(1, ()))
    received = await receiving.receive()
    assert len(received.blocks) == 2 and receiving.counters["pulls_timed_out"] == 2


async def test_a_heartbeat_that_is_due_while_a_hand_off_fails_troubles_nobody() -> None:
    class SlowToClose(ScriptedPeer):
        async def offers(self, handoff_id: int, attempt: int) -> AsyncIterator[PeerMessage]:
            try:
                for message in self.messages:
                    yield message
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(5)

    troubles: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: troubles.append(context))
    channel, offers = blocks(4)
    with pytest.raises(HandoffError, match="in 3 tries"):
        await Receiving(channel, [*offers], lambda nth: "lost", kind=SlowToClose).receive()
    assert asyncio.get_running_loop().time() > 2 and not troubles

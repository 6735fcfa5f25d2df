"""The receiver alone: what it does with blocks when it was closed, and what it refuses to call complete."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from jdisagg.dispatch.ports import FirstToken, HandoffEnd, HandoffSource, Offer, PeerHello
from jdisagg.errors import HandoffError
from jdisagg.scheduler.commands import DropBlocks, InsertBlock
from jdisagg.telemetry import Counters
from jdisagg.worker.receiver import Receiver
from jdisagg.worker.step_loop import StepLoop
from tests.fakes.fake_executor import FakeChannel, FakeExecutor, toy_limits
from tests.fakes.toy_model import extend
from tests.fakes.virtual_time import run_virtually


class ScriptedPeer:
    """Offers what it was given."""

    def __init__(self, messages: list[Offer | HandoffEnd]) -> None:
        self.messages = messages
        self.acknowledged: list[int] = []

    async def hello(self, hello: PeerHello) -> PeerHello:
        return hello

    async def offers(self, handoff_id: int, attempt: int) -> AsyncIterator[Offer | HandoffEnd]:
        for message in self.messages:
            yield message

    async def acknowledge(self, handoff_id: int, offer_ids: tuple[int, ...]) -> None:
        self.acknowledged += offer_ids

    async def abort(self, handoff_id: int, reason: str) -> None: ...


def blocks(tokens: int) -> tuple[FakeChannel, list[Offer]]:
    """Offers of four tokens each, in two layer groups."""
    channel, offers, chain = FakeChannel(), [], 1
    entries = [(position, 7, chain := extend(chain, 7)) for position in range(tokens)]
    for group in range(2):
        for start in range(0, tokens, 4):
            offer_id = 1000 * (group + 1) + start
            piece = entries[start : start + 4]
            channel.offered[offer_id] = (group, piece, 0.0)
            offers.append(Offer(offer_id, group, start, len(piece), 4, 0))
    return channel, offers


def receiver(mesh: FakeExecutor, peer: ScriptedPeer) -> Receiver:
    loop = StepLoop(mesh, lambda _: None, lambda *_: None, lambda _: None)
    return Receiver(loop, peer, HandoffSource("p", 1), 1, 0, (5, 6, 7), 4, 2, 0, 10.0, Counters())


def test_blocks_are_inserted_then_acknowledged_and_counted() -> None:
    async def main() -> None:
        channel, offers = blocks(10)
        mesh, peer = FakeExecutor(toy_limits(), channel), ScriptedPeer([*offers, HandoffEnd(6, 10, (FirstToken(0, 3),))])
        received = await receiver(mesh, peer).receive()
        assert received.firsts == (FirstToken(0, 3),) and received.bytes_moved == 2 * 10 * 8
        assert sorted(peer.acknowledged) == sorted(offer.offer_id for offer in offers)

    run_virtually(main)


def test_a_closed_receiver_inserts_nothing_and_drops_what_arrives() -> None:
    async def main() -> None:
        channel, offers = blocks(10)
        mesh = FakeExecutor(toy_limits(), channel)
        closing = receiver(mesh, ScriptedPeer([*offers, HandoffEnd(6, 10, ())]))
        task = asyncio.create_task(closing.receive())
        await asyncio.sleep(0.001)
        closing.close()
        with pytest.raises(HandoffError):
            await task
        await asyncio.sleep(1.0)
        assert not any(isinstance(command, InsertBlock) for command in mesh.log)
        assert any(isinstance(command, DropBlocks) for command in mesh.log) and not mesh.pulled

    run_virtually(main)


@pytest.mark.parametrize("missing", ["a block", "a position", "the end", "a layer group"])
def test_an_incomplete_hand_off_is_refused(missing: str) -> None:
    async def main() -> None:
        channel, offers = blocks(10)
        messages: list[Offer | HandoffEnd] = {
            "a block": [*offers[:-1], HandoffEnd(6, 10, ())],
            "a position": [*offers, HandoffEnd(6, 11, ())],
            "the end": [*offers],
            "a layer group": [*offers[:3], HandoffEnd(3, 10, ())],
        }[missing]
        with pytest.raises(HandoffError):
            await receiver(FakeExecutor(toy_limits(), channel), ScriptedPeer(messages)).receive()

    run_virtually(main)

"""A receiver of KV alone: its sender does what a script says, and its mesh is a fake."""

import asyncio
from collections.abc import AsyncIterator, Callable

from jdisagg.config import LimitsConfig
from jdisagg.messages.ports import HandoffSource, Offer, OfferChecksum, PeerHello, PeerMessage
from jdisagg.telemetry import Counters
from jdisagg.worker.block_moves import Destination
from jdisagg.worker.incoming_handoff import IncomingHandoff, Received
from jdisagg.worker.peers import LinkMeter, LinkShare, PeerLink, SenderLine, SideCalls
from jdisagg.worker.step_loop import StepLoop
from tests.fakes.fake_executor import Costs, FakeChannel, FakeExecutor, Faults, checksum, toy_limits
from tests.fakes.toy_model import extend


class ScriptedPeer:
    """Offers what it was given."""

    def __init__(self, messages: list[PeerMessage]) -> None:
        self.messages = messages
        self.acknowledged: list[int] = []
        self.heartbeats = 0
        self.silent = False

    async def hello(self, hello: PeerHello) -> PeerHello:
        return hello

    async def offers(self, handoff_id: int, attempt: int) -> AsyncIterator[PeerMessage]:
        for message in self.messages:
            yield message

    async def acknowledge(self, handoff_id: int, offer_ids: tuple[int, ...]) -> None:
        if self.silent:
            await asyncio.sleep(1000)
        self.acknowledged += offer_ids
        self.heartbeats += not offer_ids

    async def abort(self, handoff_id: int, reason: str) -> None: ...


def blocks(tokens: int) -> tuple[FakeChannel, list[Offer]]:
    """Offers of four tokens each, in two layer groups."""
    channel, offers, chain = FakeChannel(), [], 1
    entries = [(position, 7, chain := extend(chain, 7)) for position in range(tokens)]
    for group in range(2):
        for start in range(0, tokens, 4):
            offer_id = 1000 * (group + 1) + start
            piece = entries[start : start + 4]
            channel.offered[offer_id] = (range(group, group + 1), list(piece), 0.0)
            offers.append(Offer(offer_id, group, start, len(piece), 4, 0))
    return channel, offers


class Receiving:
    """A hand-off to rank 0 of `mesh` whose sender is `peer`."""

    def __init__(
        self,
        channel: FakeChannel,
        messages: list[PeerMessage],
        pull_error: Callable[[int], str] = lambda nth: "",
        costs: Costs | None = None,
        verify: bool = False,
        kind: type[ScriptedPeer] = ScriptedPeer,
    ) -> None:
        self.mesh = mesh = FakeExecutor(toy_limits(), channel, Faults(pull_error), costs)
        self.peer = peer = kind(messages)
        now, limits = asyncio.get_running_loop().time, LimitsConfig(pull_seconds=10.0)
        mesh.peers.add("p#1")
        self.counters = Counters()
        self.loop = StepLoop(mesh, lambda _: None, lambda *_: None, lambda _: None, now)
        self.meter = LinkMeter(now)
        calls = SideCalls(self.counters, limits.timeouts.handoff)
        source = HandoffSource("p", 1)
        line = SenderLine(peer, source, 1, calls, self.meter, LinkShare())  # pyright: ignore[reportArgumentType]
        line.link = PeerLink("p#1", KEY, verify=verify)
        pages = Destination(mesh.limits, 0, lambda tokens: (5, 6, 7)[: -(-tokens // 4)])
        self.handoff = IncomingHandoff(self.loop, line, pages, limits, self.counters, now)

    async def receive(self) -> Received:
        return await self.handoff.receive()


KEY = 77


def sums(channel: FakeChannel, offers: list[Offer]) -> list[OfferChecksum]:
    return [
        OfferChecksum(offer.offer_id, checksum(KEY, *channel.offered[offer.offer_id][:2]))
        for offer in offers
    ]

"""Sends messages from the receiver of a KV transfer (hand-off) to its sender: acknowledgements,
heartbeats, aborts.

Messages are sent in the background. A lost acknowledgement is repeated after the next answered
heartbeat, because a migration waits for all acknowledgements. An abort is repeated a limited number
of times until the sender has received it."""

from collections.abc import AsyncIterator

from jdisagg.messages.ports import HandoffSource, PeerMessage, PeerPort
from jdisagg.worker.background import SideCalls
from jdisagg.worker.peers import LinkMeter, PeerLink


class SenderLine:
    """Sends the receiver's messages of one hand-off."""

    def __init__(
        self,
        peer: PeerPort,
        source: HandoffSource,
        attempt: int,
        calls: SideCalls,
        meter: LinkMeter,
    ) -> None:
        self.peer = peer
        self.source = source
        self.link = PeerLink()
        self._attempt = attempt
        self._calls = calls
        self._meter = meter
        self._unsent: list[int] = []
        self._sending = False

    @property
    def name(self) -> str:
        return f"hand-off {self.source.handoff_id}"

    def offers(self) -> AsyncIterator[PeerMessage]:
        return self.peer.offers(self.source.handoff_id, self._attempt)

    def arrived(self, size_bytes: int, seconds: float) -> None:
        self._meter.add(self.source.worker, size_bytes, seconds)

    def acknowledge(self, offer_id: int) -> None:
        """Acknowledges a block. One message is in flight at a time; the next message contains all
        acknowledgements made in the meantime."""
        self._unsent.append(offer_id)
        self._send_next()

    def acknowledge_all(self, offer_ids: tuple[int, ...]) -> None:
        """Repeats all acknowledgements at the end of the hand-off. If one of them was lost, a
        migration, or a hand-off that sent no blocks, would otherwise not end at its sender."""
        self._calls.send(lambda: self.peer.acknowledge(self.source.handoff_id, offer_ids))

    async def heartbeat(self) -> None:
        """Renews the sender's lease. Raises JdisaggError if the sender does not answer."""
        await self.peer.acknowledge(self.source.handoff_id, ())
        if self._unsent:
            self._send_next()

    def give_up(self, reason: str) -> None:
        peer, handoff_id = self.peer, self.source.handoff_id
        self._calls.send_until_received(lambda: peer.abort(handoff_id, reason))

    def _send_next(self) -> None:
        if not self._sending:
            self._sending = True
            self._calls.send(self._acknowledge)

    async def _acknowledge(self) -> None:
        ids, self._unsent = self._unsent, []
        try:
            await self.peer.acknowledge(self.source.handoff_id, tuple(ids))
        except BaseException:
            self._unsent = [*ids, *self._unsent]
            self._sending = False
            raise
        self._sending = bool(self._unsent)
        if self._sending:
            self._calls.send(self._acknowledge)

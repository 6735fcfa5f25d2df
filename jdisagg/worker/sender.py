"""The sending side of one hand-off: what was offered, what is still outstanding, and who listens.

A listener gets every offer from the first on, then the end, however late it comes. Knows no scheduler and no mesh.
"""

import asyncio
from collections.abc import AsyncIterator

from jdisagg.dispatch.ports import HandoffEnd, Offer, PrefillCall, PrefillReply
from jdisagg.errors import JdisaggError
from jdisagg.scheduler.handoff import Handoff, HandoffEvent, HandoffState


class Sender:
    """A prompt on a prefill worker, from the call until its last block is acknowledged. `key` owns its pages."""

    def __init__(self, key: int, call: PrefillCall, arrival: float, now: float, deadline: float) -> None:
        self.key = key
        self.call = call
        self.arrival = arrival
        self.queued_at = now
        self.started_at: float | None = None
        self.rank = -1
        self.handoff = Handoff(call.handoff_id, HandoffState.COMPUTING, deadline)
        self.outstanding: dict[int, int] = {}
        self.reply: asyncio.Future[PrefillReply] = asyncio.get_running_loop().create_future()
        self.error: JdisaggError | None = None
        self._messages: list[Offer | HandoffEnd] = []
        self._changed = asyncio.Event()

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.call.request.prompt_token_ids + self.call.children[0].accepted

    def announce(self, offers: list[Offer]) -> None:
        self.outstanding.update((offer.offer_id, offer.block_tokens) for offer in offers)
        self._messages += offers
        self._changed.set()

    def finish(self, reply: PrefillReply, deadline: float) -> None:
        """The tokens are sampled, so all is offered."""
        offers = sum(isinstance(message, Offer) for message in self._messages)
        self._messages.append(HandoffEnd(offers, len(self.tokens), reply.tokens))
        self._changed.set()
        self.handoff = self.handoff.move(HandoffEvent.ALL_OFFERED, deadline)
        if not self.reply.done():
            self.reply.set_result(reply)

    def acknowledge(self, offer_ids: tuple[int, ...], deadline: float) -> tuple[int, ...]:
        """Takes blocks off the outstanding ones; returns those that were."""
        known = tuple(offer_id for offer_id in offer_ids if self.outstanding.pop(offer_id, None) is not None)
        if known:
            self.handoff = self.handoff.renew(deadline)
        if not self.outstanding and self.handoff.state is HandoffState.OFFERED:
            self.handoff = self.handoff.move(HandoffEvent.ALL_ACKED, deadline)
        return known

    def abort(self, error: JdisaggError) -> tuple[int, ...]:
        """Ends it for caller and listener; returns the offers to release."""
        if not self.handoff.state.final:
            self.handoff = self.handoff.move(HandoffEvent.ABORT, self.handoff.deadline)
        self.error = error
        self._changed.set()
        if not self.reply.done():
            self.reply.set_exception(error)
            self.reply.exception()
        released = tuple(self.outstanding)
        self.outstanding.clear()
        return released

    async def messages(self) -> AsyncIterator[Offer | HandoffEnd]:
        """All offers and the end. Raises what aborted the hand-off; the worker's sweeper bounds the wait."""
        sent = 0
        while True:
            if self.error is not None:
                raise self.error
            if sent < len(self._messages):
                message = self._messages[sent]
                sent += 1
                yield message
                if isinstance(message, HandoffEnd):
                    return
            else:
                self._changed.clear()
                await self._changed.wait()

"""The sending side of hand-offs: what was offered under which id, what is still outstanding, and who listens.

`Outbox` is one hand-off; a listener gets every message from the first on, however late it comes. `Outboxes` is a worker's room of them
and the body of its `PeerPort`: prefill workers offer prompts through it, decode workers running sequences. Once all is offered a hand-off
has a lease, which acknowledgements renew, never beyond the request's deadline. Once a receiver has come it has one from then on, and a
short one, however long the configured: it says every two seconds that it is still at it (worker/receiver.py). Who does not come, or falls
silent, has given us up, and its word may have been lost while we were stopped. `sweep` ends the late ones.
Knows no scheduler; of the mesh only that offers are released there.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

from jdisagg.clock import Clock
from jdisagg.dispatch.ports import HandoffEnd, Offer, OfferChecksum, PeerHello, PeerMessage
from jdisagg.errors import HandoffError, JdisaggError
from jdisagg.scheduler.commands import BlockChecksum, ReleaseOffers
from jdisagg.scheduler.handoff import Handoff, HandoffEvent, HandoffState, sweep
from jdisagg.telemetry import Counters
from jdisagg.worker.peer_hello import check_hello
from jdisagg.worker.step_loop import StepLoop

# Of so many hand-offs that are over it is known that they are; a receiver that comes later is told at once.
ENDED_KEPT = 1024
# A receiver that is silent for so long, which is three of its heartbeats, will not come (again).
RECEIVER_SILENCE_SECONDS = 7.0


class Outbox:
    """One hand-off's sending side, to worker `destination` where that is known. `until`: the request's deadline. `ended` is called once,
    with what aborted it or None."""

    def __init__(
        self, handoff_id: int, attempt: int, until: float, ended: Callable[[JdisaggError | None], None], destination: str = ""
    ) -> None:
        self.attempt = attempt
        self.destination = destination
        self.until = until
        self.ended = ended
        self.handoff = Handoff(handoff_id, HandoffState.COMPUTING, until)
        self.outstanding: dict[int, int] = {}
        self.acknowledgements = 0
        self.heard = asyncio.Event()
        self.error: JdisaggError | None = None
        self._offers = 0
        self._messages: list[PeerMessage] = []
        self._changed = asyncio.Event()

    @property
    def handoff_id(self) -> int:
        return self.handoff.handoff_id

    @property
    def outstanding_tokens(self) -> int:
        """Offered and not yet fetched."""
        return sum(self.outstanding.values())

    def announce(self, offers: Iterable[Offer]) -> None:
        for offer in offers:
            self.outstanding[offer.offer_id] = offer.groups * offer.block_tokens
            self._messages.append(offer)
            self._offers += 1
        self._changed.set()

    def announce_checksums(self, checksums: Iterable[BlockChecksum]) -> None:
        self._messages += [OfferChecksum(sum_.offer_id, sum_.checksum) for sum_ in checksums]
        self._changed.set()

    def finish(self, end: Callable[[int], HandoffEnd], deadline: float) -> None:
        """All is offered; `end` makes the last message, given how many offers there were."""
        self._messages.append(end(self._offers))
        self._changed.set()
        self.handoff = self.handoff.move(HandoffEvent.ALL_OFFERED, min(deadline, self.until))
        self._look()

    def acknowledge(self, offer_ids: tuple[int, ...], deadline: float) -> tuple[int, ...]:
        """Takes blocks off the outstanding ones; returns those that were."""
        self.acknowledgements += 1
        known = tuple(offer_id for offer_id in offer_ids if self.outstanding.pop(offer_id, None) is not None)
        if known or not offer_ids:
            self.handoff = self.handoff.renew(min(deadline, self.until))
        self._look()
        return known

    def abort(self, error: JdisaggError) -> tuple[int, ...]:
        """Ends it for the listener; returns the offers to release."""
        self.handoff = self.handoff.move(HandoffEvent.ABORT, self.handoff.deadline)
        self.error = error
        self._changed.set()
        released = tuple(self.outstanding)
        self.outstanding.clear()
        return released

    def hear(self, deadline: float) -> None:
        """A receiver has come; it must have said more by `deadline`."""
        self.handoff = self.handoff.expect(min(deadline, self.until))

    async def message(self, number: int) -> PeerMessage:
        """The message of that number, counted from 0: all offers, their checksums and the end. Raises what aborted the hand-off; the
        sweeper bounds the wait. One listener at a time."""
        while True:
            if self.error is not None:
                raise self.error
            if number < len(self._messages):
                return self._messages[number]
            self._changed.clear()
            await self._changed.wait()

    def _look(self) -> None:
        if not self.outstanding and self.handoff.state is HandoffState.OFFERED:
            self.handoff = self.handoff.move(HandoffEvent.ALL_ACKED, self.handoff.deadline)


class Outboxes:
    """All hand-offs that one worker sends, by id: the body of a `PeerPort`."""

    def __init__(self, hello: PeerHello, loop: StepLoop, clock: Clock, lease_seconds: float, counters: Counters) -> None:
        self._hello = hello
        self._loop = loop
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._counters = counters
        self._boxes: dict[int, Outbox] = {}
        self._awaited: dict[int, list[asyncio.Event]] = {}  # one for each who listens already
        self._greeted: dict[str, PeerHello] = {}
        self._over: deque[int] = deque(maxlen=ENDED_KEPT)

    def __len__(self) -> int:
        return len(self._boxes)

    def __contains__(self, handoff_id: int) -> bool:
        return handoff_id in self._boxes

    def all(self) -> list[Outbox]:
        return list(self._boxes.values())

    def open(self, box: Outbox) -> None:
        assert box.handoff_id not in self._boxes, "ids are used once"
        self._boxes[box.handoff_id] = box
        for came in self._awaited.pop(box.handoff_id, ()):
            came.set()

    def finish(self, box: Outbox, end: Callable[[int], HandoffEnd]) -> None:
        """All of it is offered."""
        box.finish(end, self._lease(box))
        self._forget_if_done(box)

    def abort_box(self, box: Outbox, error: JdisaggError) -> None:
        """Releases its offers and tells listener and owner. Idempotent."""
        if box.handoff.state.final:
            return
        self._release(box.abort(error))
        self._forget(box, error)

    def sweep(self, now: float) -> None:
        for late in sweep([box.handoff for box in self._boxes.values()], now):
            self._counters.add("leases_expired")
            error = HandoffError(f"hand-off {late.handoff_id}: its blocks were not fetched within their lease")
            self.abort_box(self._boxes[late.handoff_id], error)

    async def hello(self, hello: PeerHello) -> PeerHello:
        if self._greeted.get(hello.worker) is not hello:  # within one process the very same object comes each time
            check_hello(self._hello, hello)
            self._greeted[hello.worker] = hello
        return self._hello

    async def offers(self, handoff_id: int, attempt: int) -> AsyncIterator[PeerMessage]:
        box = self._boxes.get(handoff_id) or await self._await_box(handoff_id)
        if attempt < box.attempt:
            raise HandoffError(f"hand-off {handoff_id} belongs to attempt {box.attempt}, not {attempt}")
        box.heard.set()
        box.hear(self._lease(box))
        message, sent = None, 0
        while not isinstance(message, HandoffEnd):
            message = await box.message(sent)
            sent += 1
            yield message

    async def acknowledge(self, handoff_id: int, offer_ids: tuple[int, ...]) -> None:
        box = self._boxes.get(handoff_id)
        if box is not None:
            self._release(box.acknowledge(offer_ids, self._lease(box)))
            self._forget_if_done(box)

    async def abort(self, handoff_id: int, reason: str) -> None:
        box = self._boxes.get(handoff_id)
        if box is not None:
            self._counters.add("handoffs_aborted")
            self.abort_box(box, HandoffError(f"hand-off {handoff_id} was given up: {reason}"))

    async def _await_box(self, handoff_id: int) -> Outbox:
        """The receiver may listen before the call that makes the KV has come."""
        if handoff_id in self._over:
            raise HandoffError(f"worker {self._hello.worker!r}: hand-off {handoff_id} is over")
        came = asyncio.Event()
        self._awaited.setdefault(handoff_id, []).append(came)
        try:
            async with asyncio.timeout(self._lease_seconds):
                await came.wait()
        except TimeoutError:
            raise HandoffError(f"worker {self._hello.worker!r}: hand-off {handoff_id} did not begin within its lease") from None
        finally:
            others = [other for other in self._awaited.pop(handoff_id, ()) if other is not came]
            if others:
                self._awaited[handoff_id] = others
        box = self._boxes.get(handoff_id)
        if box is None:
            raise HandoffError(f"worker {self._hello.worker!r}: hand-off {handoff_id} was given up")
        return box

    def _lease(self, box: Outbox) -> float:
        heard = box.heard.is_set()
        return self._clock.now() + (min(self._lease_seconds, RECEIVER_SILENCE_SECONDS) if heard else self._lease_seconds)

    def _release(self, offer_ids: tuple[int, ...]) -> None:
        if offer_ids:
            self._loop.fire(ReleaseOffers(self._loop.next_number(), offer_ids))
            self._loop.wake()

    def _forget_if_done(self, box: Outbox) -> None:
        if box.handoff.state is HandoffState.ACKED:
            box.handoff = box.handoff.move(HandoffEvent.FREE, box.handoff.deadline)
            self._forget(box, None)

    def _forget(self, box: Outbox, error: JdisaggError | None) -> None:
        self._boxes.pop(box.handoff_id, None)
        self._over.append(box.handoff_id)
        box.ended(error)
        box.ended = _told  # whoever it was knows the box, too: nothing keeps them now


def _told(error: JdisaggError | None) -> None:
    """In place of whoever has been told of the end."""

"""Tracks the KV that a worker sends: for each transfer (hand-off), the offered blocks, the
unacknowledged blocks, and the lease.

The lease of a hand-off begins when all blocks are offered. Acknowledgements renew the lease, up to
the request's deadline. After a receiver has connected, the lease is short, because receivers send
heartbeats. `sweep` ends hand-offs whose lease has expired."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from jdisagg.clock import Clock
from jdisagg.config import LimitsConfig
from jdisagg.errors import HandoffError, JdisaggError, UnavailableError
from jdisagg.layout.kv_spec import KvKind
from jdisagg.messages.ports import HandoffEnd, Offer, OfferChecksum, PeerHello, PeerMessage
from jdisagg.messages.step_commands import BlockChecksum, ExtractResult, ReleaseOffers, StepResult
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.handoff import Handoff, HandoffEvent, HandoffState, sweep
from jdisagg.telemetry import Counters
from jdisagg.worker.block_moves import extraction, state_weight
from jdisagg.worker.peers import check_hello
from jdisagg.worker.step_loop import StepLoop

# ended hand-offs that are remembered, so that a late receiver is refused at once
ENDED_KEPT = 1024


# what is called when a hand-off has ended, with None if it succeeded
Ended = Callable[[JdisaggError | None], None]


class OutgoingHandoff:
    def __init__(
        self, handoff_id: int, attempt: int, sequence: int, until: float, destination: str = ""
    ) -> None:
        self.attempt = attempt
        self.sequence = sequence
        self.destination = destination
        self.until = until
        self.outstanding_tokens = 0  # tokens that are offered and not yet fetched
        self.acknowledgements = 0
        self.has_receiver = asyncio.Event()
        self.error: JdisaggError | None = None
        self.ended: Ended = lambda error: None
        self.handoff = Handoff(handoff_id, HandoffState.COMPUTING, until)
        self._outstanding: dict[int, int] = {}
        self._offers = 0
        self._messages: list[PeerMessage] = []
        self._changed = asyncio.Event()

    @property
    def handoff_id(self) -> int:
        return self.handoff.handoff_id

    @property
    def over(self) -> bool:
        return self.handoff.state.final

    def advance(self, event: HandoffEvent, deadline: float | None = None) -> None:
        """`deadline` is the deadline of the new state; None keeps the old deadline."""
        until = self.handoff.deadline if deadline is None else min(deadline, self.until)
        self.handoff = self.handoff.advance(event, until)

    def announce(self, offers: Iterable[Offer], weight_tokens: int = 0) -> None:
        """Publishes offers to the receiver. `weight_tokens`: number of unfetched tokens that each
        offer counts as. 0 means the offer's own tokens times its layer groups."""
        for offer in offers:
            tokens = weight_tokens or offer.groups * offer.block_tokens
            self._outstanding[offer.offer_id] = tokens
            self.outstanding_tokens += tokens
            self._messages.append(offer)
            self._offers += 1
        self._changed.set()

    def announce_checksums(self, checksums: Iterable[BlockChecksum]) -> None:
        self._messages += [OfferChecksum(sum_.offer_id, sum_.checksum) for sum_ in checksums]
        self._changed.set()

    def finish(self, end: Callable[[int], HandoffEnd], deadline: float) -> None:
        self._messages.append(end(self._offers))
        self._changed.set()
        self.advance(HandoffEvent.ALL_OFFERED, deadline)
        if self._offers:  # without offers the receiver acknowledges the last message
            self._advance_if_fetched()

    def acknowledge(self, offer_ids: tuple[int, ...], deadline: float) -> tuple[int, ...]:
        """Records acknowledgements, which renew the lease until `deadline`. Returns the ids that
        were not acknowledged before."""
        self.acknowledgements += 1
        fetched = tuple([offer_id for offer_id in offer_ids if self._take(offer_id)])
        if fetched or not offer_ids:
            self.handoff = self.handoff.renew(min(deadline, self.until))
        self._advance_if_fetched()
        return fetched

    def abort(self, error: JdisaggError) -> tuple[int, ...]:
        self.advance(HandoffEvent.ABORT)
        self.error = error
        self._changed.set()
        released = tuple(self._outstanding)
        self._outstanding.clear()
        self.outstanding_tokens = 0
        return released

    def expect_receiver(self, deadline: float) -> None:
        """Records that a receiver connected. Its next message must arrive by `deadline`."""
        self.handoff = self.handoff.expect(min(deadline, self.until))

    async def message(self, number: int) -> PeerMessage:
        """Waits for message `number`, counted from 0, and returns it. Raises the error that aborted
        the hand-off. Supports one reader at a time. The wait has no time limit of its own, because
        `sweep` ends expired hand-offs."""
        while True:
            if self.error is not None:
                raise self.error
            if number < len(self._messages):
                return self._messages[number]
            self._changed.clear()
            await self._changed.wait()

    def _advance_if_fetched(self) -> None:
        if not self._outstanding and self.handoff.state is HandoffState.OFFERED:
            self.advance(HandoffEvent.ALL_ACKED)

    def _take(self, offer_id: int) -> bool:
        tokens = self._outstanding.pop(offer_id, None)
        self.outstanding_tokens -= tokens or 0
        return tokens is not None


class OutgoingKv:
    """`freed`: function that is called after each end of a hand-off."""

    def __init__(
        self,
        hello: PeerHello,
        loop: StepLoop,
        mesh: MeshLimits,
        clock: Clock,
        limits: LimitsConfig,
        counters: Counters,
        freed: Callable[[], None],
    ) -> None:
        self._hello = hello
        self._loop = loop
        self._mesh = mesh
        self.now = clock.now
        self._lease_seconds = limits.handoff_lease_seconds
        self._silence_seconds = limits.timeouts.handoff.receiver_silence_seconds
        self._counters = counters
        self._freed = freed
        self._handoffs: dict[int, OutgoingHandoff] = {}
        # one event per reader that connected before the hand-off was opened
        self._awaited: dict[int, list[asyncio.Event]] = {}
        self._greeted: dict[str, PeerHello] = {}
        self._over: deque[int] = deque(maxlen=ENDED_KEPT)

    def __len__(self) -> int:
        return len(self._handoffs)

    def introduce(self, hello: PeerHello) -> None:
        self._hello = hello
        self._greeted.clear()

    def __contains__(self, handoff_id: int) -> bool:
        return handoff_id in self._handoffs

    def offered_tokens(self) -> dict[str, int]:
        offered = Counter[str]()
        for handoff in self._handoffs.values():
            offered[handoff.destination] += handoff.outstanding_tokens
        return offered

    def open(self, handoff: OutgoingHandoff, ended: Ended, awaits: bool = False) -> None:
        """Makes a hand-off available to its receiver. `awaits`: whether the receiver requested the
        hand-off and must therefore connect within the lease."""
        assert handoff.handoff_id not in self._handoffs, "ids are used once"
        handoff.ended = ended
        self._handoffs[handoff.handoff_id] = handoff
        if awaits:
            handoff.expect_receiver(self._lease(handoff))
        for came in self._awaited.pop(handoff.handoff_id, ()):
            came.set()

    def extract(
        self, handoff: OutgoingHandoff, offer: Offer, pages: Sequence[int]
    ) -> "asyncio.Future[StepResult]":
        """Offers a block of pages, and issues its extraction. When this has ended, its checksum is
        announced. For recurrent state, `pages` has only the state slot."""
        key, number = self._hello.checksum_key, self._loop.next_number()
        weight = state_weight(self._mesh) if offer.kind is KvKind.STATE else 0
        handoff.announce((offer,), weight)
        command = extraction(number, offer, pages, self._mesh.page_size, key)
        extracting = self._loop.submit(command)

        def announce(done: "asyncio.Future[StepResult]") -> None:
            if key and not handoff.over and not done.cancelled() and done.exception() is None:
                result = done.result()
                assert isinstance(result, ExtractResult)
                handoff.announce_checksums((result.checksum,))

        extracting.add_done_callback(announce)
        return extracting

    def finish(self, handoff: OutgoingHandoff, end: Callable[[int], HandoffEnd]) -> None:
        handoff.finish(end, self._lease(handoff))
        self._forget_if_fetched(handoff)

    def end(self, handoff: OutgoingHandoff, error: JdisaggError) -> None:
        """Releases the offered blocks of a hand-off. A receiver that still reads messages gets
        `error`. Idempotent."""
        if not handoff.over:
            self._release(handoff.abort(error))
            self._forget(handoff, error)

    def end_all(self, error: UnavailableError) -> None:
        for handoff in list(self._handoffs.values()):
            self.end(handoff, type(error)(error.message))

    def sweep(self, now: float) -> None:
        for late in sweep([one.handoff for one in self._handoffs.values()], now):
            self._counters.add("leases_expired")
            error = HandoffError(
                f"hand-off {late.handoff_id}: its blocks were not fetched within their lease"
            )
            self.end(self._handoffs[late.handoff_id], error)

    async def hello(self, hello: PeerHello) -> PeerHello:
        # within one process this is the same object each time
        if self._greeted.get(hello.worker) is not hello:
            check_hello(self._hello, hello)
            self._greeted[hello.worker] = hello
        return self._hello

    async def offers(self, handoff_id: int, attempt: int) -> AsyncIterator[PeerMessage]:
        handoff = self._handoffs.get(handoff_id) or await self._await_opening(handoff_id)
        if attempt < handoff.attempt:
            raise HandoffError(
                f"hand-off {handoff_id} belongs to attempt {handoff.attempt}, not {attempt}"
            )
        handoff.has_receiver.set()
        handoff.expect_receiver(self._lease(handoff))
        message, sent = None, 0
        while not isinstance(message, HandoffEnd):
            message = await handoff.message(sent)
            sent += 1
            yield message

    async def acknowledge(self, handoff_id: int, offer_ids: tuple[int, ...]) -> None:
        handoff = self._handoffs.get(handoff_id)
        if handoff is not None:
            self._release(handoff.acknowledge(offer_ids, self._lease(handoff)))
            self._forget_if_fetched(handoff)

    async def abort(self, handoff_id: int, reason: str) -> None:
        handoff = self._handoffs.get(handoff_id)
        if handoff is not None:
            self._counters.add("handoffs_aborted")
            self.end(handoff, HandoffError(f"hand-off {handoff_id} was aborted: {reason}"))

    async def _await_opening(self, handoff_id: int) -> OutgoingHandoff:
        """Waits until this hand-off is opened, because the receiver may connect before the prefill
        call arrives."""
        name = self._hello.worker
        if handoff_id in self._over:
            raise HandoffError(f"worker {name!r}: hand-off {handoff_id} is over")
        came = asyncio.Event()
        self._awaited.setdefault(handoff_id, []).append(came)
        try:
            async with asyncio.timeout(self._lease_seconds):
                await came.wait()
        except TimeoutError:
            raise HandoffError(
                f"worker {name!r}: hand-off {handoff_id} did not begin within its lease"
            ) from None
        finally:
            others = [other for other in self._awaited.pop(handoff_id, ()) if other is not came]
            if others:
                self._awaited[handoff_id] = others
        handoff = self._handoffs.get(handoff_id)
        if handoff is None:
            raise HandoffError(f"worker {name!r}: hand-off {handoff_id} was aborted")
        return handoff

    def _lease(self, handoff: OutgoingHandoff) -> float:
        seconds = self._lease_seconds
        if handoff.has_receiver.is_set():
            seconds = min(seconds, self._silence_seconds)
        return self.now() + seconds

    def _release(self, offer_ids: tuple[int, ...]) -> None:
        if offer_ids:
            self._loop.fire(ReleaseOffers(self._loop.next_number(), offer_ids))

    def _forget_if_fetched(self, handoff: OutgoingHandoff) -> None:
        if handoff.handoff.state is HandoffState.ACKED:
            handoff.advance(HandoffEvent.FREE)
            self._forget(handoff, None)

    def _forget(self, handoff: OutgoingHandoff, error: JdisaggError | None) -> None:
        self._handoffs.pop(handoff.handoff_id, None)
        self._over.append(handoff.handoff_id)
        handoff.ended(error)
        self._freed()

"""One pass of some children of a request through the cluster: place, reserve, prefill and hand off, decode.

A leg posts what it learns (`Tokens`, `Preempted`, `Retried`, `LegEnded`) and decides nothing about what follows it: whether to go again
is the path's. Cancelling the leg's task closes everything it holds on both sides. First tokens go out straight from the prefill's
reply, while the KV is still moving; the decode side gives them out again, so that nothing hangs on that reply: what was posted
already is cut off (`_post_tokens`), and tokens are posted in order, once.

Two changes of workers happen inside a leg: a source of KV that fails is replaced while the reservation and what has come are kept
(dispatch/sources.py), and a running sequence moves to another decode worker when its own asks for that (dispatch/move.py).
"""

from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from jdisagg.clock import to_the_end
from jdisagg.dispatch.move import Move
from jdisagg.dispatch.ports import Child, FirstToken, GenerateCall, HandoffSource, SourceLost, Span, SpanEnd, close_stream
from jdisagg.dispatch.sources import Sources
from jdisagg.dispatch.trip import CLOSE_SECONDS, FAILED_CLOSE_SECONDS, Hold, Notes, Preempted, Tokens, Trip, Unheard, Waited, quietly
from jdisagg.errors import HandoffError, InvalidRequestError, UnavailableError
from jdisagg.request import TokenLogprobs
from jdisagg.router.decision import Decision


class Leg:
    """Children `children` under attempt `attempt`. `failed`: workers that let it down, to be avoided by what follows; `refused`: those that
    the request is too large for. `notes`: who keeps account of its work."""

    def __init__(self, trip: Trip, children: tuple[Child, ...], attempt: int) -> None:
        self.trip = trip
        self.children = children
        self.attempt = attempt
        self.open = {child.index for child in children}
        self.ended_by_worker: set[int] = set()
        self.failed: set[str] = set()
        self.refused: set[str] = set()
        self.lost: deque[SourceLost] = deque()
        self.on_lost: Callable[[], None] = lambda: None
        self.placed = False
        self.source: str | None = None  # the prefill worker that works for it now
        self.notes: Notes = Unheard()
        self._hold: Hold | None = None
        self._joined = False
        self._move: Move | None = None
        self._had = {child.index: len(child.accepted) for child in children}
        self._tokens = {child.index: list(child.accepted) for child in children}
        self._firsts: dict[int, FirstToken] = {}

    async def run(self, placement: Decision, notes: Notes | None = None) -> None:
        """Returns when every child has come to an end here. Raises what the workers raise."""
        self.placed = True
        self.notes = notes or self.notes
        asked_at = self.trip.now()
        with self.blaming(placement.decode):
            hold = self._hold = await self.trip.reserve(placement.decode, self.children, self.attempt)
        self.trip.post(Waited(self.trip.now() - asked_at))
        try:
            if placement.prefill is None:
                self.notes.prefill_sent()
                await self.decode(hold, None)
            else:
                await Sources(self, hold).run(placement.prefill)
        except BaseException:
            await to_the_end(self._free(hold))
            raise

    async def _free(self, first: Hold) -> None:
        for held in (first, *([] if self._hold in (first, None) else [self._hold])):
            await quietly(held.port.cancel(held.key), FAILED_CLOSE_SECONDS if held.worker in self.failed else CLOSE_SECONDS)

    @property
    def over(self) -> bool:
        """Every child came to its end at its worker, and nothing is left to do but to hear that there is no more."""
        return not self.open and all(child.index in self.ended_by_worker for child in self.children)

    async def end_child(self, child: int) -> None:
        """The path needs no more of this child."""
        self.open.discard(child)
        if self._hold is not None and child not in self.ended_by_worker:
            await quietly(self._hold.port.cancel(self._hold.key, child))

    def blaming(self, worker: str) -> "_Blaming":
        """A worker that is gone is avoided from now on; a hand-off that failed says nothing about who reports it."""
        return _Blaming(self, worker)

    @property
    def posted(self) -> tuple[Child, ...]:
        """The open children with all tokens that were posted of them."""
        return tuple(Child(index, tuple(self._tokens[index])) for index in sorted(self.open))

    @property
    def posted_firsts(self) -> tuple[FirstToken, ...]:
        """First tokens that went out already: they hold, whatever is sampled again."""
        return tuple(self._firsts.values())

    def post_firsts(self, firsts: tuple[FirstToken, ...]) -> None:
        """The tokens of a prefill's reply. A child that was preempted while the reply was on its way gets its first token elsewhere."""
        for first in firsts:
            if first.child in self.open:
                self._post(first.child, self._had[first.child], (first.token_id,), (first.logprobs,) if first.logprobs else ())

    async def decode(self, hold: Hold, source: HandoffSource | None) -> None:
        """Posts all spans of a reservation, and of those that its sequence moves to."""
        spans = hold.port.generate(GenerateCall(hold.key, hold.attempt, self.trip.remaining(), source))
        try:
            while True:
                with self.blaming(hold.worker):
                    moved = await self._follow(hold, spans)
                if not moved:
                    break
                await close_stream(spans)
                if self._move is None:
                    raise HandoffError(f"worker {hold.worker!r} says that a sequence moved, and nobody took it")
                hold, spans = self._move.arrived()
                self._hold, self._move = hold, None
        except BaseException:
            await to_the_end(self._close(spans))
            raise
        await self._close(spans)
        missing = self.open - self.ended_by_worker
        if missing:
            raise UnavailableError(f"the stream of children {sorted(missing)} stopped before its end")

    async def _close(self, spans: AsyncIterator[Span]) -> None:
        await close_stream(spans)
        if self._move is not None:
            await self._move.close()

    async def _follow(self, hold: Hold, spans: AsyncIterator[Span]) -> bool:
        """Posts the spans of one reservation. True: its sequence moved."""
        async for span in spans:
            if span.lost is not None:
                self.lost.append(span.lost)
                self.on_lost()
            elif span.moving is not None:
                await self._begin_move(hold, span.moving)
            elif span.end is SpanEnd.MOVED:
                self._post_tokens(span)  # what was not told yet
                return True
            else:
                self._post_span(span)
        return False

    async def _begin_move(self, hold: Hold, source: HandoffSource) -> None:
        if self._move is not None:
            await self._move.close()
        if not source.address:
            source = replace(source, address=self.trip.cluster.address(source.worker))
        self._move = Move(self.trip, self.posted, hold.worker, source)

    def _post_span(self, span: Span) -> None:
        if span.end is not None:
            self.ended_by_worker.add(span.child)
        self._post_tokens(span)
        if span.end is SpanEnd.PREEMPTED:
            self.open.discard(span.child)
            self.trip.post(Preempted(span.child))

    def _post_tokens(self, span: Span) -> None:
        if span.token_ids and not self._joined and self._hold and span.first_index + len(span.token_ids) > self._had[span.child] + 1:
            # A token of the decode worker's own: the prompt's KV is there.
            self._joined = True
            self.notes.handed_over(self.source, self._hold.worker)
        if span.token_ids or span.kv_bytes_moved:
            self._post(span.child, span.first_index, span.token_ids, span.logprobs, span.kv_bytes_moved, span.exposed_transfer_seconds)

    def _post(
        self,
        child: int,
        first_index: int,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        kv_bytes_moved: int = 0,
        exposed_seconds: float = 0.0,
    ) -> None:
        """Posts what is new of these tokens."""
        known = self._tokens[child]
        seen = max(0, len(known) - first_index)
        token_ids, logprobs = token_ids[seen:], logprobs[seen:]
        if token_ids and first_index + seen == self._had[child]:
            self.notes.prefilled()
            self._firsts[child] = FirstToken(child, token_ids[0], logprobs[0] if logprobs else None)
        known += token_ids
        if token_ids or kv_bytes_moved:
            self.trip.post(Tokens(child, first_index + seen, token_ids, logprobs, kv_bytes_moved, exposed_seconds))


class _Blaming:
    __slots__ = ("_leg", "_worker")

    def __init__(self, leg: Leg, worker: str) -> None:
        self._leg, self._worker = leg, worker

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, UnavailableError) and not isinstance(error, HandoffError):
            self._leg.failed.add(self._worker)
        elif isinstance(error, InvalidRequestError):
            self._leg.refused.add(self._worker)

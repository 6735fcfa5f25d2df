"""The spans of one reservation on their way to whoever called `generate`: a queue, bounded by the tokens asked for.

A slow reader stops no one: its spans pile up here, never more than max_tokens of each child. The stream ends when every
child has ended, or with the error that ended them. The worker's sweeper ends a group whose deadline has passed, so `next` needs
no timer of its own: a timer for each token would cost more than the token.
"""

import asyncio

from jdisagg.dispatch.mailbox import Mailbox
from jdisagg.dispatch.ports import FirstToken, HandoffSource, SourceLost, Span, SpanEnd
from jdisagg.errors import JdisaggError
from jdisagg.request import FinishReason
from jdisagg.scheduler.sequences import Group, Progress

_ENDS = {FinishReason.STOP: SpanEnd.STOP, FinishReason.LENGTH: SpanEnd.LENGTH}


class SpanStream:
    """`until`: the deadline of the call that took it. `kept_tokens`: positions that are here of a hand-off whose source failed.
    `firsts`: first tokens that the client has already, whatever a new source samples."""

    def __init__(self, group: Group) -> None:
        self.attempt = group.attempt
        self.lease_until = group.handoff.deadline
        self.until = group.handoff.deadline
        self.taken = False
        self.begun = asyncio.Event()
        self.kept_tokens = 0
        self.firsts: dict[int, FirstToken] = {}
        self.kv_bytes_moved = 0
        self.exposed_seconds = 0.0
        self._open = {child.child for child in group.children}
        self._spans: Mailbox[Span | JdisaggError | None] = Mailbox()

    def put(self, progress: Progress) -> None:
        """Turns the scheduler's news into a span."""
        if progress.child not in self._open:
            return
        end = _end_of(progress)
        if progress.token_ids or end:
            moved, exposed = self.kv_bytes_moved, self.exposed_seconds
            self._spans.put_nowait(Span(progress.child, progress.first_index, progress.token_ids, progress.logprobs, end, moved, exposed))
            self.kv_bytes_moved, self.exposed_seconds = 0, 0.0
        if end or progress.finish:
            self._open.discard(progress.child)
            if not self._open:
                self._spans.put_nowait(None)

    def tell(self, lost: SourceLost | None = None, moving: HandoffSource | None = None) -> None:
        """News of the whole reservation."""
        self._spans.put_nowait(Span(-1, 0, (), lost=lost, moving=moving))

    def fail(self, error: JdisaggError) -> None:
        self._open.clear()
        self._spans.put_nowait(error)

    async def next(self) -> Span | None:
        """The next span, None at the end. Raises what ended the children."""
        item = await self._spans.get()
        if isinstance(item, JdisaggError):
            raise item
        return item


def _end_of(progress: Progress) -> SpanEnd | None:
    if progress.preempted:
        return SpanEnd.PREEMPTED
    if progress.moved:
        return SpanEnd.MOVED
    return _ENDS.get(progress.finish) if progress.finish else None

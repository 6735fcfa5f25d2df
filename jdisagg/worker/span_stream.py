"""The spans of one reservation on their way to whoever called `generate`: a queue, bounded by the tokens asked for.

A slow reader stops no one: its spans pile up here, never more than max_tokens of each child. The stream ends when every
child has ended, or with the error that ended them. The worker's sweeper ends a group whose deadline has passed, so `next` needs
no timer of its own: a timer for each token would cost more than the token.
"""

import asyncio
from dataclasses import replace

from jdisagg.dispatch.ports import Span, SpanEnd
from jdisagg.errors import JdisaggError
from jdisagg.request import FinishReason
from jdisagg.scheduler.sequences import Group, Progress

_ENDS = {FinishReason.STOP: SpanEnd.STOP, FinishReason.LENGTH: SpanEnd.LENGTH}


class SpanStream:
    """`skip_first`: the first sampled token of each child went to the client from elsewhere and is not repeated."""

    def __init__(self, group: Group) -> None:
        self.attempt = group.attempt
        self.lease_until = group.handoff.deadline
        self.skip_first = False
        self.taken = False
        self.kv_bytes_moved = 0
        self._first = {child.child: child.accepted for child in group.children}
        self._open = set(self._first)
        self._spans: asyncio.Queue[Span | JdisaggError | None] = asyncio.Queue()

    def put(self, progress: Progress) -> None:
        """Turns the scheduler's news into a span."""
        if progress.child not in self._open:
            return
        end = SpanEnd.PREEMPTED if progress.preempted else _ENDS.get(progress.finish) if progress.finish else None
        tokens, logprobs = progress.token_ids, progress.logprobs
        if tokens and self.skip_first and progress.first_index == self._first[progress.child]:
            progress = replace(progress, first_index=progress.first_index + 1)
            tokens, logprobs = tokens[1:], logprobs[1:]
        if tokens or end:
            self._spans.put_nowait(Span(progress.child, progress.first_index, tokens, logprobs, end, self.kv_bytes_moved))
            self.kv_bytes_moved = 0
        if progress.finish or progress.preempted:
            self._open.discard(progress.child)
            if not self._open:
                self._spans.put_nowait(None)

    def fail(self, error: JdisaggError) -> None:
        self._open.clear()
        self._spans.put_nowait(error)

    async def next(self) -> Span | None:
        """The next span, None at the end. Raises what ended the children."""
        item = await self._spans.get()
        if isinstance(item, JdisaggError):
            raise item
        return item

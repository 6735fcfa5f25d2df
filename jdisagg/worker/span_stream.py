"""Queues new tokens of one reservation for the caller of `generate`. A span is a run of new tokens
of one child.

The queue is bounded by the requested number of tokens, so a slow reader delays no other work. The
stream ends when every child has ended, or with an error. `next` has no timeout, because a timeout
for each token would be expensive. It cannot wait forever, because the worker periodically ends
expired groups."""

import asyncio

from jdisagg.errors import JdisaggError
from jdisagg.messages.mailbox import Mailbox
from jdisagg.messages.ports import HandoffSource, SourceLost, Span, SpanEnd
from jdisagg.prompt.logprobs import PromptLogprobs
from jdisagg.request import FinishReason
from jdisagg.scheduler.sequences import ChildProgress, SequenceGroup

_ENDS = {FinishReason.STOP: SpanEnd.STOP, FinishReason.LENGTH: SpanEnd.LENGTH}


class SpanStream:
    """Queue of token spans between a decode worker and the caller of `generate`. `taken`: whether
    the caller of `generate` has connected. It must connect by `lease_until`."""

    def __init__(self, group: SequenceGroup, weights: str = "") -> None:
        self.attempt = group.attempt
        self.weights = weights
        self.lease_until = group.handoff.deadline
        self.taken = False
        self.moves = 0
        self.began_at = 0.0
        self.begun = asyncio.Event()
        self.kv_bytes_moved = 0
        self.exposed_seconds = 0.0
        self.prompt_logprobs: PromptLogprobs | None = None
        self._open = {child.child for child in group.children}
        self._spans: Mailbox[Span | JdisaggError | None] = Mailbox()

    def put(self, progress: ChildProgress) -> None:
        if progress.child not in self._open:
            return
        end = _end_of(progress)
        if progress.token_ids or end:
            span = Span(
                child=progress.child,
                first_index=progress.first_index,
                token_ids=progress.token_ids,
                logprobs=progress.logprobs,
                end=end,
                kv_bytes_moved=self.kv_bytes_moved,
                exposed_transfer_seconds=self.exposed_seconds,
                prompt_logprobs=self.prompt_logprobs,
                yielded=progress.yielded,
                weights=self.weights,
            )
            self._spans.put_nowait(span)
            self.prompt_logprobs = None
            self.kv_bytes_moved, self.exposed_seconds = 0, 0.0
        if end or progress.finish:
            self._open.discard(progress.child)
            if not self._open:
                self._spans.put_nowait(None)

    def announce(self, lost: SourceLost | None = None, moving: HandoffSource | None = None) -> None:
        self._spans.put_nowait(Span(-1, 0, (), lost=lost, moving=moving))

    def fail(self, error: JdisaggError) -> None:
        self._open.clear()
        self._spans.put_nowait(error)

    async def next(self) -> Span | None:
        """Returns None at the end of the stream. Raises the error that ended the stream."""
        item = await self._spans.get()
        if isinstance(item, JdisaggError):
            raise item
        return item


def _end_of(progress: ChildProgress) -> SpanEnd | None:
    if progress.preempted:
        return SpanEnd.PREEMPTED
    if progress.moved:
        return SpanEnd.MOVED
    return _ENDS.get(progress.finish) if progress.finish else None

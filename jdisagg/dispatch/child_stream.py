"""One child's stream to the client: tokens in, exactly once and in order; events with text out.

Knows the request, the text stream (detokenizer and stop strings) and what was accepted so far; knows no workers. `accepted`
is what a re-prefill will force: the tokens delivered to the client, and nothing else.

Invariant: token i is accepted once, in order (`DeliveryError` otherwise, our own bug); nothing follows the end.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from jdisagg.dispatch.ports import Child
from jdisagg.request import AcceptedChild, FinishReason, Request, StreamEvent, TokenLogprobs

REPLAYED_TOKENS = 64  # at once, when a stream is resumed


class DeliveryError(AssertionError):
    """A worker sent a token twice, or left one out."""


class TextDelta(Protocol):
    """New text; how many of the pushed tokens count (fewer when a stop string was hit); whether it was."""

    @property
    def text(self) -> str: ...
    @property
    def tokens_kept(self) -> int: ...
    @property
    def stopped(self) -> bool: ...


class TextStream(Protocol):
    """What `dispatch/token_stream.py` offers: text of tokens, as far as it is certain. Held-back text may still complete a stop
    string when it is given out at the end."""

    @property
    def stopped(self) -> bool: ...
    def push(self, token_ids: tuple[int, ...]) -> TextDelta: ...
    def finish(self) -> str: ...


NewTextStream = Callable[[Request], TextStream]


class ChildStream:
    """Child `index` of `request`."""

    def __init__(self, request: Request, index: int, text: TextStream) -> None:
        self.index = index
        self.accepted: list[int] = []
        self.finish: FinishReason | None = None
        self._request = request
        self._text = text

    @property
    def child(self) -> Child:
        return Child(self.index, tuple(self.accepted))

    async def resume(self, had: AcceptedChild) -> None:
        """Takes what the client has already: the text goes on where it was (rule 9), an end is not told again. A long text takes its
        time, and others have their turn meanwhile."""
        assert not self.accepted, "a stream is resumed before anything else"
        for first in range(0, len(had.token_ids), REPLAYED_TOKENS):
            self._text.push(had.token_ids[first : first + REPLAYED_TOKENS])
            await asyncio.sleep(0)
        self.accepted += had.token_ids
        self.finish = had.finish_reason

    def accept(
        self, first_index: int, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], context_tokens: int
    ) -> StreamEvent | None:
        """Takes tokens `first_index`.. from a worker; returns what the client gets, if anything. What follows the end is dropped."""
        if self.finish is not None or not token_ids:
            return None
        if first_index != len(self.accepted):
            raise DeliveryError(
                f"request {self._request.request_id!r}, child {self.index}: token {first_index} came, {len(self.accepted)} was next"
            )
        count, self.finish = self._request.end_among(first_index, token_ids, context_tokens)
        # The stop id itself is delivered to no one.
        kept = token_ids[: count - (self.finish is FinishReason.STOP)]
        text = ""
        if kept:
            delta = self._text.push(kept)
            text = delta.text
            if delta.stopped:
                kept = kept[: delta.tokens_kept]
                self.finish = FinishReason.STOP
        if self.finish is not None:
            text += self._text.finish()
            if self._text.stopped:
                self.finish = FinishReason.STOP
        self.accepted += kept
        if not kept and not text and self.finish is None:
            return None
        return StreamEvent(self.index, first_index, kept, text, logprobs[: len(kept)], self.finish)

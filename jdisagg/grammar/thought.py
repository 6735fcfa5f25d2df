"""Where the reasoning of an answer begins and ends, and when it must end.

The state depends only on the request and the accepted token ids, like that of a grammar."""

from collections.abc import Callable

from jdisagg.request import Thought


class ThoughtTracker:
    """Follows one answer. A token counts as reasoning if it comes after the marker that begins
    reasoning, up to the end of the marker that ends it.

    Attributes:
        closing: Token ids that must come next, because the reasoning has used up its budget.
    """

    def __init__(self, thought: Thought, bytes_of: Callable[[int], bytes]) -> None:
        self._thought, self._bytes_of = thought, bytes_of
        self._begin, self._end = thought.begin.encode(), thought.end.encode()
        self._text = b""  # the end of the answer, in which a marker may begin
        self._thinking = thought.begun
        self._undecided = not thought.begun  # whether reasoning may still begin
        self._tokens = self._closings = 0
        self.closing: tuple[int, ...] = ()
        self._close_if_spent()

    def consume(self, token_id: int) -> None:
        if self.closing:
            self.closing = self.closing[1:]
            return
        if not (self._thinking or self._undecided):
            return
        self._tokens += self._thinking
        self._text += self._bytes_of(token_id)
        while self._ended() if self._thinking else self._undecided and self._began():
            pass
        self._close_if_spent()

    def _close_if_spent(self) -> None:
        thought = self._thought
        if self._thinking and self._tokens >= thought.budget:
            self.closing = thought.closings[min(self._closings, len(thought.closings) - 1)]
            self._closings += 1
            self._after_thought(b"")

    def _after_thought(self, text: bytes) -> None:
        self._thinking, self._undecided, self._text = False, self._thought.in_parts, text

    def _ended(self) -> bool:
        _, found, rest = self._text.partition(self._end)
        if found:
            self._after_thought(rest)
        else:
            self._text = _tail(self._text, self._end)
        return bool(found)

    def _began(self) -> bool:
        before, found, rest = self._text.partition(self._begin)
        if not found and self._thought.in_parts:
            self._text = _tail(self._text, self._begin)
        elif before.strip() and not self._thought.in_parts:
            self._undecided = bool(not found and self._begin.startswith(self._text.lstrip()))
        elif found:
            self._thinking, self._undecided, self._text = True, False, rest
        return self._thinking


def _tail(text: bytes, marker: bytes) -> bytes:
    """The longest end of `text` in which the marker may begin."""
    return text[-len(marker) + 1 :] if len(marker) > 1 else b""

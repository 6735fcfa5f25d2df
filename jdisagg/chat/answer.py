"""What a model says in a chat, taken apart: words, reasoning and calls of tools, as text comes in.

An `AnswerParser` is a state machine over text. What it has given out after some text is a function
of that text alone, in whatever pieces it came (so that a stream that is resumed goes on where it
was); it never raises: what is malformed is words. `Collected` puts what it gave out together, for
the parsers themselves. Knows no request and no model."""

from dataclasses import dataclass, field
from typing import Protocol

from jdisagg.request import ToolCallDelta

LONGEST_SPACE = 256  # white space that is held back until it is known what follows


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What is new. Calls have no ids yet."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class AnswerParser(Protocol):
    """Of one answer, in order; after `finish` it is used up."""

    def push(self, text: str) -> AnswerDelta: ...
    def finish(self) -> AnswerDelta: ...


@dataclass(slots=True)
class Collected:
    """What a parser has found since it was last asked. White space that only a call follows is
    none of the answer's words: it is held back until other words come, `LONGEST_SPACE` of it."""

    calls_begun: int = 0
    _content: list[str] = field(default_factory=list)
    _calls: list[ToolCallDelta] = field(default_factory=list)
    _space: str = ""

    def say(self, text: str) -> None:
        text = self._space + text
        words = text.rstrip()
        self._space = text[len(words) :]
        if words:
            self._content.append(words)
        while len(self._space) > LONGEST_SPACE:
            self._content.append(self._space[:LONGEST_SPACE])
            self._space = self._space[LONGEST_SPACE:]

    def begin_call(self, name: str) -> None:
        self._space = ""
        self._calls.append(ToolCallDelta(self.calls_begun, name=name))
        self.calls_begun += 1

    def add_arguments(self, text: str) -> None:
        """Of the call that was begun last."""
        if text:
            self._calls.append(ToolCallDelta(self.calls_begun - 1, arguments=text))

    def take(self, *, last: bool = False) -> AnswerDelta:
        """Empties it. `last`: nothing follows, so that white space after words is theirs."""
        if last and not self.calls_begun:
            self._content.append(self._space)
        delta = AnswerDelta("".join(self._content), calls=joined_calls(self._calls))
        self._content.clear()
        self._calls.clear()
        return delta


def beginning_held(text: str, *markers: str) -> int:
    """How many of the last characters of `text` may be the beginning of a marker."""
    longest = max(map(len, markers)) - 1
    tail = text[-longest:]
    if not any(marker[0] in tail for marker in markers):
        return 0
    for size in range(len(tail), 0, -1):
        if any(marker.startswith(tail[-size:]) for marker in markers):
            return size
    return 0


def joined_calls(calls: list[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """One entry a call."""
    joined: list[ToolCallDelta] = []
    for call in calls:
        if joined and joined[-1].index == call.index:
            known = joined[-1]
            call = ToolCallDelta(
                call.index, name=known.name + call.name, arguments=known.arguments + call.arguments
            )
            joined[-1] = call
        else:
            joined.append(call)
    return tuple(joined)

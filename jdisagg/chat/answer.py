"""Incremental parsing of a chat answer into content, reasoning and tool calls.

An `AnswerParser` is a state machine over text. Its total output depends only on the text so far,
and not on how the text was split into pieces. A resumed stream therefore continues correctly. A
parser raises no errors. It returns malformed tool calls as content. `Collected` joins the parts
that a parser finds."""

from dataclasses import dataclass, field
from typing import Protocol

from jdisagg.request import ToolCallDelta

LONGEST_SPACE = 256  # most white space characters that are held back until other text follows


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """New content, reasoning and tool calls of an answer. The tool calls have no ids yet."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class AnswerParser(Protocol):
    """Parses one answer. `push` takes the next text and returns the parts that it completes.
    `finish` returns the remaining parts. Do not use the parser after `finish`."""

    def push(self, text: str) -> AnswerDelta: ...
    def finish(self) -> AnswerDelta: ...


@dataclass(slots=True)
class Collected:
    """Collects the parts that a parser finds until the next `take`.

    White space before a tool call is not part of the content. Up to `LONGEST_SPACE` characters of
    white space are therefore held back until other content follows. `before_call`: number of
    characters before the answer's first tool call, in the content that `take` returned last. None
    if the first call did not begin in this part of the answer."""

    calls_begun: int = 0
    before_call: int | None = None
    _first_at: int | None = None
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
        if not self.calls_begun:
            self._first_at = sum(map(len, self._content))
        self._calls.append(ToolCallDelta(self.calls_begun, name=name))
        self.calls_begun += 1

    def add_arguments(self, text: str) -> None:
        if text:
            self._calls.append(ToolCallDelta(self.calls_begun - 1, arguments=text))

    def take(self, *, last: bool = False) -> AnswerDelta:
        """`last` is whether the answer has ended. White space that was held back then becomes
        content, unless the answer has tool calls."""
        if last and not self.calls_begun:
            self._content.append(self._space)
        delta = AnswerDelta("".join(self._content), calls=joined_calls(self._calls))
        self.before_call, self._first_at = self._first_at, None
        self._content.clear()
        self._calls.clear()
        return delta


def beginning_held(text: str, *markers: str) -> int:
    """Returns the number of characters at the end of `text` that may be the beginning of one of
    `markers`. A parser holds them back until more text arrives."""
    longest = max(map(len, markers)) - 1
    tail = text[-longest:]
    if not any(marker[0] in tail for marker in markers):
        return 0
    for size in range(len(tail), 0, -1):
        if any(marker.startswith(tail[-size:]) for marker in markers):
            return size
    return 0


def joined_calls(calls: list[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
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

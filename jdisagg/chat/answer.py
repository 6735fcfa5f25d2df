"""Incremental parsing of a chat answer into content, reasoning and tool calls.

An `AnswerParser` is a state machine over text. Its total output depends only on the text so far,
not on how the text was split into pieces, so a resumed stream continues correctly. A parser never
raises: malformed tool calls are returned as content. `Collected` joins the parts that a parser
finds."""

from dataclasses import dataclass, field
from typing import Protocol

from jdisagg.request import ToolCallDelta

LONGEST_SPACE = 256  # characters of white space to hold back until other text follows


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """New content, reasoning and tool calls of an answer. The tool calls have no ids yet."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class AnswerParser(Protocol):
    """Parses one answer. Push its text in order. Do not use the parser after `finish`."""

    def push(self, text: str) -> AnswerDelta: ...
    def finish(self) -> AnswerDelta: ...


@dataclass(slots=True)
class Collected:
    """Parts that a parser found since the last `take`. White space before a tool call is not part
    of the content, so up to `LONGEST_SPACE` characters are held back until other content
    follows.

    Attributes:
        before_call: In the content that `take` returned last, the number of characters before the
            first call. None if the first call did not begin in this part of the answer.
    """

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
        """Adds text to the arguments of the latest call."""
        if text:
            self._calls.append(ToolCallDelta(self.calls_begun - 1, arguments=text))

    def take(self, *, last: bool = False) -> AnswerDelta:
        """Returns all parts and clears them. `last`: Whether the text has ended. Held white space
        then becomes content."""
        if last and not self.calls_begun:
            self._content.append(self._space)
        delta = AnswerDelta("".join(self._content), calls=joined_calls(self._calls))
        self.before_call, self._first_at = self._first_at, None
        self._content.clear()
        self._calls.clear()
        return delta


def beginning_held(text: str, *markers: str) -> int:
    """Returns how many characters at the end of `text` may be the beginning of one of `markers`."""
    longest = max(map(len, markers)) - 1
    tail = text[-longest:]
    if not any(marker[0] in tail for marker in markers):
        return 0
    for size in range(len(tail), 0, -1):
        if any(marker.startswith(tail[-size:]) for marker in markers):
            return size
    return 0


def joined_calls(calls: list[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Joins the deltas of each tool call into one."""
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

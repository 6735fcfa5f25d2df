"""Base of the parsers for tool calls.

Each parser is an `AnswerParser` for one format. A format has markers around each call, and possibly
also around a section of calls. From the first marker on, the parser holds back the text until the
call's name has arrived. If this text is not a call of one of the tools, it becomes content. If it
is, the arguments are emitted as the model generates them.

Any marker of the format outside a string ends a value, a call and a section, because models forget
brackets and end markers."""

from collections.abc import Collection
from enum import Enum, auto
from typing import ClassVar

from jdisagg.chat.answer import LONGEST_SPACE, AnswerDelta, Collected, beginning_held
from jdisagg.chat.call_names import resolved
from jdisagg.chat.json_text import SPACE, JsonValue

LONGEST_NAME = 256  # characters of a tool's name, including the text around it
BEHIND_A_CALL = SPACE + "`,;)]}"  # separators, and brackets and fences that may be too many


class State(Enum):
    """What a parser reads next."""

    WORDS = auto()  # content, outside all markers
    SECTION = auto()  # the marker of the first call, after the marker of a section
    HEAD = auto()  # the name of a call
    ARGUMENTS = auto()
    BEHIND = auto()  # the rest of a call, another call, or the end of the section


class ToolParser:
    """Base class of the parsers for tool calls. It stores text that is not yet parsed, and `_step`
    consumes as much of it as possible.

    Attributes:
        SECTION, SECTION_END: Markers around all calls, or "".
        CALL, END: Markers around a call, or "".
        OTHERS: Other markers with which calls may begin.
        SEPARATOR: Marker between the name of a call and its arguments, or "".
        DROPPED: Markers around content.
    """

    SECTION = SECTION_END = CALL = END = SEPARATOR = ""
    OTHERS: ClassVar[tuple[str, ...]] = ()
    DROPPED: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Collection[str] = ()) -> None:
        self._tools = frozenset(tools)
        self._text = ""
        self._found = Collected()
        self._state = State.WORDS
        self._last = False  # whether all text has arrived
        self._held = ""  # markers, and text between them, that are content if no call follows
        self._refused = 0  # markers in the content that begin a call, and were not closed
        self._value = JsonValue()  # the arguments of a call
        self._closed = False  # whether an end marker followed the latest call
        self._openers = tuple(filter(None, (self.SECTION, self.CALL, *self.OTHERS)))
        self._closers = tuple(filter(None, (self.END, self.SECTION_END)))
        self._marks = self._openers + self._closers
        self._firsts = frozenset(marker[0] for marker in self._marks)

    def push(self, text: str) -> AnswerDelta:
        self._text += text
        while self._step():
            pass
        return self._found.take()

    def finish(self) -> AnswerDelta:
        self._last = True
        while self._text and self._step():
            pass
        if self._held or self._state in (State.WORDS, State.HEAD):
            self._found.say(self._held + self._text)
        return self._found.take(last=True)

    @property
    def words_before_call(self) -> int | None:
        """Number of characters before the answer's first call, in the content of the latest delta.
        None if the first call did not begin in this delta."""
        return self._found.before_call

    def _step(self) -> bool:
        match self._state:
            case State.WORDS:
                return self._words()
            case State.SECTION:
                return self._first_call()
            case State.HEAD:
                return self._head()
            case State.ARGUMENTS:
                return self._arguments()
            case State.BEHIND:
                return self._behind()

    def _head(self) -> bool:
        raise NotImplementedError

    def _name(self, before: str, after: str) -> str:
        raise NotImplementedError

    def _words(self) -> bool:
        closers = self._closers if self._found.calls_begun else ()
        marker = self._say_until(*self._openers, *closers, *self.DROPPED)
        if marker in self._openers:
            self._held = marker
            self._state = State.SECTION if marker == self.SECTION else State.HEAD
        elif marker in self._closers and self._refused:
            self._found.say(marker)
            self._refused -= 1
        return bool(marker)

    def _first_call(self) -> bool:
        text = self._after_space()
        if text and text.startswith(self.CALL):
            self._held += self._text[: len(self._text) - len(text)] + self.CALL
            self._text, self._state = text.removeprefix(self.CALL), State.HEAD
        elif text is not None and self.CALL.startswith(text):
            return False
        else:
            self._refuse()
        return True

    def _refuse(self) -> None:
        """Makes the text that was held back content, because it begins no call."""
        self._refused += sum(map(self._held.count, self._openers))
        self._found.say(self._held)
        self._held, self._state = "", State.WORDS

    def _begin_call(self, name: str) -> None:
        self._held, self._closed = "", False
        self._found.begin_call(name)
        self._state = State.ARGUMENTS

    def _behind(self) -> bool:
        text = self._after_space(SPACE if self._closed else BEHIND_A_CALL)
        if text == "":
            return False
        if text is not None:
            if any(map(text.startswith, self._closers)):
                self._closed = True
                self._text = text.removeprefix(next(filter(text.startswith, self._closers)))
                return True
            if any(marker.startswith(text) for marker in self._marks):
                return False
            if self._another(text):
                self._text, self._state = text, State.HEAD
                return True
            dropped = self._text[: len(self._text) - len(text)]
            self._text = dropped[len(dropped.rstrip(SPACE)) :] + text
        self._state = State.WORDS
        return True

    def _another(self, text: str) -> bool:
        return False

    def _resolved(self, name: str) -> str:
        return resolved(name, self._tools)

    def _mark_at(self, at: int) -> bool | None:
        if self._text[at] not in self._firsts:
            return False
        if any(self._text.startswith(marker, at) for marker in self._marks):
            return True
        rest = self._text[at : at + max(map(len, self._marks))]
        return None if any(marker.startswith(rest) for marker in self._marks) else False

    def _read_head(self, text: str | None, opening: str = "{") -> bool:
        shown = text or ""
        ends = [at for end in (opening, *self._marks) if (at := shown.find(end)) >= 0]
        if self._last and self.SEPARATOR and self.SEPARATOR in shown:
            ends.append(len(shown) - beginning_held(shown, *self._marks))
        if text is not None and not ends and len(text) <= LONGEST_NAME:
            return False
        at = min(ends, default=0)
        before, _, after = shown[:at].partition(self.SEPARATOR or opening)
        after = after.strip()
        name = self._resolved(self._name(before.strip(), "" if after == "null" else after))
        if not name or at > LONGEST_NAME:
            self._refuse()
            return True
        self._begin_call(name)
        self._text, self._value = shown[at:], JsonValue()
        if not self._text.startswith(opening):
            self._found.add_arguments("{}")
            self._state = State.BEHIND
        return True

    def _arguments(self) -> bool:
        value, written, at = self._value, [], 0
        while at < len(self._text) and not value.ended:
            mark = not value.in_string and self._mark_at(at)
            if mark is not False:
                written.append(value.rest() if mark else "")
                break
            written.append(value.take(self._text[at]))
            at += not value.broken
        if value.broken:
            written.append(value.rest())
        self._found.add_arguments("".join(written))
        self._text = self._text[at:]
        if value.ended:
            self._state = State.BEHIND
        return value.ended

    def _after_space(self, space: str | None = None) -> str | None:
        text = self._text.lstrip(space)
        return text if len(self._text) - len(text) <= LONGEST_SPACE else None

    def _say_until(self, *markers: str) -> str:
        found = [(at, marker) for marker in markers if (at := self._text.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            self._found.say(self._text[:at])
            self._text = self._text[at + len(marker) :]
            return marker
        words = len(self._text) - beginning_held(self._text, *markers)
        self._found.say(self._text[:words])
        self._text = self._text[words:]
        return ""

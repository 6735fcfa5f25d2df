"""Parsers for tool calls in JSON, in the formats of Hermes and Qwen, Llama 3, and Mistral.

Each class is an `AnswerParser`. From the marker of a call on, the parser holds back the text until
the call's name and the beginning of its arguments have arrived. If this text is not a call of one
of the tools, it becomes content. If it is, the arguments are emitted as the model generates
them."""

from collections.abc import Callable, Collection
from typing import ClassVar

from jdisagg.chat.answer import LONGEST_SPACE, AnswerDelta, Collected, beginning_held
from jdisagg.chat.call_names import resolved
from jdisagg.chat.json_text import SPACE, CallObject, JsonValue

LONGEST_NAME = 256  # characters of a tool's name, including the text around it


class ToolParser:
    """Base class of the parsers for tool calls. It stores text that is not yet parsed, and `_step`
    consumes as much of it as possible.

    Args:
        tools: Names of the tools that the model may call.

    Attributes:
        first_mark: Marker with which the calls of an answer begin.
    """

    first_mark: ClassVar[str]

    def __init__(self, tools: Collection[str] = ()) -> None:
        self._tools = frozenset(tools)
        self._text = ""
        self._found = Collected()

    def push(self, text: str) -> AnswerDelta:
        self._text += text
        while self._step():
            pass
        return self._found.take()

    def finish(self) -> AnswerDelta:
        self._end()
        return self._found.take(last=True)

    @property
    def words_before_call(self) -> int | None:
        """Number of characters before the answer's first call, in the content of the latest delta.
        None if the first call did not begin in this delta."""
        return self._found.before_call

    def _resolved(self, name: str) -> str:
        return resolved(name, self._tools)

    def _step(self) -> bool:
        """Consumes some of the stored text. Returns whether another call may consume more."""
        raise NotImplementedError

    def _end(self) -> None:
        self._found.say(self._text)

    def _after_space(self, space: str | None = None) -> str | None:
        """Returns the text after leading white space, or after leading characters of `space`.
        Returns None if there are more than `LONGEST_SPACE` of them."""
        text = self._text.lstrip(space)
        return text if len(self._text) - len(text) <= LONGEST_SPACE else None

    def _say_until(self, *markers: str) -> str:
        """Emits content up to the first marker in `markers`. Consumes and returns the marker, or
        returns "" if no marker has arrived."""
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


class SteppedParser(ToolParser):
    """A `ToolParser` for formats in which markers enclose each call, and possibly also a section of
    calls.

    `_step_now` is the method that reads the next text. `_held` is the text of the markers that were
    read. It becomes content if no call follows."""

    def __init__(self, tools: Collection[str] = ()) -> None:
        super().__init__(tools)
        self._step_now: Callable[[], bool] = self._words
        self._held = ""

    def _step(self) -> bool:
        return self._step_now()

    def _words(self) -> bool:
        """Reads the content that is outside all markers."""
        raise NotImplementedError

    def _call_or_end(self, call: str, begin: Callable[[], bool], end: str) -> bool:
        """Reads the next marker within a section of calls. After the marker `call`, `begin` reads
        the call. The marker `end` ends the section. Any other text ends it too. Returns as
        `_step`."""
        text = self._after_space()
        space = self._text[: len(self._text) - len(text or "")]
        for marker, step in ((call, begin), (end, self._words)):
            if text and text.startswith(marker):
                self._held = self._held and self._held + space
                if step == self._words:
                    self._found.say(self._held and self._held + marker)
                else:
                    self._held += marker
                self._text, self._step_now = text[len(marker) :], step
                return True
        if text is not None and (call.startswith(text) or end.startswith(text)):
            return False
        self._found.say(self._held)
        self._step_now = self._words
        return True


class JsonToolParser(ToolParser):
    """A `ToolParser` for formats in which a call is a JSON object (`CallObject`). `_raw` is the
    text of the current object, which becomes content if the object is not a call."""

    def __init__(self, tools: Collection[str] = ()) -> None:
        super().__init__(tools)
        self._object: CallObject | None = None
        self._raw: list[str] = []

    def _expect_object(self, raw: str, *, certain: bool = True) -> None:
        """Starts to read a JSON object. `raw` is the text before it that becomes content if the
        object is not a call. `certain` is whether a marker before the object identifies it as a
        call."""
        self._raw = [raw]
        self._object = CallObject(
            self._found.begin_call, self._found.add_arguments, self._resolved, doubtful=not certain
        )

    def _read_object(self) -> bool | None:
        """Reads the current object. Returns None if the object has not ended, and else whether it
        is a call. The text of an object that is not a call becomes content."""
        one = self._object
        assert one is not None
        for at, character in enumerate(self._text):
            one.take(character)
            if one.ended or one.broken:
                taken = at + one.ended  # a character that breaks the object is not part of it
                self._raw.append(self._text[:taken])
                self._text = self._text[taken:]
                self._object = None
                if not one.begun:
                    self._found.say("".join(self._raw))
                return one.begun
        self._raw.append(self._text)
        self._text = ""
        return None

    def _end(self) -> None:
        if self._object is not None and not self._object.begun:
            self._found.say("".join(self._raw))
        super()._end()


class HermesParser(JsonToolParser):
    """Parser for any number of calls <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
    (Hermes 2 and 3, Qwen 2.5 and 3)."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    first_mark = OPEN
    _closes = False

    def _step(self) -> bool:
        if self._object is not None:
            called = self._read_object()
            self._closes = bool(called)
            return called is not None
        if self._closes:
            return self._close()
        if not self._say_until(self.OPEN):
            return False
        self._expect_object(self.OPEN)
        return True

    def _close(self) -> bool:
        text = self._after_space()
        if text is not None:
            if len(text) < len(self.CLOSE) and self.CLOSE.startswith(text):
                return False
            self._text = text.removeprefix(self.CLOSE)
        self._closes = False
        return True

    def _read_object(self) -> bool | None:
        if len(self._raw) == 1:  # white space before the object
            stripped = self._after_space()
            if stripped == "":
                return None
            if stripped is not None:
                self._raw[0] += self._text[: len(self._text) - len(stripped)]
                self._text = stripped
        return super()._read_object()

    def _end(self) -> None:
        if self._closes:
            self._text = ""  # the text ends within the marker
        elif self._object is not None and len(self._raw) == 1:
            self._raw.append(self._text)
            self._text = ""
        super()._end()


class LlamaParser(JsonToolParser):
    """Parser for calls {"name": "f", "parameters": {"x": 1}} (Llama 3.1 to 3.3). They may be at the
    beginning of the answer, or anywhere after the marker <|python_tag|>. Several calls are
    separated by ";"."""

    TAG = "<|python_tag|>"
    first_mark = TAG
    _words = False  # whether the text is content up to the next tag

    def _step(self) -> bool:
        if self._object is not None:
            called = self._read_object()
            self._words = called is False
            return called is not None
        if self._words:
            self._words = not self._say_until(self.TAG)
            self._text = self._text if self._words else self.TAG + self._text
            return not self._words
        return self._begin()

    def _begin(self) -> bool:
        between = SPACE + ";" if self._found.calls_begun else SPACE
        text = self._after_space(between)
        if text is not None and self.TAG.startswith(text):  # also true for ""
            return False
        tagged = text is not None and text.startswith(self.TAG)
        rest = (text or "").removeprefix(self.TAG)
        body = rest.lstrip()
        if text is not None and not body and len(rest) <= LONGEST_SPACE:
            return False
        if not body.startswith("{") or len(rest) - len(body) > LONGEST_SPACE:
            self._words = True
            if tagged:
                self._found.say(self._text[: len(self._text) - len(rest)])
                self._text = rest
            return True
        self._expect_object(self._text[: len(self._text) - len(body)], certain=tagged)
        self._text = body
        return True

    def _end(self) -> None:
        if self._found.calls_begun and not self._words and self._object is None:
            self._text = self._text.strip(SPACE + ";")
        super()._end()


class MistralParser(JsonToolParser):
    """Parser for Mistral's calls: [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, ...]. Models
    with version 11 of the tokenizer or later generate [TOOL_CALLS]f[ARGS]{"x": 1} for each call."""

    OPEN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
    first_mark = OPEN
    _in_list = False
    _called = False  # whether the marker was read
    _held = ""  # text that becomes content if no call follows
    _value: JsonValue | None = None

    def _step(self) -> bool:
        if self._object is not None:
            called = self._read_object()
            self._in_list = self._in_list and called is not False
            self._held = ""
            return called is not None
        if self._value is not None:
            return self._read_value(self._value)
        if self._in_list:
            return self._next_of_list()
        if self._called:
            return self._begin()
        self._held = self._say_until(self.OPEN)
        self._called = bool(self._held)
        return self._called

    def _begin(self) -> bool:
        body = self._hold_space(SPACE)
        if body is None:
            self._called = False
            self._found.say(self._held)
            return True
        if not body:
            return False
        if body.startswith("["):
            self._called, self._in_list = False, True
            self._held += "["
            self._text = body[1:]
            return True
        if body.startswith("{"):
            self._called = False
            self._expect_object(self._held)
            return True
        return self._begin_named(body)

    def _begin_named(self, body: str) -> bool:
        head, brace, _ = body.partition("{")
        name = head.replace(self.ARGUMENTS, "").partition(self.ID)[0].rstrip()
        none = len(head) > LONGEST_NAME or "\n" in head.rstrip()
        if not brace and not none:
            return False
        self._called = False
        name = "" if none or set(name) & set(SPACE) else self._resolved(name)
        if not name:
            self._found.say(self._held)
            return True
        self._found.begin_call(name)
        self._text = body[len(head) :]
        self._value = JsonValue()
        return True

    def _read_value(self, value: JsonValue) -> bool:
        written, self._text, ended = value.read(self._text)
        self._found.add_arguments(written)
        if ended:
            self._value = None
        return ended

    def _next_of_list(self) -> bool:
        body = self._hold_space(SPACE + ",")
        if body == "":
            return False
        if body and body.startswith("{"):
            self._expect_object(self._held)
            return True
        self._in_list = False
        if body and body.startswith("]") and not self._held:
            self._text = body[1:]
        self._found.say(self._held)
        return True

    def _hold_space(self, characters: str) -> str | None:
        """Consumes leading `characters` (white space, separators) if another character follows
        them. Returns the text after them, which is "" if no other character has arrived. Returns
        None if there are too many leading characters."""
        body = self._after_space(characters)
        if body:
            if self._held:
                self._held += self._text[: len(self._text) - len(body)]
            self._text = body
        return body

    def _end(self) -> None:
        if self._called or (self._in_list and self._object is None):
            self._found.say(self._held)
            if not self._held:
                self._text = self._text.strip(SPACE + ",")
        super()._end()

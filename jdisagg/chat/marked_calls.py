"""Parsers for tool calls that have a marker between name and JSON arguments: the formats of
DeepSeek V3 and Kimi K2."""

import re
from collections.abc import Collection

from jdisagg.chat.json_text import SPACE, JsonValue
from jdisagg.chat.tool_parsers import LONGEST_NAME, SteppedParser


class MarkedParser(SteppedParser):
    """Parser for calls of the form SECTION CALL head SEPARATOR arguments END ... SECTION_END, where
    upper-case words are markers. The head contains the name of the tool. If it has no tool's name,
    the text of the call becomes content."""

    SECTION = SECTION_END = CALL = SEPARATOR = END = ""

    def __init__(self, tools: Collection[str] = ()) -> None:
        super().__init__(tools)
        self._value = JsonValue()

    def _words(self) -> bool:
        self._held = marker = self._say_until(self.SECTION, self.CALL)
        if marker == self.SECTION:
            self._step_now = self._in_section
        elif marker:
            self._step_now = self._head
        return bool(marker)

    def _in_section(self) -> bool:
        return self._call_or_end(self.CALL, self._head, self.SECTION_END)

    def _head(self) -> bool:
        head, brace, rest = self._text.partition("{")
        before, separated, after = head.partition(self.SEPARATOR)
        name = self._resolved(self._name(before.strip(), after.strip())) if separated else ""
        if not brace and len(head) <= LONGEST_NAME and self.END not in head:
            return False
        if not brace or not name or len(head) > LONGEST_NAME or self.END in head:
            self._found.say(self._held)
            self._step_now = self._words
            return True
        self._held = ""
        self._found.begin_call(name)
        self._text, self._step_now, self._value = brace + rest, self._arguments, JsonValue()
        return True

    def _name(self, before: str, after: str) -> str:
        """Returns the tool name that the model generated, or "" if it is invalid. `before` and
        `after` are the texts before and after the separator."""
        raise NotImplementedError

    def _arguments(self) -> bool:
        written, self._text, ended = self._value.read(self._text)
        self._found.add_arguments(written)
        if ended:
            self._step_now = self._after
        return ended

    def _after(self) -> bool:
        """Reads the text after the arguments: an optional code fence, which is dropped, and the
        optional end marker."""
        text = self._after_space(FENCE)
        if text is not None and len(text) < len(self.END) and self.END.startswith(text):
            return False
        self._text = (text or self._text).removeprefix(self.END)
        self._step_now = self._in_section
        return True

    def _end(self) -> None:
        if self._step_now in (self._head, self._in_section):
            self._found.say(self._held)
        if self._step_now == self._in_section and not self._held:
            if self.SECTION_END.startswith(self._text.strip()):
                self._text = ""
        elif self._step_now == self._after:
            self._text = self._text.strip(FENCE)
            if self.END.startswith(self._text):
                self._text = ""
        super()._end()


class DeepSeekParser(MarkedParser):
    """Parser for DeepSeek's formats. V3 and R1 generate the type, the name, and the arguments in a
    code fence. V3.1 and later versions generate name SEPARATOR arguments."""

    SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    CALL, END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    first_mark = SECTION
    SEPARATOR = "<｜tool▁sep｜>"

    def _name(self, before: str, after: str) -> str:
        name = after.partition("\n")[0].strip() if after else before
        return "" if set(name) & set(SPACE) else name


class KimiParser(MarkedParser):
    """Parser for Kimi K2's format, in which the head is the call's id, such as functions.NAME:0."""

    SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    CALL, END = "<|tool_call_begin|>", "<|tool_call_end|>"
    first_mark = SECTION
    SEPARATOR = "<|tool_call_argument_begin|>"

    def _name(self, before: str, after: str) -> str:
        known = _KIMI_ID.fullmatch(before)
        if after or known is None:
            return ""
        return before if before in self._tools else known[1]


FENCE = SPACE + "`"
_KIMI_ID = re.compile(r"(?:functions\.)?(\S+?)(?::\d+)?")

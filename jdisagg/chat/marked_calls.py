"""Parsers for tool calls that have a marker between name and JSON arguments: the formats of
DeepSeek V3 and Kimi K2."""

import re

from jdisagg.chat.json_text import SPACE
from jdisagg.chat.tool_parsers import ToolParser


class MarkedParser(ToolParser):
    """Parser for calls of the form CALL head END, where the head is NAME SEPARATOR arguments. If it
    has no tool's name, the text of the call becomes content."""

    def _head(self) -> bool:
        return self._read_head(self._text)


class DeepSeekParser(MarkedParser):
    """Parser for DeepSeek's formats. V3 and R1 generate the type, the name, and the arguments in a
    code fence. V3.1 generates name SEPARATOR arguments."""

    SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    CALL, END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    SEPARATOR = "<｜tool▁sep｜>"

    def _name(self, before: str, after: str) -> str:
        name = after.partition("\n")[0].strip() if after else before
        return "" if set(name) & set(SPACE) else name


class KimiParser(MarkedParser):
    """Parser for Kimi K2's format, in which the head is the call's id, such as functions.NAME:0."""

    SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    CALL, END = "<|tool_call_begin|>", "<|tool_call_end|>"
    SEPARATOR = "<|tool_call_argument_begin|>"

    def _name(self, before: str, after: str) -> str:
        known = _KIMI_ID.fullmatch(before)
        if after or known is None:
            return ""
        return before if before in self._tools else known[1]


_KIMI_ID = re.compile(r"(?:functions\.)?(\S+?)(?::\d+)?")

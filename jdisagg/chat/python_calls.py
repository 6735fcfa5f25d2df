"""Parsers for tool calls with arguments in other notations than JSON: the calls of Python functions
that LFM2 and OLMo 3 generate, and Gemma 4's calls. The parsers convert the arguments to JSON while
they arrive."""

import json
from collections.abc import Collection, Mapping
from typing import ClassVar

from jdisagg.chat.answer import beginning_held
from jdisagg.chat.argument_types import ANY, as_json
from jdisagg.chat.json_calls import JsonToolParser
from jdisagg.chat.json_text import SPACE
from jdisagg.chat.tool_parsers import State

_JSON_ESCAPES = '"\\bfnrtu'
_ESCAPES: Mapping[str, str] = {"'": "'", "\n": "", "x": "\\u00"}  # other escapes of Python, in JSON


class PythonParser(JsonToolParser):
    """Parser for calls f(x=1, y="z"), which a comma or a line break separates. A section may also
    have calls in JSON.

    Attributes:
        QUOTES: Marks around strings. A mark that begins with another one is first.
        PLAIN_QUOTE: The mark around strings that have no escapes.
    """

    OPENING, PREFIX, PLAIN_QUOTE = "(", "", ""
    QUOTES: ClassVar[tuple[str, ...]] = ('"""', "'''", '"', "'")

    def __init__(self, tools: Collection[str] = ()) -> None:
        super().__init__(tools)
        self._quote = ""  # the mark around the current string
        self._word = ""  # the current key, number or constant

    def _named(self, body: str | None) -> bool:
        return self._read_head(body, self.OPENING)

    def _name(self, before: str, after: str) -> str:
        name = before.strip(SPACE + "[],").removeprefix(self.PREFIX)
        return "" if set(name) & set(SPACE) else name

    def _another(self, text: str) -> bool:
        return super()._another(text) or (text[0].isidentifier() and not self._closed)

    def _arguments(self) -> bool:
        if self._object is not None:
            return super()._arguments()
        while self._text and not self._value.ended:
            if not (self._in_string() if self._quote else self._token()):
                return False
        if self._value.ended:
            self._state = State.BEHIND
        return self._value.ended

    def _write(self, text: str) -> None:
        self._found.add_arguments("".join(map(self._value.take, text)))
        if self._value.broken:
            self._found.add_arguments(self._value.rest())

    def _token(self) -> bool:
        text, mark = self._text, self._mark_at(0)
        longer = any(quote != text and quote.startswith(text) for quote in self.QUOTES)
        if mark is None or (longer and not self._last):
            return False
        quote = next(filter(text.startswith, self.QUOTES), "")
        if mark:
            self._end_word()
            self._found.add_arguments(self._value.rest())
        elif quote and not self._word.strip():
            self._quote, self._word, self._text = quote, "", text.removeprefix(quote)
            self._write('"')
        else:
            self._text = text[1:]
            self._take(text[0])
        return True

    def _take(self, character: str) -> None:
        if character in "=:":
            key, self._word = self._word.strip(), ""
            self._write((json.dumps(key, ensure_ascii=False) if key else "") + ": ")
        elif character in ",([{)]}":
            self._end_word()
            closing = self._value.closing
            instead = {",": ", ", "(": "[" if closing else "{", ")": closing}
            self._write(instead.get(character, character))
        else:
            self._word += character

    def _end_word(self) -> None:
        word, self._word = self._word.strip(), ""
        if word:
            self._write(as_json(word, ANY))

    def _in_string(self) -> bool:
        text, quote = self._text, self._quote
        escape = quote if quote == self.PLAIN_QUOTE else "\\"
        places = [at for mark in (quote, escape) if (at := text.find(mark)) >= 0]
        at = min(places, default=len(text) - beginning_held(text, quote))
        self._write_string(text[:at])
        text = self._text = text[at:]
        if text.startswith("\\"):
            if len(text) > 1:
                escaped, self._text = text[1], text[2:]
                kept = ("\\" if escaped in _JSON_ESCAPES else "\\\\") + escaped
                self._write(_ESCAPES.get(escaped, kept))
            return len(text) > 1
        behind = text.removeprefix(quote).lstrip()
        if not text.startswith(quote) or not (behind or self._last):
            return False
        # LFM2 leaves quotation marks within strings unescaped.
        ends = len(quote) > 1 or not behind or behind[0] in ",=:)]}" or behind[0] in self._firsts
        self._write('"' if ends else json.dumps(quote)[1:-1])
        self._quote, self._text = "" if ends else quote, text.removeprefix(quote)
        return True

    def _write_string(self, text: str) -> None:
        self._write(json.dumps(text, ensure_ascii=False)[1:-1])


class GemmaParser(PythonParser):
    """Parser for Gemma 4's calls: <|tool_call>call:f{x:1,y:<|"|>z<|"|>}<tool_call|>."""

    CALL, END = "<|tool_call>", "<tool_call|>"
    OPENING, PREFIX, PLAIN_QUOTE = "{", "call:", '<|"|>'
    QUOTES = (PLAIN_QUOTE, '"')

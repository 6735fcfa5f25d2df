"""Parsers for tool calls in JSON: objects with a name and arguments after a marker, or lists of
such objects. Most formats differ only in their markers."""

from collections.abc import Collection

from jdisagg.chat.json_text import SPACE, CallObject
from jdisagg.chat.tool_parsers import State, ToolParser


class JsonToolParser(ToolParser):
    """Parser for formats in which a call is a JSON object (`CallObject`), alone or in a list.
    The text of an object that is not a call becomes content."""

    KEYED = False  # whether a call is {"f": {"x": 1}}
    PLAIN = False  # whether an answer may begin with a call without a marker

    def __init__(self, tools: Collection[str] = ()) -> None:
        super().__init__(tools)
        self._object: CallObject | None = None
        if self.PLAIN:
            self._state = State.HEAD

    def _head(self) -> bool:
        body = self._after_space(SPACE + "[,;")
        if body == "":
            return False
        if not body or not body.startswith("{"):
            return self._named(body)
        self._object = CallObject(
            self._begin_call,
            self._found.add_arguments,
            self._resolved,
            doubtful=self.PLAIN and not self._held,
            keyed=self.KEYED,
        )
        self._held += self._text[: len(self._text) - len(body)]
        self._text, self._state = body, State.ARGUMENTS
        return True

    def _named(self, body: str | None) -> bool:
        """Reads the beginning of a call that is not a JSON object. `body` is None if there is too
        much white space. Returns as `_step`."""
        self._refuse()
        return True

    def _arguments(self) -> bool:
        call, at = self._object, 0
        if call is None:
            return super()._arguments()
        while at < len(self._text) and not (call.ended or call.broken):
            mark = not call.in_string and self._mark_at(at)
            if mark:
                call.cut()
            if mark is not False:
                break
            call.take(self._text[at])
            at += not call.broken or call.ended  # a character that breaks it is not part of it
        if not call.begun:
            self._held += self._text[:at]
        self._text = self._text[at:]
        if not (call.ended or call.broken):
            return False
        self._object = None
        self._state = State.BEHIND
        if not call.begun:
            self._refuse()
        return True

    def _another(self, text: str) -> bool:
        return text.startswith("{") and (self.PLAIN or not self._closed)


class HermesParser(JsonToolParser):
    """Parser for any number of calls <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
    (Hermes 2 and 3, Qwen 2.5 and 3, Granite 4)."""

    CALL, END = "<tool_call>", "</tool_call>"


class LlamaParser(JsonToolParser):
    """Parser for calls {"name": "f", "parameters": {"x": 1}} (Llama 3.1 to 4). They may be at the
    beginning of the answer, or anywhere after a marker. Several calls are separated by ";"."""

    CALL, OTHERS = "<|python_tag|>", ("<|python_start|>",)
    END = "<|python_end|>"
    PLAIN = True


class MistralParser(JsonToolParser):
    """Parser for Mistral's calls: [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, ...]. Models
    with version 11 of the tokenizer or later generate [TOOL_CALLS]f[ARGS]{"x": 1} for each call."""

    CALL, ID, SEPARATOR = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

    def _named(self, body: str | None) -> bool:
        return self._read_head(body)

    def _name(self, before: str, after: str) -> str:
        name = before.partition(self.ID)[0].rstrip()
        return "" if after or set(name) & set(SPACE) else name

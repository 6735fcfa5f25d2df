"""Parsers for tool calls that have tags around each argument and no JSON: the formats of GLM 4.5,
Hunyuan 3, Qwen3-Coder, Seed-OSS, MiniMax M2 and DeepSeek V3.2.

The parsers convert the arguments to JSON. If the tool's schema declares an argument as a string,
the argument is emitted while its text arrives. Any other argument is emitted when it is complete,
as JSON of a type that the schema allows (`argument_types`)."""

import json
import re
from collections.abc import Mapping

from jdisagg.chat.answer import LONGEST_SPACE, beginning_held
from jdisagg.chat.argument_types import ANY, TEXT, Allowed, allowed_of, as_json
from jdisagg.chat.tool_parsers import LONGEST_NAME, State, ToolParser

Schemas = Mapping[str, Mapping[str, object]]


class TaggedParser(ToolParser):
    """Parser for calls of the form CALL name NAME_END (KEY key KEY_END VALUE value VALUE_END)* END,
    where upper-case words are markers. `tools` are the JSON schemas of the tools' parameters, by
    tool name."""

    NAME_END = KEY = KEY_END = VALUE = VALUE_END = ""

    def __init__(self, tools: Schemas | None = None) -> None:
        super().__init__(tools or {})
        self._schemas = tools or {}
        self._schema: Mapping[str, object] = {}  # of the call's tool
        self._count = 0  # arguments so far
        self._in_value = False
        self._allowed: Allowed = ANY  # types and values of the argument
        self._next_keys: tuple[str, ...] = ()  # lines that begin another argument
        self._pieces: list[str] = []  # pieces of an argument that need not be a string
        self._passed = False  # whether part of the argument was emitted
        marks = "|".join(map(re.escape, self._marks))
        self._closing = re.compile("|".join(map(re.escape, self._closers)))
        self._only_marks = re.compile(rf"(?:\s*(?:{marks}))*\s*")

    def _head(self) -> bool:
        text = self._after_space()
        ends = self.NAME_END, self.KEY, *self._marks
        places = [at for end in ends if text and (at := text.find(end)) >= 0]
        if text is not None and not places and len(text) < LONGEST_NAME + max(map(len, ends)):
            return False
        at = min(places, default=-1)
        name = _bare(text[:at]) if text and 0 <= at <= LONGEST_NAME else ""
        name = "" if any(c.isspace() or c in '<>"' for c in name) else self._resolved(name)
        if not name or text is None:
            self._refuse()
            return True
        self._text = text[at:].removeprefix(self.NAME_END)
        self._schema, self._count = self._schemas.get(name, {}), 0
        self._begin_call(name)
        self._found.add_arguments("{")
        return True

    def _arguments(self) -> bool:
        if self._in_value:
            return self._read_value()
        text = self._after_space()
        if text is not None and not any(map(text.startswith, self._marks)):
            if text.startswith(self.KEY):
                return self._begin_argument(text[len(self.KEY) :])
            if any(marker.startswith(text) for marker in (self.KEY, *self._marks)):
                return False
        self._end_call()  # any other text ends the call as well
        return True

    def _end_call(self) -> None:
        self._found.add_arguments("}")
        self._state = State.BEHIND

    def _begin_argument(self, text: str) -> bool:
        key, closed, rest = text.partition(self.KEY_END)
        if (mark := self._closing.search(text)) and mark.start() < len(key):
            self._text = text[mark.start() :]
            self._end_call()
            return True
        if len(key) >= LONGEST_NAME + (0 if closed else len(self.KEY_END)):
            self._end_call()
            return True
        stripped = rest.lstrip() if self.VALUE else rest
        if len(rest) - len(stripped) <= LONGEST_SPACE:
            rest = stripped
        if not closed or (len(rest) < len(self.VALUE) and self.VALUE.startswith(rest)):
            return False
        self._text = rest.removeprefix(self.VALUE)
        comma = ", " if self._count else ""
        key, self._allowed = self._argument(key)
        self._found.add_arguments(f"{comma}{_json(key)}: ")
        self._count += 1
        # Models sometimes omit VALUE_END.
        properties = self._schema.get("properties")
        keys = properties if isinstance(properties, Mapping) else ()
        self._next_keys = tuple(f"\n{self.KEY}{key}{self.KEY_END[:1]}" for key in keys)
        self._pieces, self._passed, self._in_value = [], False, True
        return True

    def _argument(self, key: str) -> tuple[str, Allowed]:
        key = _bare(key)
        return key, allowed_of(self._schema, key)

    def _read_value(self) -> bool:
        ends = [(at, len(self.VALUE_END)) for at in (self._text.find(self.VALUE_END),) if at >= 0]
        ends += [(at, 1) for key in self._next_keys if (at := self._text.find(key)) >= 0]
        at, length = min(ends, default=(len(self._text), 0))
        for mark in self._closing.finditer(self._text, 0, at):
            certain = self._ends_call(mark)
            if certain is None:
                return self._pass_on(mark.start())
            if certain:
                at, length = mark.start(), 0
                ends = [(at, length)]
                break
        if not ends:
            return self._pass_on(at)
        value = self._text[:at] if length else self._text[:at].removesuffix("\n")
        if self._allowed.any_text:
            value = self._trimmed(value, first=not self._passed, last=True)
            begin = "" if self._passed else '"'
            self._found.add_arguments(begin + _json(value)[1:-1] + '"')
        else:
            value = self._trimmed("".join(self._pieces) + value, first=True, last=True)
            self._found.add_arguments(as_json(value, self._allowed))
        self._text, self._in_value = self._text[at + length :], False
        return True

    def _ends_call(self, mark: re.Match[str]) -> bool | None:
        """Returns whether an end marker within an argument ends the call, and is not part of the
        argument: at the beginning of a line, or if only other markers or nothing follows."""
        text, at = self._text, mark.start()
        if text[at - 1 : at] == "\n" or (at == 0 and not self._passed and not self._pieces):
            return True
        behind = self._only_marks.match(text, mark.end())
        assert behind is not None
        rest = text[behind.end() :]
        if behind[0].strip() or (self._last and not rest):
            return True
        if len(behind[0]) > LONGEST_SPACE:
            return False
        return None if any(marker.startswith(rest) for marker in self._marks) else False

    def _pass_on(self, end: int) -> bool:
        """Holds back its end if this may be the beginning of a text that ends the argument, or a
        line break before it."""
        ends = (self.VALUE_END, *self._next_keys, *self._closers)
        held = beginning_held(self._text, *ends) if end == len(self._text) else 0
        certain = len(self._text[: end - held].removesuffix("\n"))
        text, rest = self._text[:certain], self._text[certain:]
        if not self._allowed.any_text:
            self._pieces.append(text)
            self._text = rest
            return False
        text = self._trimmed(text, first=not self._passed, last=False)
        if text:
            self._found.add_arguments(("" if self._passed else '"') + _json(text)[1:-1])
            self._text, self._passed = rest, True
        return False

    def _trimmed(self, value: str, *, first: bool, last: bool) -> str:
        return value


class GlmParser(TaggedParser):
    """Parser for GLM 4.5's calls: <tool_call>f, and then <arg_key>x</arg_key> and
    <arg_value>1</arg_value> for each argument, on lines of their own."""

    CALL, NAME_END, END = "<tool_call>", "\n", "</tool_call>"
    KEY, KEY_END = "<arg_key>", "</arg_key>"
    VALUE, VALUE_END = "<arg_value>", "</arg_value>"


class QwenCoderParser(TaggedParser):
    """Parser for Qwen3-Coder's calls: <tool_call> <function=f> <parameter=x> 1 </parameter>
    </function> </tool_call>, with tags and values on lines of their own."""

    SECTION, SECTION_END = "<tool_call>", "</tool_call>"
    CALL, NAME_END, END = "<function=", ">", "</function>"
    KEY, KEY_END, VALUE_END = "<parameter=", ">", "</parameter>"

    def _trimmed(self, value: str, *, first: bool, last: bool) -> str:
        value = value.removeprefix("\n") if first else value
        return value.removesuffix("\n") if last else value


class MiniMaxParser(QwenCoderParser):
    """Parser for MiniMax M2's calls, which have Qwen3-Coder's format with other tags."""

    SECTION, SECTION_END = "<minimax:tool_call>", "</minimax:tool_call>"
    CALL, NAME_END, END = '<invoke name="', '">', "</invoke>"
    KEY, KEY_END = '<parameter name="', '">'


class DeepSeekTaggedParser(MiniMaxParser):
    """Parser for DeepSeek V3.2's calls. Each argument has an attribute that states whether its text
    is a string."""

    SECTION, SECTION_END = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
    CALL, END = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
    KEY, VALUE_END = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"

    def _argument(self, key: str) -> tuple[str, Allowed]:
        name, _, attribute = key.partition('"')
        text = 'string="true' in attribute
        return name, Allowed(TEXT) if text else allowed_of(self._schema, name)

    def _trimmed(self, value: str, *, first: bool, last: bool) -> str:
        return value


def _bare(name: str) -> str:
    return name.strip().strip("\"'")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)

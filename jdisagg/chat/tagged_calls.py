"""Parsers for tool calls that have tags around each argument and no JSON: the formats of GLM 4.5,
Qwen3-Coder, Seed-OSS and MiniMax M2.

The parsers convert the arguments to JSON. If the tool's schema declares an argument as a string,
the argument is emitted while its text arrives. Any other argument is emitted when it is complete,
as JSON of a type that the schema allows (`argument_types`)."""

import json
from collections.abc import Mapping

from jdisagg.chat.answer import LONGEST_SPACE, beginning_held
from jdisagg.chat.argument_types import ANY, Allowed, allowed_of, as_json
from jdisagg.chat.tool_parsers import LONGEST_NAME, SteppedParser

Schemas = Mapping[str, Mapping[str, object]]


class TaggedParser(SteppedParser):
    """Parser for calls of the form CALL name NAME_END (KEY key KEY_END VALUE value VALUE_END)* END,
    where upper-case words are markers. If OUTER and OUTER_END are set, they enclose the calls.
    `tools` are the JSON schemas of the tools' parameters, by tool name."""

    OUTER = OUTER_END = ""
    CALL = NAME_END = KEY = KEY_END = VALUE = VALUE_END = END = ""

    def __init__(self, tools: Schemas | None = None) -> None:
        super().__init__(tools or {})
        self._schemas = tools or {}
        self._name = ""
        self._count = 0  # arguments so far
        self._allowed: Allowed = ANY  # types and values of the argument
        self._ends: tuple[str, ...] = ()  # texts that may end the argument
        self._pieces: list[str] = []  # pieces of an argument that need not be a string
        self._passed = False  # whether part of the argument was emitted

    def _words(self) -> bool:
        self._held = marker = self._say_until(*filter(None, (self.OUTER, self.CALL)))
        if marker:
            self._step_now = self._begin_name if marker == self.CALL else self._in_outer
        return bool(marker)

    def _in_outer(self) -> bool:
        return self._call_or_end(self.CALL, self._begin_name, self.OUTER_END)

    def _begin_name(self) -> bool:
        ends = self.NAME_END, self.KEY, self.END
        places = [place for end in ends if (place := self._text.find(end)) >= 0]
        if not places and len(self._text) < LONGEST_NAME + max(map(len, ends)):
            return False
        at = min(places, default=-1)
        name = _bare(self._text[:at]) if 0 <= at <= LONGEST_NAME else ""
        name = "" if any(c.isspace() or c in '<>"' for c in name) else self._resolved(name)
        if not name:
            self._found.say(self._held)
            self._step_now = self._words
            return True
        self._text = self._text[at:].removeprefix(self.NAME_END)
        self._held, self._name, self._count = "", name, 0
        self._found.begin_call(name)
        self._found.add_arguments("{")
        self._step_now = self._in_call
        return True

    def _in_call(self) -> bool:
        text = self._after_space()
        if text is not None:
            if text.startswith(self.END):
                self._text = text[len(self.END) :]
            elif text.startswith(self.KEY):
                return self._begin_argument(text[len(self.KEY) :])
            elif self.KEY.startswith(text) or self.END.startswith(text):
                return False
        self._end_call()  # any other text ends the call as well
        return True

    def _end_call(self) -> None:
        self._found.add_arguments("}")
        self._step_now = self._in_outer if self.OUTER else self._words

    def _begin_argument(self, text: str) -> bool:
        key, closed, rest = text.partition(self.KEY_END)
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
        key, schema = _bare(key), self._schemas.get(self._name, {})
        self._found.add_arguments(f"{comma}{_json(key)}: ")
        self._count += 1
        self._allowed, self._ends = allowed_of(schema, key), self._ends_of(schema)
        self._pieces, self._passed = [], False
        self._step_now = self._in_value
        return True

    def _ends_of(self, schema: Mapping[str, object]) -> tuple[str, ...]:
        """Returns the texts that end an argument. Models sometimes omit VALUE_END. A line that
        begins another argument of the tool, or that ends the call, therefore also ends the
        argument."""
        properties = schema.get("properties")
        keys = properties if isinstance(properties, Mapping) else ()
        end = f"\n{self.END}" + (f"\n{self.OUTER_END}" if self.OUTER else "")
        return (self.VALUE_END, end, *(f"\n{self.KEY}{key}{self.KEY_END}" for key in keys))

    def _in_value(self) -> bool:
        ends = [(at, end) for end in self._ends if (at := self._text.find(end)) >= 0]
        if not ends:
            self._pass_on()
            return False
        at, end = min(ends)
        value = self._text[:at]
        rest = self._text[at + (len(end) if end == self.VALUE_END else 1) :]
        if self._allowed.any_text:
            value = self._trimmed(value, first=not self._passed, last=True)
            begin = "" if self._passed else '"'
            self._found.add_arguments(begin + _json(value)[1:-1] + '"')
        else:
            value = self._trimmed("".join(self._pieces) + value, first=True, last=True)
            self._found.add_arguments(as_json(value, self._allowed))
        self._text, self._step_now = rest, self._in_call
        return True

    def _pass_on(self) -> None:
        """Emits the received part of a string argument. Holds back its end if this may be the
        beginning of a text that ends the argument, or a line break before VALUE_END. Parts of other
        arguments are stored until the argument is complete."""
        certain = len(self._text) - beginning_held(self._text, *self._ends)
        certain = len(self._text[:certain].removesuffix("\n"))
        text, rest = self._text[:certain], self._text[certain:]
        if not self._allowed.any_text:
            self._pieces.append(text)
            self._text = rest
            return
        text = self._trimmed(text, first=not self._passed, last=False)
        if text:
            self._found.add_arguments(("" if self._passed else '"') + _json(text)[1:-1])
            self._text, self._passed = rest, True

    def _trimmed(self, value: str, *, first: bool, last: bool) -> str:
        return value

    def _end(self) -> None:
        text = self._text.strip()
        if self._step_now in (self._begin_name, self._in_outer):
            self._found.say(self._held)
        closing = self._step_now == self._in_outer and not self._held
        if closing and self.OUTER_END.startswith(text):
            self._text = ""
        if self._step_now in (self._in_call, self._in_value):
            self._text = ""  # the text ends within a call
        super()._end()


class GlmParser(TaggedParser):
    """Parser for GLM 4.5's calls: <tool_call>f, and then <arg_key>x</arg_key> and
    <arg_value>1</arg_value> for each argument, on lines of their own."""

    CALL, NAME_END, END = "<tool_call>", "\n", "</tool_call>"
    first_mark = CALL
    KEY, KEY_END = "<arg_key>", "</arg_key>"
    VALUE, VALUE_END = "<arg_value>", "</arg_value>"


class QwenCoderParser(TaggedParser):
    """Parser for Qwen3-Coder's calls: <tool_call> <function=f> <parameter=x> 1 </parameter>
    </function> </tool_call>, with tags and values on lines of their own."""

    OUTER, OUTER_END = "<tool_call>", "</tool_call>"
    first_mark = OUTER
    CALL, NAME_END, END = "<function=", ">", "</function>"
    KEY, KEY_END, VALUE_END = "<parameter=", ">", "</parameter>"

    def _trimmed(self, value: str, *, first: bool, last: bool) -> str:
        value = value.removeprefix("\n") if first else value
        return value.removesuffix("\n") if last else value


class SeedParser(QwenCoderParser):
    """Parser for Seed-OSS's calls, which have Qwen3-Coder's format with another outer tag."""

    OUTER, OUTER_END = "<seed:tool_call>", "</seed:tool_call>"
    first_mark = OUTER


class MiniMaxParser(QwenCoderParser):
    """Parser for MiniMax M2's calls, which have Qwen3-Coder's format with other tags."""

    OUTER, OUTER_END = "<minimax:tool_call>", "</minimax:tool_call>"
    first_mark = OUTER
    CALL, NAME_END, END = '<invoke name="', '">', "</invoke>"
    KEY, KEY_END = '<parameter name="', '">'


def _bare(name: str) -> str:
    """Returns a name without white space and quotation marks around it."""
    return name.strip().strip("\"'")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)

"""Parser for answers in the format of gpt-oss (OpenAI's "harmony"), in which every part of an
answer has a header with its channel.

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>commentary
    to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>

The prompt ends within the first header. A part in the channel `analysis` is reasoning. Parts in
other channels (`final`, `commentary`) are content. A part with the recipient `functions.NAME` is a
tool call if there is such a tool."""

import re
from collections.abc import Callable, Collection

from jdisagg.chat.answer import AnswerDelta, Collected, beginning_held
from jdisagg.chat.call_names import resolved
from jdisagg.chat.json_text import JsonValue
from jdisagg.chat.reasoning import Marks

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
# Markers around reasoning in the chat template's text. A prompt may end between them.
MARKS = Marks(f"{CHANNEL}analysis{MESSAGE}", END)
LONGEST_HEADER = 512

_TO = "to="
_BETWEEN = (START, CHANNEL, MESSAGE, END, CALL, RETURN)
_AFTER_HEADER = (MESSAGE, START, END, CALL, RETURN)
_AFTER_BODY = (START, CHANNEL, END, CALL, RETURN)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*analysis\b")


class HarmonyParser:
    """An `AnswerParser` for gpt-oss's format. It separates content, reasoning and tool calls.

    Args:
        tools: Names of the tools that the model may call. If it is empty, no part is a tool call.
    """

    def __init__(self, tools: Collection[str] = (), *, thinking: bool = False) -> None:
        self._tools = frozenset(tools)
        self._text = ""
        self._found = Collected()
        self._reasoning: list[str] = []
        self._step: Callable[[], bool] = self._body if thinking else self._beginning
        self._say: Callable[[str], None] = self._think if thinking else self._found.say
        self._header = ""  # the part of the header read so far
        self._parted = ""  # separator before the next text of this part
        self._thought = self._said = False  # whether that kind was emitted
        self._value: JsonValue | None = None  # the arguments, once they have begun

    @property
    def reasons(self) -> bool:
        return self._step == self._body and self._say == self._think

    @property
    def undecided(self) -> bool:
        return self._step != self._body

    def push(self, text: str) -> AnswerDelta:
        self._text += text
        while self._step():
            pass
        return self._taken(self._found.take())

    def finish(self) -> AnswerDelta:
        if self._step == self._body:
            self._pass_on(self._text)
            self._end_of_body()
        elif self._step in (self._between, self._beginning):
            self._found.say(self._text)
        elif not self._header.lstrip().startswith((START, CHANNEL, f"{_TO}functions.")):
            self._found.say(self._header + self._text)  # content that looked like a recipient
        self._text = ""
        return self._taken(self._found.take(last=True))

    def _taken(self, found: AnswerDelta) -> AnswerDelta:
        reasoning = "".join(self._reasoning)
        self._reasoning.clear()
        return AnswerDelta(found.content, reasoning, found.calls)

    def _beginning(self) -> bool:
        text = self._text.lstrip(" ")
        if len(self._text) - len(text) <= LONGEST_HEADER and _TO.startswith(text[: len(_TO)]):
            if len(text) < len(_TO):
                return False
            self._step = self._in_header
        else:
            self._step = self._between
        return True

    def _between(self) -> bool:
        found, marker = self._until(_BETWEEN)
        self._found.say(found)
        self._said = self._said or bool(found.strip())
        if marker == MESSAGE:
            self._begin_body("")
        elif marker in (START, CHANNEL):
            self._header, self._step = marker, self._in_header
        return bool(marker)

    def _in_header(self) -> bool:
        found, marker = self._until(_AFTER_HEADER)
        self._header += found
        if len(self._header) > LONGEST_HEADER:  # not a header
            words, rest = self._header[:LONGEST_HEADER], self._header[LONGEST_HEADER:]
            self._found.say(words)
            self._text = rest + marker + self._text
            self._said, self._header, self._step = True, "", self._between
            return True
        if marker == MESSAGE:
            self._begin_body(self._header)
        elif marker == CALL:  # a call without arguments
            self._begin_body(self._header)
            self._end_of_body()
            self._step = self._between
        elif marker:  # a part without a message is ignored
            self._header = START if marker == START else ""
            self._step = self._in_header if marker == START else self._between
        return bool(marker)

    def _begin_body(self, header: str) -> None:
        self._header, self._step = "", self._body
        to, thinks = _RECIPIENT.search(header), _CHANNEL.search(header)
        self._parted = "\n" if (self._thought if thinks else self._said) else ""
        self._say = self._think if thinks else self._found.say
        name = resolved(to[1], self._tools) if to and self._tools else ""
        if name:
            self._parted, self._value = "", None
            self._say = self._argue
            self._found.begin_call(name)

    def _body(self) -> bool:
        found, marker = self._until(_AFTER_BODY)
        self._pass_on(found)
        if marker:
            self._end_of_body(complete=True)
            opens = marker in (START, CHANNEL)  # the end marker may be missing
            self._header = marker if opens else ""
            self._step = self._in_header if opens else self._between
        return bool(marker)

    def _pass_on(self, text: str) -> None:
        if text:
            self._thought = self._thought or self._say == self._think
            self._said = self._said or self._say == self._found.say
            self._say(self._parted + text)
            self._parted = ""

    def _end_of_body(self, *, complete: bool = False) -> None:
        if self._say == self._argue:
            if self._value is None:
                self._found.add_arguments("{}")
            elif complete or self._value.broken:
                self._found.add_arguments(self._value.rest())
        self._say = self._found.say

    def _argue(self, text: str) -> None:
        """Drops text after the end of their JSON, such as a bracket too many."""
        if self._value is None and text.strip():
            text, self._value = text.lstrip(), JsonValue()
        if (value := self._value) is not None:
            written = (value.take(character) for character in text if not value.ended)
            self._found.add_arguments("".join(written))

    def _think(self, text: str) -> None:
        self._reasoning.append(text)

    def _until(self, markers: tuple[str, ...]) -> tuple[str, str]:
        found = [(at, marker) for marker in markers if (at := self._text.find(marker)) >= 0]
        at, marker = min(
            found, default=(len(self._text) - beginning_held(self._text, *markers), "")
        )
        text, self._text = self._text[:at], self._text[at + len(marker) :]
        return text, marker

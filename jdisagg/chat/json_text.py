"""Incremental readers of JSON that a model generates, one character at a time. `JsonValue` finds
the end of a value. `CallObject` reads an object with the name and arguments of a tool call.

The readers do not validate JSON. They track only brackets and strings."""

from collections.abc import Callable

import msgspec

SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)
_CLOSING = {"{": "}", "[": "]"}

_encode = msgspec.json.encode
_decode = msgspec.json.Decoder().decode


class JsonValue:
    """Finds the end of a JSON value that begins with the first character that is read.

    The end of a number, `true`, `false` or `null` is known only when the next character arrives.
    The attribute `broken` is True if brackets do not match."""

    def __init__(self) -> None:
        self.broken = False
        self._open: list[str] = []
        self._in_string = self._escaped = self._begun = False

    def take(self, character: str) -> bool:
        """Returns whether this character ends the value."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                return not self._open
            return False
        self._begun = True
        if character == '"':
            self._in_string = True
        elif character in _CLOSING:
            self._open.append(_CLOSING[character])
        elif character in "}]":
            if not self._open or self._open.pop() != character:
                self.broken = True
                return True
            return not self._open
        return False

    def written(self, character: str) -> str:
        """Models leave line breaks and tabs in strings unescaped, which JSON does not allow."""
        if not self._in_string or character >= " ":
            return character
        return ("\\" if self._escaped else "") + _encode(character).decode()[1:-1]

    def read(self, text: str) -> tuple[str, str, bool]:
        """Reads the next text. Returns the part of the text that belongs to the value, escaped as
        JSON requires, the rest of the text, and whether the value has ended."""
        written: list[str] = []
        for at, character in enumerate(text):
            piece = self.written(character)
            ended = self.take(character)
            if not self.broken:
                written.append(piece)
            if ended:
                return "".join(written), text[at + (not self.broken) :], True
        return "".join(written), "", False

    def ends_before(self, character: str) -> bool:
        bare = self._begun and not self._in_string and not self._open
        return bare and character in ",}]" + SPACE


class CallObject:
    """Reads a tool call in the form of an object such as {"name": "f", "arguments": {"x": 1}}.
    Passes the name to `begin`, and the arguments to `add` while they arrive.

    The arguments may precede the name. They may also be a string that contains JSON. If `begun` is
    False when the object has `ended` or is `broken`, the object was not a tool call.

    Args:
        resolve: Function that returns the tool for a name, or "" if there is no such tool. The
            object is then not a call.
        doubtful: Whether to be strict: an object without arguments, or with keys that calls do not
            have, is then not a call.
    """

    def __init__(
        self,
        begin: Callable[[str], None],
        add: Callable[[str], None],
        resolve: Callable[[str], str],
        *,
        doubtful: bool = False,
    ) -> None:
        self.ended = self.broken = self.begun = False
        self._begin, self._add = begin, add
        self._resolve = resolve
        self._doubtful = doubtful
        self._name = self._key = ""
        self._arguments: list[str] | None = None  # not yet passed to `add`; None before the key
        self._streams = False  # whether the current value is the arguments object
        self._text: list[str] = []  # text of the current value
        self._value: JsonValue | None = None
        self._step = self._open

    def take(self, character: str) -> None:
        if self._value is not None and self._value.ends_before(character):
            self._value_ended()
        if not self.broken:
            self._step(character)

    def _open(self, character: str) -> None:
        self.broken = character != "{"
        self._step = self._key_or_end

    def _key_or_end(self, character: str) -> None:
        if character == '"':
            self._begin_value(character)
            self._step = self._in_key
        elif character == "}":
            self._end()
        elif character not in "," + SPACE:
            self.broken = True

    def _in_key(self, character: str) -> None:
        assert self._value is not None
        self._text.append(character)
        if self._value.take(character):
            self._value = None
            self._key = str(_decoded("".join(self._text)))
            self._step = self._colon
            self.broken = self._doubtful and self._key not in _KEYS

    def _colon(self, character: str) -> None:
        if character == ":":
            self._step = self._first_of_value
        elif character not in SPACE:
            self.broken = True

    def _first_of_value(self, character: str) -> None:
        if character in SPACE:
            return
        if character in ",:}]":
            self.broken = True
            return
        if self._key in _ARGUMENTS:
            if self._arguments is not None:  # ignores a second arguments key
                self.broken = True
                return
            self._arguments = []
            self._streams = character == "{"
        self._begin_value("")
        self._step = self._in_value
        self._in_value(character)

    def _in_value(self, character: str) -> None:
        assert self._value is not None
        if self._streams:
            self._give(self._value.written(character))
        else:
            self._text.append(character)
        if self._value.take(character):
            self.broken = self._value.broken
            if not self.broken:
                self._value_ended()

    def _begin_value(self, first: str) -> None:
        self._value = JsonValue()
        self._text = []
        if first:
            self._text.append(first)
            self._value.take(first)

    def _value_ended(self) -> None:
        self._value = None
        self._step = self._key_or_end
        if self._streams:
            self._streams = False
            return
        value = _decoded("".join(self._text))
        if self._key == "name":
            known = self._resolve(value) if isinstance(value, str) and not self._name else ""
            if not known:
                self.broken = True
                return
            self._name = known
            self._give("")
        elif self._key in _ARGUMENTS:
            self._give(value if isinstance(value, str) and value.strip() else "{}")

    def _give(self, arguments: str) -> None:
        if self._arguments is None:
            return
        self._arguments.append(arguments)
        if not self._name:
            return
        if not self.begun:
            self.begun = True
            self._begin(self._name)
        self._add("".join(self._arguments))
        self._arguments.clear()

    def _end(self) -> None:
        if self._name and not self.begun and not self._doubtful:
            self._arguments = []
            self._give("{}")
        self.ended, self.broken = True, not self.begun


def _decoded(text: str) -> object:
    try:
        return _decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None

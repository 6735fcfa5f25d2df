"""Incremental readers of JSON that a model generates, one character at a time. `JsonValue` finds
the end of a value. `CallObject` reads an object with the name and arguments of a tool call.

The readers do not validate JSON. They track only brackets and strings."""

from collections.abc import Callable

import msgspec

SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_NAMES = ("name", "tool_name")
_KEYS = ("type", "id", "tool_call_id", *_NAMES, *_ARGUMENTS)
_CLOSING = {"{": "}", "[": "]"}

_encode = msgspec.json.encode
_decode = msgspec.json.Decoder().decode


class JsonValue:
    """Finds the end of a JSON value that begins with the first character that is read, and repairs
    the value: line breaks and tabs in strings, which models leave unescaped, are escaped, and a
    comma before a closing bracket is left out.

    The end of a number, `true`, `false` or `null` is known only when the next character arrives.

    Attributes:
        broken: Whether a bracket does not match, or a semicolon or a code fence follows, which
            separate calls. This character is not part of the value.
    """

    def __init__(self) -> None:
        self.ended = self.broken = self.in_string = False
        self._open: list[str] = []
        self._escaped = self._is_key = False
        self._last = ""  # the latest character outside strings that is no white space
        self._comma = ""  # a comma and the white space after it, until other text follows

    @property
    def closing(self) -> str:
        """The bracket that closes the innermost object or list. "" if none is open."""
        return self._open[-1] if self._open else ""

    def take(self, character: str) -> str:
        """Reads a character. Returns the text that it adds to the value."""
        if self.in_string:
            return self._take_in_string(character)
        if character in SPACE and self._comma:
            self._comma += character
            return ""
        if character in SPACE:
            return character
        comma, self._comma = self._comma, ""
        missing = ""
        if character in "}];`":
            self.broken = self.closing != character
            self.ended = self.broken or len(self._open) == 1
            if self.broken:
                return ""
            self._open.pop()
            missing, comma = self._missing(), ""
        elif character == ",":
            self._comma, character = character, ""
        elif character in _CLOSING:
            self._open.append(_CLOSING[character])
        elif character == '"':
            self.in_string = True
            self._is_key = self.closing == "}" and self._last in ("{", ",")
        self._last = self._comma or character
        return comma + missing + character

    def rest(self) -> str:
        """Ends an object or a list that is not complete. Returns the text that completes it."""
        missing = self._missing() + "".join(reversed(self._open))
        self._open.clear()
        self.ended = True
        return missing

    def _take_in_string(self, character: str) -> str:
        escaped, self._escaped = self._escaped, character == "\\" and not self._escaped
        if character == '"' and not escaped:
            self.in_string = False
            self.ended = not self._open
        if character >= " ":
            return character
        return ("\\" if escaped else "") + _encode(character).decode()[1:-1]

    def _missing(self) -> str:
        if self._last == '"' and self._is_key:
            return ": null"
        return " null" if self._last == ":" else ""

    def ends_before(self, character: str) -> bool:
        bare = self._last and not self.in_string and not self._open
        return bool(bare) and character in ",}]" + SPACE


class CallObject:
    """Reads a tool call in the form of an object such as {"name": "f", "arguments": {"x": 1}}.
    Passes the name to `begin`, and the arguments to `add` while they arrive.

    The arguments may precede the name. They may also be a string that contains JSON. If `begun` is
    False when the object has `ended` or is `broken`, the object was not a tool call.

    An object that is broken within its arguments is a call whose arguments are completed.

    Args:
        resolve: Function that returns the tool for a name, or "" if there is no such tool. The
            object is then not a call.
        doubtful: Whether to be strict: an object without arguments, or with keys that calls do not
            have, is then not a call.
        keyed: Whether the name is the key of the arguments, as in {"f": {"x": 1}}.
    """

    def __init__(
        self,
        begin: Callable[[str], None],
        add: Callable[[str], None],
        resolve: Callable[[str], str],
        *,
        doubtful: bool = False,
        keyed: bool = False,
    ) -> None:
        self.ended = self.broken = self.begun = False
        self._begin, self._add = begin, add
        self._resolve = resolve
        self._doubtful, self._keyed = doubtful, keyed
        self._name = self._key = ""
        self._arguments: list[str] | None = None  # not yet passed to `add`; None before the key
        self._streams = False  # whether the current value is the arguments object
        self._text: list[str] = []  # text of the current value
        self._value: JsonValue | None = None
        self._step = self._open

    @property
    def in_string(self) -> bool:
        return self._value is not None and self._value.in_string

    def cut(self) -> None:
        """Ends an object of which the end is missing. No value may be within a string."""
        if self._value is not None:
            self._give(self._value.rest() if self._streams else "")
            self._value_ended()
        if not self.broken:
            self._end()

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
        self._value.take(character)
        if self._value.ended:
            self._value = None
            self._key = str(_decoded("".join(self._text)))
            self._step = self._colon
            self.broken = self._doubtful and self._key not in _KEYS
            if self._keyed and not self._name and (name := self._resolve(self._key)):
                self._name, self._key = name, _ARGUMENTS[0]

    def _colon(self, character: str) -> None:
        if character == ":":
            self._step = self._first_of_value
        elif character == "}":
            self._end()
        elif character not in SPACE:
            self.broken = True

    def _first_of_value(self, character: str) -> None:
        if character in SPACE:
            return
        if character in ",}" and self._key in _ARGUMENTS:
            self._step = self._key_or_end
            return self._step(character)
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
        written = self._value.take(character)
        if self._streams:
            self._give(written)
        else:
            self._text.append(character)
        if self._value.ended:
            self.broken = self._value.broken
            if self.broken and self._streams:
                self._give(self._value.rest())
            elif not self.broken:
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
        if self._key in _NAMES:
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

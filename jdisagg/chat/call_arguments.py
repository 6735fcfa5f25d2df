"""Converts the arguments of tool calls in a conversation's history to objects for the chat
template.

A client sends back the text that the model generated. This text may not be a JSON object, for
example if the length limit cut the answer off. Any text is therefore converted to an object."""

import json
import re
from collections import deque

from jdisagg.chat.argument_types import from_python

Json = dict[str, object]
_CLOSING = {"{": "}", "[": "]"}
_MOST_CUTS = 8
_DEEPEST = 100
_OBJECT = frozenset({"object"})
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{0,3})?$")  # an escape that was cut off
_decoder = json.JSONDecoder(strict=False)


def arguments_object(text: str) -> Json:
    """Converts the arguments of a tool call to an object. Raises no error.

    An empty text and null become an empty object. Text after the object is dropped. An object that
    was cut off keeps its complete members. Any other value becomes the only argument, named
    `arguments`."""
    value = _read(text.strip())
    if isinstance(value, str) and isinstance(inner := _read(value.strip()), dict | None):
        value = inner  # JSON within a JSON string
    if value is None:
        return {}
    return _encodable(value if isinstance(value, dict) else {"arguments": value})


def _read(text: str) -> object:
    if not text:
        return None
    try:
        value, end = _decoder.raw_decode(text)
        if isinstance(value, dict | None) or end == len(text):
            return value
    except (ValueError, RecursionError):
        pass
    if (made := from_python(text, _OBJECT)) is not None:
        return json.loads(made)
    return _completed(text) if text.startswith("{") else text


def _completed(text: str) -> Json:
    open_ends: list[str] = []
    cuts: deque[tuple[int, str]] = deque(maxlen=_MOST_CUTS)  # where a member ends, and its end
    in_string = escaped = False
    for at, character in enumerate(text):
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            in_string = True
        elif character in _CLOSING and len(open_ends) < _DEEPEST:
            open_ends.append(_CLOSING[character])
            cuts.append((at + 1, _end(open_ends)))
        elif character in "}]" and open_ends and open_ends[-1] == character:
            open_ends.pop()
        elif character == ",":
            cuts.append((at, _end(open_ends)))
        elif character in "{}[]":  # too deep, or brackets that do not match
            break
    else:
        text = _ESCAPE.sub("", text) + '"' if in_string else text
        cuts.append((len(text), _end(open_ends)))
    for at, end in reversed(cuts):
        try:
            value = _decoder.decode(text[:at] + end)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return {}


def _end(open_ends: list[str]) -> str:
    return "".join(reversed(open_ends))


def _encodable(value: Json) -> Json:
    """Replaces unpaired surrogates by "?", because UTF-8 cannot encode them."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.loads(text.encode("utf-8", "replace"))
    return value

"""Converts tool arguments that a model generates as plain text to JSON of the type that the tool's
schema requires.

The module first determines which JSON types the schema allows for an argument. It evaluates types
and lists of types, `nullable`, constants and enumerations, references, and combinations of schemas.
The text of an argument may be JSON or a Python literal."""

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import NoReturn

import msgspec

from jdisagg.grammar.json_pointer import referred

Types = frozenset[str]
TEXT: Types = frozenset({"string"})
_NAMES = ("string", "integer", "number", "boolean", "object", "array", "null")
# Type names that schemas contain, with the JSON Schema type of each.
_ALIASES = {
    **{name: "string" for name in ("str", "text", "char", "varchar")},
    **{name: "integer" for name in ("int", "uint", "long", "short")},
    **{name: "number" for name in ("float", "double", "num")},
    **{"bool": "boolean", "none": "null"},
    **{name: "object" for name in ("dict", "map", "struct")},
    **{name: "array" for name in ("list", "arr", "tuple", "sequence")},
    **{name: name for name in _NAMES},
}
# Keywords that apply to one type only, for schemas without a type.
_OF_TYPE = {
    **{name: "object" for name in ("properties", "additionalProperties", "required")},
    **{name: "array" for name in ("items", "prefixItems", "minItems", "maxItems")},
    **{name: "string" for name in ("pattern", "minLength", "maxLength", "format")},
    **{name: "number" for name in ("minimum", "maximum", "multipleOf")},
}
# Types by the first character of a JSON text. Any other character begins a number.
_BY_FIRST = {
    "{": "object",
    "[": "array",
    "t": "boolean",
    "f": "boolean",
    "n": "null",
    '"': "string",
}
_WORDS = {"true": True, "false": False, "null": None}
_INTEGER = re.compile(r"-?\d+")
_PADDED = re.compile(r"[+-]?0\d+", re.ASCII)  # an integer with leading zeros
# Limits on the number and depth of visited schemas, because references may be circular.
_MOST_SCHEMAS, _DEEPEST = 1000, 40
_LONGEST_PYTHON = 64 << 10
_CONTAINERS: Types = frozenset({"object", "array"})
_lenient = json.JSONDecoder(strict=False).decode
_skip = msgspec.json.Decoder(msgspec.Raw).decode
_string = msgspec.json.Decoder(str).decode


@dataclass(frozen=True, slots=True)
class Allowed:
    """The types and values that a schema allows for an argument.

    Attributes:
        types: JSON types, or None for any type.
        texts: Strings among the constants (`const`, `enum`) of the schema. If there are any, other
            strings are not allowed.
    """

    types: Types | None = None
    texts: frozenset[str] = frozenset()

    @property
    def any_text(self) -> bool:
        return self.types == TEXT and not self.texts

    def or_else(self, other: "Allowed") -> "Allowed":
        some, more = self.types, other.types
        return Allowed(
            None if some is None or more is None else some | more, self.texts | other.texts
        )

    def and_also(self, other: "Allowed") -> "Allowed":
        texts = self.texts & other.texts if self.texts and other.texts else self.texts | other.texts
        if self.types is None or other.types is None:
            return Allowed(other.types if self.types is None else self.types, texts)
        both = {one for one in self.types if _fits(one, other.types)}
        both |= {one for one in other.types if _fits(one, self.types)}
        return Allowed(frozenset(both) or None, texts)  # a contradiction limits nothing


ANY = Allowed()


def allowed_of(parameters: Mapping[str, object], key: str) -> Allowed:
    return _Schemas(parameters).argument(key)


def as_json(text: str, allowed: Allowed) -> str:
    """Text that already is JSON of an allowed type is returned unchanged. A Python literal of an
    allowed type is converted to JSON. Any other text becomes a JSON string."""
    bare, types = text.strip(), allowed.types
    for one in (text, bare):
        if one in allowed.texts:
            return _dumped(one)
    if types == TEXT:
        return _dumped(text)
    made = _read(bare, types)
    if made is None and (types is None or "string" not in types):
        if (quoted := _unquoted(bare)) is not None:  # a value of another type within quotes
            made = _read(quoted.strip(), types)
        made = made or (bare if _json_type(bare) else from_python(bare, None))
    return made or _dumped(text)


def _read(bare: str, types: Types | None) -> str | None:
    kind = _json_type(bare)
    if kind is not None and (types is None or _fits(kind, types)):
        return bare
    if kind == "number" and types and "integer" in types and (whole := _whole(bare)):
        return whole
    if kind is None and bare[:1] in ("{", "[") and (made := _with_breaks(bare)) is not None:
        return made if _fits(_BY_FIRST[bare[0]], types or _CONTAINERS) else None
    return from_python(bare, types) if kind is None else None


def _with_breaks(bare: str) -> str | None:
    try:
        made = _dumped(_lenient(bare))
        _skip(made)
        return made
    except (ValueError, RecursionError, msgspec.DecodeError, UnicodeEncodeError):
        return None


def _json_type(bare: str) -> str | None:
    try:
        _skip(bare)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None
    number = "integer" if _INTEGER.fullmatch(bare) else "number"
    return _BY_FIRST.get(bare[0], number)


def _whole(number: str) -> str | None:
    """Returns a number without a fraction, such as 1e3, as an integer. Returns None for others."""
    near = float(number)
    if not near.is_integer():
        return None
    return str(int(near if abs(near) < 2**53 else Decimal(number)))


def _fits(kind: str, types: Types) -> bool:
    return kind in types or (kind == "integer" and "number" in types)


def _unquoted(bare: str) -> str | None:
    try:
        return _string(bare)
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return None


def from_python(bare: str, types: Types | None) -> str | None:
    """Converts a Python literal of one of the types to JSON. Returns None for any other text.

    `types` is None if every type is allowed. Only containers, True, False and None are then
    converted, because other literals are probably meant as text."""
    if len(bare) > _LONGEST_PYTHON or not bare:
        return None
    only_case = bare.lower()
    if types is not None and "string" not in types and only_case in ("true", "false"):
        return only_case if "boolean" in types else None
    if types and _PADDED.fullmatch(bare) and "string" not in types and _fits("integer", types):
        return str(int(bare))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            node = ast.parse(bare, mode="eval").body
        if isinstance(node, ast.Tuple) and bare[0] != "(" and not (types and "array" in types):
            return None  # a text with commas, such as 1,000
        value = _value(node)
        made = _dumped(value)
        made.encode()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    kind = _type_of(value)
    if types is None:
        return made if kind in ("object", "array", "boolean", "null") else None
    if kind == "number" and "integer" in types and (whole := _whole(made)):
        return whole
    return made if kind != "string" and _fits(kind, types) else None


def _value(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=str() | int() | None):
            return node.value
        case ast.Constant(value=float() as number) if math.isfinite(number):
            return number
        case ast.Name(id="true" | "false" | "null"):
            return _WORDS[node.id]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant(value=int() | float())):
            positive = _value(node.operand)
            assert isinstance(positive, int | float)
            return -positive if isinstance(node.op, ast.USub) else positive
        case ast.List() | ast.Tuple():
            return [_value(one) for one in node.elts]
        case ast.Dict():
            return dict(zip(map(_key, node.keys), map(_value, node.values), strict=True))
    _no_literal()


def _key(node: ast.expr | None) -> str:
    if node is None:  # **other
        _no_literal()
    key = _value(node)
    if isinstance(key, list | dict):
        _no_literal()
    return key if isinstance(key, str) else _dumped(key)


def _no_literal() -> NoReturn:
    raise ValueError("not a literal")


def _type_of(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "number"
        case Mapping():
            return "object"
    return "array"


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


class _Schemas:
    def __init__(self, root: Mapping[str, object]) -> None:
        self._root = root
        self._left = _MOST_SCHEMAS

    def argument(self, key: str) -> Allowed:
        found = self._properties(self._root, key, 0)
        if not found:
            more = self._root.get("additionalProperties")
            found = [more] if isinstance(more, Mapping) else [True]
        return self._any_of(found, 0)

    def _properties(self, schema: object, key: str, depth: int) -> list[object]:
        if not isinstance(schema, Mapping) or not self._spend(depth):
            return []
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            return [properties[key]]
        parts = [one for name in ("allOf", "anyOf", "oneOf") for one in _list(schema.get(name))]
        if "$ref" in schema:
            parts.append(referred(self._root, schema["$ref"]))
        return [one for part in parts for one in self._properties(part, key, depth + 1)]

    def _of(self, schema: object, depth: int) -> Allowed:
        if not isinstance(schema, Mapping) or not self._spend(depth):
            return ANY
        found = _stated(schema)
        for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
            if isinstance(values, list) and values:
                texts = frozenset(one for one in values if isinstance(one, str))
                found = found.and_also(Allowed(frozenset(map(_type_of, values)), texts))
        if "$ref" in schema:
            found = found.and_also(self._of(referred(self._root, schema["$ref"]), depth + 1))
        for part in _list(schema.get("allOf")):
            found = found.and_also(self._of(part, depth + 1))
        for name in ("anyOf", "oneOf"):
            if parts := _list(schema.get(name)):
                found = found.and_also(self._any_of(parts, depth + 1))
        if found.types is None:
            implied = frozenset(kind for name, kind in _OF_TYPE.items() if name in schema)
            found = Allowed(implied or None, found.texts)
        if schema.get("nullable") is True and found.types is not None:
            found = Allowed(found.types | {"null"}, found.texts)
        return found

    def _any_of(self, schemas: Sequence[object], depth: int) -> Allowed:
        first, *others = (self._of(schema, depth) for schema in schemas)
        for other in others:
            first = first.or_else(other)
        return first

    def _spend(self, depth: int) -> bool:
        self._left -= 1
        return self._left >= 0 and depth < _DEEPEST


def _stated(schema: Mapping[str, object]) -> Allowed:
    given = schema.get("type")
    names = [given] if isinstance(given, str) else _list(given)
    types = [_ALIASES.get(one.lower()) if isinstance(one, str) else None for one in names]
    parts = [one for one in names if isinstance(one, Mapping)]  # a union of draft 3
    if not types or None in types or parts:
        return ANY
    return Allowed(frozenset(one for one in types if one))


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()

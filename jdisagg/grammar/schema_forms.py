"""Rewrites JSON schemas so that llguidance accepts them.

llguidance refuses some keywords that have no effect, and some that can be written in another form.
Pydantic, OpenAPI and Zod generate such keywords: formats that are only annotations, `uniqueItems:
false`, `nullable`, `propertyNames`. This module removes or rewrites them. Keywords that llguidance
cannot enforce remain, and llguidance refuses them by name. The order of properties does not change,
because answers follow this order.

llguidance reads numbers as 64-bit floats. A number that it would round is refused. So is a pattern
that it cannot compile (look-around, for example), unless the caller asks to leave such patterns
out (`left_out`)."""

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal

import llguidance

from jdisagg.grammar.json_pointer import referred

Json = dict[str, object]
# Formats that llguidance enforces. Any other format is only an annotation.
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_OF_ANY_KEY = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OF_ONE = (
    *("items", "additionalItems", "additionalProperties", "contains", "propertyNames"),
    *("not", "if", "then", "else", "unevaluatedProperties", "unevaluatedItems"),
)
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas")
_NAMES_ONLY = frozenset(("type", "title", "description", "$comment"))
_EMPTY: tuple[object, ...] = (True, {})
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "example", "deprecated", "$comment")
)
_SAYS_NOTHING = frozenset(("$schema", "$id", "$defs", "definitions"))
_BOUNDS = ("minimum", "maximum", "Minimum", "Maximum", "multipleOf")
_OF_NUMBERS = ("const", "enum", *_BOUNDS, "exclusiveMinimum", "exclusiveMaximum") + tuple(
    f"{least}{what}"
    for what in ("Length", "Items", "Properties", "Contains")
    for least in ("min", "max")
)
# An escape, or a class such as [^"]; within a class, an escape, or Rust's syntax of nested classes.
_CLASS = re.compile(r"(\\.)|\[(\^?)((?:\\.|[^\]\\])+)\]")
_SPECIAL = re.compile(r"(\\.)|(\[(?!:)|&(?=&)|~(?=~))")
_LARGEST = 2**53
MOST_CHARACTERS = 512
# Values with which a keyword has no effect.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedProperties": _EMPTY,
    "unevaluatedItems": _EMPTY,
    "propertyNames": _EMPTY,
    "nullable": (False,),
}
# Keywords that have no effect without one of the keywords on the right.
_NEEDS = {
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
}


class SchemaError(ValueError):
    """A part of a schema that cannot be enforced. The message names its path."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A schema within another.

    Attributes:
        root: The outermost schema.
        left_out: Collects the paths of patterns that are left out. None means that such a pattern
            raises SchemaError.
        path: Path of the schema, with a dot at its end.
    """

    root: Mapping[str, object]
    left_out: list[str] | None
    path: str = ""

    def within(self, *names: object) -> "_Place":
        path = "".join(f"{name}." for name in names)
        return _Place(self.root, self.left_out, self.path + path)

    def pattern(self, name: str, pattern: object) -> bool:
        """Returns whether a pattern can be enforced. `name` is the path of its keyword."""
        fault = pattern_fault(_for_rust(pattern)) if isinstance(pattern, str) else ""
        if fault and self.left_out is None:
            raise SchemaError(
                f"{self.path}{name}: the pattern {pattern!r:.100} cannot be enforced: {fault};"
                " leave it out"
            )
        if fault and self.left_out is not None:
            self.left_out.append(self.path + name)
        return not fault


def read_schema(text: str) -> object:
    """Parses a JSON schema without loss of digits. Raises ValueError for invalid JSON."""
    return json.loads(text, parse_float=Decimal)


def for_llguidance(text: str) -> str:
    """Returns the text of a JSON schema in llguidance's form. Text that is not a JSON object is
    returned unchanged. Raises SchemaError if a number or a pattern cannot be enforced."""
    try:
        schema = read_schema(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(schema, dict):
        return text
    try:
        return json.dumps(schema_for_llguidance(schema), default=float)
    except RecursionError:
        return text


def schema_for_llguidance(
    schema: Mapping[str, object], left_out: list[str] | None = None, path: str = ""
) -> Json:
    """Returns a JSON schema in llguidance's form.

    Args:
        left_out: If given, patterns that cannot be enforced are left out, and their paths are
            appended here.
        path: Prefix of paths in errors and in `left_out`.

    Raises:
        SchemaError: A number or a pattern cannot be enforced, or nothing but such a pattern
            restricts the answer.
        RecursionError: The schema is nested too deeply.
    """
    made = _rewritten(schema, _Place(schema, left_out, path))
    assert isinstance(made, dict)
    if left_out and not set(made) - _SAYS_NOTHING:
        raise SchemaError(f"{left_out[0]} cannot be enforced, and nothing else limits the answer")
    return made


@functools.lru_cache(1024)
def pattern_fault(pattern: str) -> str:
    """Returns why llguidance cannot enforce a pattern, or "" if it can. A long pattern is judged
    only with its whole grammar, because this may take long."""
    if len(pattern) > MOST_CHARACTERS:
        return ""
    matcher = llguidance.LLMatcher
    written = json.dumps({"type": "string", "pattern": pattern})
    return reason_of(matcher.validate_grammar(matcher.grammar_from_json_schema(written)))


def reason_of(error: str) -> str:
    """Shortens an error of llguidance to one line. Errors about regular expressions are several
    lines, of which the first says nothing."""
    first, *rest = [line.strip() for line in error.strip().splitlines()] or [""]
    said = [line.removeprefix("error: ") for line in rest if line.startswith("error: ")]
    return " ".join((first, *said))


def _numbers(where: str, value: object) -> object:
    """Returns the value of a keyword with its numbers in their shortest form, such as 3 for 3.0.
    Raises SchemaError if llguidance would round one of them."""
    if isinstance(value, Mapping):
        return {name: _numbers(where, one) for name, one in value.items()}
    if isinstance(value, list):
        return [_numbers(where, one) for one in value]
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return value
    number = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    if not _exact(number, where.endswith(_BOUNDS)):
        raise SchemaError(
            f"{where}: the number {value!s:.80} cannot be enforced exactly, because it would be"
            " rounded to a 64-bit float; use a number with fewer digits, or a string"
        )
    return int(number) if number == int(number) else float(number)


def _exact(number: Decimal, bound: bool) -> bool:
    """Returns whether llguidance reads and writes a number without rounding it. It multiplies an
    integer below 2**53 by a power of ten, which is exact up to 10**22, and prints the 16th digit
    of smaller numbers only. With bounds it computes in floats, or in 64-bit integers."""
    near = float(number)
    shown = Decimal(repr(near)).normalize()
    zeros = shown.as_tuple().exponent
    if shown != number or not isinstance(zeros, int):
        return False
    if abs(near) <= _LARGEST and near.is_integer():
        return True
    most = _LARGEST if abs(near) < 1e12 else 10**15
    if abs(zeros) > 22 or abs(shown.scaleb(-zeros)) > most:
        return False
    return abs(near) < _LARGEST or (not bound and Decimal(near) == number)


def _rewritten(schema: object, place: _Place) -> object:
    if not isinstance(schema, Mapping):
        return schema
    made: Json = {}
    for name, value in schema.items():
        if name in _OF_NUMBERS:
            value = _numbers(place.path + name, value)
        elif name in _OF_ANY_KEY and isinstance(value, Mapping):
            value = {key: _rewritten(one, place.within(name, key)) for key, one in value.items()}
        elif name in _OF_LISTS and isinstance(value, list):
            value = [_rewritten(one, place.within(f"{name}[{at}]")) for at, one in enumerate(value)]
        elif name in _OF_ONE:
            value = _rewritten(value, place.within(name))
        if name == "pattern":
            if not place.pattern(name, value):
                continue
            value = _for_rust(value) if isinstance(value, str) else value
        if name not in _ANNOTATIONS:
            made[name] = value
    _name_patterns(made, place)
    for name in [name for name in made if _without_effect(name, made)]:
        del made[name]
    for rewrite in _REWRITES:
        rewrite(made, place.root)
    return _or_null(made) if schema is not place.root else made


def _name_patterns(schema: Json, place: _Place) -> None:
    """Leaves out those patterns of `patternProperties` that cannot be enforced. Properties of any
    name may then have their values."""
    given = schema.get("patternProperties")
    if not isinstance(given, Mapping):
        return
    left_out = [
        pattern
        for at, pattern in enumerate(given)
        if not place.pattern(f"patternProperties[{at}]", pattern)
    ]
    schema["patternProperties"] = {
        _for_rust(key): given[key] for key in given if key not in left_out
    }
    if left_out:
        also = schema.get("additionalProperties", True)
        values = [given[pattern] for pattern in left_out] + [also] * (also is not False)
        schema["additionalProperties"] = {"anyOf": values}


def _for_rust(pattern: str) -> str:
    """Returns a pattern in the syntax of llguidance's regexes, in which classes may be nested.

    Excludes U+001F from classes such as `[^"]`. llguidance lets escaped quotation marks and
    backslashes through wherever a class has all control characters."""

    def of_class(found: re.Match[str]) -> str:
        if found[1]:
            return found[1]
        inner = _SPECIAL.sub(lambda one: one[1] or f"\\{one[2]}", found[3])
        return rf"[^\x1f-\x1f{inner}]" if found[2] else f"[{inner}]"

    return _CLASS.sub(of_class, pattern)


def _without_effect(name: str, schema: Json) -> bool:
    value = schema[name]
    if name == "format":
        return isinstance(value, str) and value not in _FORMATS
    if name == "$schema":
        return not str(value).startswith(("http://json-schema.org/", "https://json-schema.org/"))
    if name in _NEEDS:
        return not any(other in schema for other in _NEEDS[name])
    return any(value is one or (value == one and value == {}) for one in _NEUTRAL.get(name, ()))


def _contained(schema: Json, root: Mapping[str, object]) -> None:
    """Removes `contains` if `minContains` is 0 and there is no `maxContains`, because `contains`
    then has no effect."""
    if schema.get("minContains") == 0 and "maxContains" not in schema:
        del schema["minContains"], schema["contains"]


def _evaluated(schema: Json, root: Mapping[str, object]) -> None:
    """Replaces `unevaluatedProperties` by `additionalProperties`, and `unevaluatedItems` by
    `items`. Does nothing if the schema combines other schemas, because the two then differ."""
    if any(name in schema for name in _COMBINING):
        return
    if "additionalProperties" not in schema and "unevaluatedProperties" in schema:
        schema["additionalProperties"] = schema.pop("unevaluatedProperties")
    if "prefixItems" in schema and "items" not in schema and "unevaluatedItems" in schema:
        schema["items"] = schema.pop("unevaluatedItems")


def _named(schema: Json, root: Mapping[str, object]) -> None:
    names = schema.get("propertyNames")
    while isinstance(names, dict) and set(names) - _NAMES_ONLY == {"$ref"}:
        names, before = referred(root, names["$ref"]), names
        if names == before:
            return
    if not isinstance(names, dict):
        return
    says, values = set(names) - _NAMES_ONLY, schema.get("additionalProperties", True)
    listed = [names["const"]] if "const" in names else names.get("enum")
    alone = not {"properties", "patternProperties"} & set(schema)
    if not says and names.get("type", "string") == "string":
        del schema["propertyNames"]
    elif alone and says in ({"enum"}, {"const"}) and isinstance(listed, list):
        del schema["propertyNames"]
        schema["properties"] = {one: values for one in listed if isinstance(one, str)}
        schema["additionalProperties"] = False
    elif alone and says == {"pattern"}:
        del schema["propertyNames"]
        schema["patternProperties"] = {str(names["pattern"]): values}
        schema["additionalProperties"] = False


_REWRITES: tuple[Callable[[Json, Mapping[str, object]], None], ...] = (
    _contained,
    _evaluated,
    _named,
)


def _or_null(schema: Json) -> Json:
    if schema.get("nullable") is not True:
        return schema
    kept = {name: value for name, value in schema.items() if name != "nullable"}
    kind = kept.get("type")
    if isinstance(kind, str) and not any(name in kept for name in ("enum", "const", *_COMBINING)):
        return {**kept, "type": [kind, "null"]}  # references to parts of the schema stay valid
    return {"anyOf": [kept, {"type": "null"}]} if kept else {}

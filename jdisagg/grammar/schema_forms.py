"""Rewrites JSON schemas so that llguidance accepts them.

llguidance refuses some keywords that have no effect, and some that can be written in another form.
Pydantic, OpenAPI and Zod generate such keywords: formats that are only annotations, `uniqueItems:
false`, `nullable`, `propertyNames`. This module removes or rewrites them. Keywords that llguidance
cannot enforce remain, and llguidance refuses them by name. The order of properties does not change,
because answers follow this order."""

import json
from collections.abc import Callable, Mapping

from jdisagg.json_pointer import referred

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


def for_llguidance(text: str) -> str:
    """Text that is not a JSON object is returned unchanged."""
    try:
        schema = json.loads(text)
        made = schema_for_llguidance(schema) if isinstance(schema, dict) else schema
        return text if made == schema else json.dumps(made, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def schema_for_llguidance(schema: Mapping[str, object]) -> Json:
    """Raises RecursionError if the schema is nested too deeply."""
    made = _rewritten(schema, schema)
    assert isinstance(made, dict)
    return made


def _rewritten(schema: object, root: Mapping[str, object]) -> object:
    if not isinstance(schema, Mapping):
        return schema
    made: Json = {}
    for name, value in schema.items():
        if name in _OF_ANY_KEY and isinstance(value, Mapping):
            value = {key: _rewritten(one, root) for key, one in value.items()}
        elif name in _OF_LISTS and isinstance(value, list):
            value = [_rewritten(one, root) for one in value]
        elif name in _OF_ONE:
            value = _rewritten(value, root)
        made[name] = value
    for name in [name for name in made if _without_effect(name, made)]:
        del made[name]
    for rewrite in _REWRITES:
        rewrite(made, root)
    return _or_null(made) if schema is not root else made


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
    return {"anyOf": [kept, {"type": "null"}]} if kept else {}

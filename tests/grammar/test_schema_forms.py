"""Schemas as Pydantic, OpenAPI and Zod write them: what limits nothing is accepted, what has
another form is enforced, and what cannot be enforced is refused."""

import json
from typing import Any

import pytest

from jdisagg.errors import InvalidRequestError
from jdisagg.grammar.schema_forms import for_llguidance
from jdisagg.grammar.structural_tags import structural_lark
from jdisagg.request import Grammar, GrammarKind
from tests.grammar.test_grammars import COMPILER, EOS, allowed, begin, ids_of
from tests.time_scale import seconds

TEXT = {"type": "string"}
AB = {"enum": ["a", "b"]}
NUMBERS = {"type": "object", "additionalProperties": {"type": "integer"}}
# (schema, a text that follows it, the beginning of a text that does not)
SCHEMAS: list[tuple[dict[str, Any], str, str]] = [
    *(
        ({"type": "string", "format": one}, '"x y"', "1")
        for one in ("phone", "password", "binary", "byte", "uri-reference", "regex", "iri")
    ),
    ({"type": "string", "format": "date"}, '"2026-01-31"', '"x'),
    ({"type": "integer", "format": "int64"}, "5", '"'),
    ({"type": "array", "items": TEXT, "uniqueItems": False}, '["x","x"]', "[1"),
    ({"type": "array", "items": {"type": "string", "format": "x"}}, '["x"]', "[1"),
    ({"type": "array", "contains": TEXT, "minContains": 0}, "[1]", "{"),
    ({"type": "array", "items": TEXT, "minContains": 1}, '["x"]', "[1"),
    (
        {"type": "object", "properties": {"format": {"type": "string", "format": "x"}}},
        '{"format":"y"}',
        "[",
    ),
    (
        {"type": "object", "properties": {"uniqueItems": {"const": False}}},
        '{"uniqueItems":false}',
        '{"uniqueItems":t',
    ),
    ({"enum": [{"format": "x", "uniqueItems": False}]}, '{"format":"x","uniqueItems":false}', "1"),
    ({**TEXT, "not": False, "if": {}, "dependentRequired": {}}, '"x"', "1"),
    ({"type": "object", "unevaluatedProperties": True}, '{"a":1}', "["),
    (
        {"type": "object", "properties": {"a": TEXT}, "unevaluatedProperties": False},
        '{"a":"x"}',
        '{"b',
    ),
    ({**NUMBERS, "propertyNames": {"type": "string"}}, '{"x":1}', '{"x":"'),
    ({**NUMBERS, "propertyNames": AB}, '{"a":1,"b":2}', '{"c'),
    ({**NUMBERS, "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": AB}}, '{"b":2}', '{"c'),
    ({**NUMBERS, "propertyNames": {"pattern": "^x+$"}}, '{"xx":1}', '{"c'),
    ({"type": "object", "properties": {"a": {**TEXT, "nullable": True}}}, '{"a":null}', '{"a":1'),
    (
        {"items": {"$ref": "#/$defs/t", "nullable": True}, "type": "array", "$defs": {"t": TEXT}},
        '[null,"x"]',
        "[1",
    ),
    ({**TEXT, "nullable": False}, '"x"', "n"),
    ({"$schema": "https://example.com/mine", **TEXT}, '"x"', "1"),
    (
        {"oneOf": [{**NUMBERS, "required": ["a"]}, {**NUMBERS, "required": ["b"]}]},
        '{"b":1}',
        '{"b":"',
    ),
]


@pytest.mark.parametrize(("schema", "good", "bad"), SCHEMAS, ids=str)
async def test_a_schema_with_words_of_other_tools_is_followed(
    schema: dict[str, Any], good: str, bad: str
) -> None:
    tag = {"format": {"type": "json_schema", "json_schema": schema}}
    for grammar in (
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)),
        Grammar(GrammarKind.LARK, structural_lark(tag)),
    ):
        await COMPILER.admit(grammar, seconds(60))
        assert set(EOS) & set(allowed(begin(grammar, ids_of(good))))
        assert not allowed(begin(grammar, ids_of(bad)))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"not": TEXT},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"type": "object", "propertyNames": {"maxLength": 3}},
        {"type": "array", "contains": TEXT},
    ],
    ids=str,
)
async def test_what_cannot_be_enforced_is_refused_by_name(schema: dict[str, Any]) -> None:
    name = next(name for name in reversed(schema))
    with pytest.raises(InvalidRequestError, match=rf'Unimplemented keys: .*"{name}"'):
        await COMPILER.admit(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), seconds(60))


def test_a_schema_in_the_right_form_stays_as_it_is() -> None:
    for text in ('{ "b":1.50,"a": {"type" : "string"} }', "[1", "true", '{"a":' * 5000):
        assert for_llguidance(text) == text
    names = list(json.loads(for_llguidance('{"z": {}, "format": "x", "a": {}, "m": {}}')))
    assert names == ["z", "a", "m"]

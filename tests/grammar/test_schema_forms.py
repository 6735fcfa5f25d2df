"""Schemas as Pydantic, OpenAPI and Zod write them: what limits nothing is accepted, what has
another form is enforced, and what cannot be enforced is refused."""

import itertools
import json
import re
from typing import Any

import pytest

from jdisagg.errors import InvalidRequestError
from jdisagg.grammar.schema_forms import SchemaError, for_llguidance, schema_for_llguidance
from jdisagg.grammar.structural_tags import structural_lark
from jdisagg.request import Grammar, GrammarKind
from tests.grammar.matching import COMPILER, ends
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
    (
        {
            "type": "object",
            "properties": {
                "a": {"type": "array", "items": AB, "nullable": True},
                "b": {"$ref": "#/properties/a/items"},
            },
        },
        '{"a":null,"b":"a"}',
        '{"b":n',
    ),
    ({**TEXT, "nullable": False}, '"x"', "n"),
    ({"$schema": "https://example.com/mine", **TEXT}, '"x"', "1"),
    (
        {"oneOf": [{**NUMBERS, "required": ["a"]}, {**NUMBERS, "required": ["b"]}]},
        '{"b":1}',
        '{"b":"',
    ),
]


async def test_a_schema_with_words_of_other_tools_is_followed() -> None:
    wrong = []
    for schema, good, bad in SCHEMAS:
        tag = {"format": {"type": "json_schema", "json_schema": schema}}
        for grammar in (
            Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)),
            Grammar(GrammarKind.LARK, structural_lark(tag)),
        ):
            await COMPILER.admit(grammar, seconds(60))
            if not ends(grammar, good) or ends(grammar, bad) is not None:
                wrong.append((schema, grammar.kind))
    assert not wrong


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
    for text in ("[1", "true", '{"a":' * 5000):
        assert for_llguidance(text) == text
    assert for_llguidance('{ "b":1.50,"a": {"const" : "c"} }') == '{"b": 1.5, "a": {"const": "c"}}'
    names = list(json.loads(for_llguidance('{"z": {}, "format": "x", "a": {}, "m": {}}')))
    assert names == ["z", "a", "m"]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ('{"enum":[9007199254740992]}', "9007199254740992", "9007199254740993"),
        ('{"const":100000000000000000000}', "100000000000000000000", "100000000000000000001"),
        ('{"const":[1.10]}', "[1.1]", "[1.2"),
        ('{"const":4079210727765130.0}', "4079210727765130", "4079210727765129"),
        ('{"const":3.141592653589793}', "3.141592653589793", "3.141592653589794"),
        ('{"type":"integer","maximum":9007199254740991}', "9007199254740991", "9007199254740992"),
        ('{"type":"number","minimum":1e-10}', "0.0000000001", "-"),
        ('{"type":"string","maxLength":2.0}', '"ab"', '"abc'),
        ('{"type":"integer","default":1e400}', "3", '"'),
    ],
)
def test_numbers_of_a_schema_are_followed_to_the_last_digit(
    schema: str, good: str, bad: str
) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, schema)
    assert ends(grammar, good) and not ends(grammar, bad)


NUMBERS_TOO_LONG = (
    *("9007199254740993", "-12345678901234567890123", "0.1234567890123456789"),
    *("1e400", "7e23"),
)
PLACES = ("const", "enum", "minimum", "exclusiveMaximum", "multipleOf", "maxLength", "const.nested")


async def test_a_number_that_would_be_rounded_is_refused_by_its_path() -> None:
    wrong = []
    for number, where in itertools.product(NUMBERS_TOO_LONG, PLACES):
        keyword = where.removesuffix(".nested")
        value = {"enum": f"[1,{number}]", "const.nested": f'{{"a":{number}}}'}.get(where, number)
        schema = f'{{"properties":{{"a":{{"items":{{"{keyword}":{value}}}}}}}}}'
        with pytest.raises(InvalidRequestError) as refused:
            await COMPILER.admit(Grammar(GrammarKind.JSON_SCHEMA, schema), seconds(60))
        if f"properties.a.items.{keyword}: the number" not in refused.value.message:
            wrong.append((number, where, refused.value.message))
    assert not wrong


LOOK_AHEAD = "^(?!a)[a-z]+$"
DEEP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {**TEXT, "pattern": LOOK_AHEAD},
        "b": {"type": "array", "items": {**TEXT, "pattern": r"(x)\1"}},
        "c": {"anyOf": [{**TEXT, "pattern": r"\bx"}, {"type": "null"}]},
        "d": {"$ref": "#/$defs/d"},
        "e": {**TEXT, "allOf": [{"pattern": "(?<=y)x"}, {"pattern": r"^\p{L}+$"}]},
        "pattern": {"const": LOOK_AHEAD},
    },
    "additionalProperties": False,
    "$defs": {"d": {"patternProperties": {"(?=x)": {"type": "integer"}}, **AB | {"enum": [{}]}}},
}
LEFT_OUT = {
    "properties.a.pattern": "look-around",
    "properties.b.items.pattern": "backreferences",
    "properties.c.anyOf[0].pattern": "lookarounds",
    "properties.e.allOf[0].pattern": "look-around",
    "$defs.d.patternProperties[0]": "look-around",
}


def test_patterns_that_cannot_be_enforced_are_left_out_and_named() -> None:
    left_out: list[str] = []
    made = schema_for_llguidance(DEEP, left_out)
    assert set(left_out) == set(LEFT_OUT)
    properties: Any = made["properties"]
    assert properties["a"] == TEXT and properties["pattern"] == {"const": LOOK_AHEAD}
    assert properties["e"]["allOf"][1] == {"pattern": r"^\p{L}+$"}


@pytest.mark.parametrize(("path", "reason"), LEFT_OUT.items())
async def test_a_pattern_that_cannot_be_enforced_is_refused_by_path_and_reason(
    path: str, reason: str
) -> None:
    name, place = path.split(".")[:2]
    schema = {"type": "object", name: {place: DEEP[name][place]}}
    with pytest.raises(InvalidRequestError) as refused:
        await COMPILER.admit(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), seconds(60))
    assert f"{path}: the pattern" in refused.value.message and reason in refused.value.message


def test_a_bracket_within_a_class_is_a_character() -> None:
    patterns = {
        r"^[^[\]]$": ["x", "a", "&", "~"],
        r"^[[x]$": ["[", "x"],
        r"^[\[&&x]$": ["[", "x", "&"],
        r"^[a[~~x]\]$": ["x]", "[]", "~]", "a]"],
        r"^[[:alpha:]]$": ["x", "a"],
    }
    found: dict[str, list[str]] = {}
    for pattern in patterns:
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**TEXT, "pattern": pattern}))
        values = ("[", "]", "x", "a", "&", "~", "x]", "[]", "~]", "a]")
        found[pattern] = [value for value in values if ends(grammar, json.dumps(value))]
    assert found == patterns


def test_a_class_without_quotes_and_backslashes_lets_none_through() -> None:
    wrong = []
    for pattern in (r"^[^\"\\]*$", r"[^\"]$", r'^[^-"]$', r"^[^\n\"\\x]+$", r"^\[[^\s:,\\]*\]$"):
        text = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**TEXT, "pattern": pattern}))
        named = {
            "type": "object",
            "patternProperties": {pattern: {}},
            "additionalProperties": False,
        }
        name = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(named))
        for value in ('"', "\\", "-", "a", "\t", "é", 'a"', "a\\", '[a"]', "[a\\]", "[é]"):
            fits, given = (
                re.search(pattern, value) is not None,
                json.dumps(value, ensure_ascii=False),
            )
            if (bool(ends(text, given)), bool(ends(name, f"{{{given}:1}}"))) != (fits, fits):
                wrong.append((pattern, value))
    assert not wrong


def test_names_with_a_pattern_that_is_left_out_may_have_its_values() -> None:
    schema = {"patternProperties": {"(?=x)": TEXT, "^y": {}}, "additionalProperties": False}
    made = schema_for_llguidance(schema, [])
    assert made == {"patternProperties": {"^y": {}}, "additionalProperties": {"anyOf": [TEXT]}}


def test_a_pattern_that_alone_limits_the_answer_is_not_left_out() -> None:
    with pytest.raises(SchemaError, match=r"^pattern cannot be enforced, and nothing else"):
        schema_for_llguidance({"pattern": LOOK_AHEAD, "title": "x"}, [])

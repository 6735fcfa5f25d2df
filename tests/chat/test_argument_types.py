"""Arguments that a model writes as text get a type that the whole schema allows."""

import json

import pytest

from jdisagg.chat.argument_types import allowed_of, as_json
from jdisagg.chat.formats import TOOL_PARSERS
from tests.chat.transcripts import WRITERS, read

DEFS = {
    "count": {"type": "integer"},
    "again": {"$ref": "#/$defs/count"},
    "loop": {"$ref": "#/$defs/loop"},
    "a/b~c d": {"type": "boolean"},
    "person": {"type": "object", "properties": {"age": {"type": "integer"}}},
}
OPTIONAL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}

# (schema of the argument, its text, its value)
TYPED = [
    # unions, however they are written
    ({"type": ["integer", "null"]}, "None", None),
    ({"type": ["integer", "string"]}, "5", 5),
    ({"type": ["integer", "string"]}, "five", "five"),
    (OPTIONAL, "null", None),
    (OPTIONAL, "None", None),
    (OPTIONAL, "7", 7),
    ({"oneOf": [{"type": "object"}, {"type": "array"}]}, "{'a': 1}", {"a": 1}),
    ({"anyOf": [OPTIONAL, {"type": "boolean"}]}, "True", True),
    ({"anyOf": [{"type": ["string", "null"]}, {"type": "number"}]}, "1.5", 1.5),
    ({"type": "integer", "nullable": True}, "None", None),
    ({"type": "string", "nullable": True}, "null", None),
    ({"type": "string", "nullable": True}, "5", "5"),
    ({"$ref": "#/$defs/count", "nullable": True}, "null", None),
    # all at once
    ({"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]}, "5", 5),
    ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "5", "5"),
    ({"allOf": [{"$ref": "#/$defs/count"}], "description": "x"}, "5.0", 5),
    ({"allOf": [{"type": "number"}, {"type": "integer"}]}, "5.0", 5),
    # integers of more digits than a float has
    ({"type": "integer"}, "12345678901234567890.0", 12345678901234567890),
    ({"type": "integer"}, "1e23", 10**23),
    ({"type": "integer"}, '"+9007199254740993"', 9007199254740993),
    # constants
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": ["1", "2"]}, " 1 ", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"enum": ["auto", 1, None]}, "auto", "auto"),
    ({"enum": ["auto", 1, None]}, "1", 1),
    ({"enum": ["auto", 1, None]}, "None", None),
    ({"enum": ["true", "false"]}, "true", "true"),
    ({"const": 3}, "3", 3),
    ({"const": "3"}, "3", "3"),
    ({"type": "string", "enum": ["null"]}, "null", "null"),
    ({"anyOf": [{"const": "all"}, {"type": "integer"}]}, "all", "all"),
    ({"anyOf": [{"const": "all"}, {"type": "integer"}]}, "4", 4),
    # references
    ({"$ref": "#/$defs/count"}, "5.0", 5),
    ({"$ref": "#/$defs/again"}, "4.0", 4),
    ({"$ref": "#/$defs/a~1b~0c%20d"}, "True", True),
    ({"$ref": "#/$defs/person"}, "{'age': None}", {"age": None}),
    ({"$ref": "#/$defs/loop"}, "5", 5),
    ({"$ref": "#/$defs/nothing"}, "5", 5),
    ({"$ref": "http://example.com/x"}, "words", "words"),
    # Python's words and forms
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "FALSE", False),
    (
        {"type": "object"},
        "{'a': True, \"b\": None, 'c': [1, 'x'], 2: -3.5}",
        {"a": True, "b": None, "c": [1, "x"], "2": -3.5},
    ),
    ({"type": "object"}, '{"a": True, "b": null}', {"a": True, "b": None}),
    ({"type": "array"}, "('a', 1)", ["a", 1]),
    ({"type": "array"}, "[]", []),
    ({"type": "array", "items": {"type": "string"}}, "['it\\'s', \"x\"]", ["it's", "x"]),
    ({"type": "object"}, "{'f': open('x')}", "{'f': open('x')}"),
    ({"type": "object"}, "{'a': 1e999}", "{'a': 1e999}"),
    ({"type": "object"}, "{'a': '\\ud800'}", "{'a': '\\ud800'}"),
    # JSON with line breaks and tabs that are not escaped
    ({"type": "object"}, '{"a": "x\n\ty"}', {"a": "x\n\ty"}),
    ({"type": ["array", "null"]}, '["x\ny"]', ["x\ny"]),
    ({}, '{"a": "x\ny"}', {"a": "x\ny"}),
    ({"type": "array"}, '{"a": "x\ny"}', '{"a": "x\ny"}'),
    ({"type": "string"}, '{"a": "x\ny"}', '{"a": "x\ny"}'),
    # numbers
    ({"type": "integer"}, "3.0", 3),
    ({"type": "integer"}, "1e3", 1000),
    ({"type": "integer"}, "+5", 5),
    ({"type": "integer"}, "1_000", 1000),
    ({"type": "integer"}, "007", 7),
    ({"type": "number"}, "-012", -12),
    ({"type": "number"}, "1,000", "1,000"),
    ({"type": ["string", "integer"]}, "007", "007"),
    ({"type": "array"}, "1, 2", [1, 2]),
    ({}, "1,000", "1,000"),
    ({"type": "integer"}, '"5"', 5),
    ({"type": "integer"}, "3.5", 3.5),
    ({"type": "number"}, "3", 3),
    ({"type": "number"}, ".5", 0.5),
    ({"type": "number"}, "many", "many"),
    ({"type": ["number", "null"]}, '"1.5"', 1.5),
    ({"type": "object"}, '"{\\"a\\": 1}"', {"a": 1}),
    # no type
    ({}, "5", 5),
    ({}, "True", True),
    ({}, "{'a': 1}", {"a": 1}),
    ({}, "it's", "it's"),
    ({}, ".5", ".5"),
    (True, "x", "x"),
    ({"properties": {"a": {}}}, "{'a': 1}", {"a": 1}),
    ({"items": {}}, "(1,)", [1]),
    ({"minLength": 2}, "12", "12"),
    ({"maximum": 2}, "1.0", 1.0),
    # others' names of types
    ({"type": "STRING"}, "5", "5"),
    ({"type": "int"}, "5.0", 5),
    ({"type": "bool"}, "True", True),
    ({"type": "dict"}, "{'a': 1}", {"a": 1}),
    ({"type": "float"}, "5", 5),
    ({"type": "thing"}, "5", 5),
]


def test_a_text_is_a_value_of_the_schema() -> None:
    wrong = []
    for schema, text, value in TYPED:
        parameters = {"type": "object", "properties": {"x": schema}, "$defs": DEFS}
        made = json.loads(as_json(text, allowed_of(parameters, "x")))
        if made != value or type(made) is not type(value):
            wrong.append((schema, text, made))
    assert not wrong


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder", "seed_oss", "minimax_m2"])
def test_every_parser_of_tags_types_alike(name: str) -> None:
    wrong = []
    for schema, text, value in TYPED[::5]:
        tools = {"run": {"type": "object", "properties": {"x": schema}, "$defs": DEFS}}
        written = WRITERS[name][0]([("run", {"x": text})])
        for pieces in ([written], written):
            made = read(TOOL_PARSERS[name](tools), pieces).parsed()
            if made != [("run", {"x": value})]:
                wrong.append((schema, text, made))
    assert not wrong


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/args", "$defs": {"args": {"properties": {"x": {"type": "integer"}}}}},
        {"allOf": [{"properties": {"y": {}}}, {"properties": {"x": {"type": "integer"}}}]},
        {"anyOf": [{"properties": {"x": {"type": "integer"}}}, {"properties": {"y": {}}}]},
        {"properties": {}, "additionalProperties": {"type": "integer"}},
    ],
)
def test_an_argument_is_found_wherever_the_schema_says_it(parameters: dict[str, object]) -> None:
    assert as_json("5.0", allowed_of(parameters, "x")) == "5"


def test_a_schema_that_refers_to_itself_costs_little() -> None:
    twice = {"anyOf": [{"$ref": "#/$defs/t"}, {"$ref": "#/$defs/t"}]}
    parameters = {"properties": {"x": twice}, "$defs": {"t": twice}}
    assert as_json("5", allowed_of(parameters, "x")) == "5"
    whole = {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}
    assert as_json("x", allowed_of(whole, "x")) == '"x"'

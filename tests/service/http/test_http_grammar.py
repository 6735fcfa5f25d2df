"""What OpenAI's and vLLM's fields say of an answer's form reaches the path as what gRPC's `grammar`
says."""

import json
from typing import Any

import pytest

from jdisagg.client import AsyncClient
from jdisagg.grammar.json_blanks import without
from jdisagg.grammar.structural_tags import structural_lark
from jdisagg.request import Grammar, GrammarKind
from tests.service.chats import TEMPLATE
from tests.service.http_doors import (
    CHATS,
    COMPLETIONS,
    HI,
    MESSAGES,
    RESPONSES,
    USUAL,
    HttpDoor,
    http_door,
)

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "é"}}}
WRITTEN = json.dumps(SCHEMA)  # as `HttpDoor.ask` writes it
AS_SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, WRITTEN)
AS_OBJECT = Grammar(GrammarKind.JSON_OBJECT)
AS_REGEX = Grammar(GrammarKind.REGEX, "a+")
AS_CHOICE = Grammar.of_choices(("yes", "nö"))
AS_LARK = Grammar(GrammarKind.LARK, 'start: "a" | "b"')
NAMED = {"name": "part", "description": "a part", "schema": SCHEMA, "strict": True}

CASES: list[tuple[str, dict[str, Any], Grammar]] = [
    (CHATS, {"response_format": {"type": "json_object"}}, AS_OBJECT),
    (CHATS, {"response_format": {"type": "json_object", "schema": SCHEMA}}, AS_SCHEMA),
    (CHATS, {"response_format": {"type": "json_schema", "schema": SCHEMA}}, AS_SCHEMA),
    (CHATS, {"response_format": {"type": "json_schema", "json_schema": NAMED}}, AS_SCHEMA),
    (COMPLETIONS, {"response_format": {"type": "json_schema", "json_schema": NAMED}}, AS_SCHEMA),
    (RESPONSES, {"text": {"format": {"type": "json_schema", **NAMED}}}, AS_SCHEMA),
    (RESPONSES, {"text": {"format": {"type": "json_object"}, "verbosity": "low"}}, AS_OBJECT),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", **NAMED}}}, AS_SCHEMA),
    (MESSAGES, {"output_format": {"type": "json_schema", **NAMED}}, AS_SCHEMA),
    (CHATS, {"structured_outputs": {"json": SCHEMA}}, AS_SCHEMA),
    (COMPLETIONS, {"structured_outputs": {"json": WRITTEN}}, AS_SCHEMA),
    (CHATS, {"structured_outputs": {"json_object": True}}, AS_OBJECT),
    (CHATS, {"structured_outputs": {"regex": "a+"}}, AS_REGEX),
    (CHATS, {"structured_outputs": {"choice": ["yes", "nö"], "regex": None}}, AS_CHOICE),
    (COMPLETIONS, {"structured_outputs": {"grammar": 'start: "a" | "b"'}}, AS_LARK),
    (CHATS, {"guided_json": SCHEMA}, AS_SCHEMA),
    (COMPLETIONS, {"guided_regex": "a+"}, AS_REGEX),
    (CHATS, {"guided_choice": ["yes", "nö"]}, AS_CHOICE),
    (CHATS, {"guided_grammar": 'start: "a" | "b"'}, AS_LARK),
]

STRUCTURES = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
NEW_TAG = {"format": {"type": "const_string", "value": "a"}}
AS_TAG = Grammar(GrammarKind.LARK, structural_lark(STRUCTURES))
CASES += [
    (CHATS, {"response_format": {"type": "structural_tag", **STRUCTURES}}, AS_TAG),
    (RESPONSES, {"text": {"format": {"type": "structural_tag", **STRUCTURES}}}, AS_TAG),
    (COMPLETIONS, {"structured_outputs": {"structural_tag": json.dumps(STRUCTURES)}}, AS_TAG),
    (
        COMPLETIONS,
        {"structured_outputs": {"structural_tag": NEW_TAG}},
        Grammar(GrammarKind.LARK, structural_lark(NEW_TAG)),
    ),
    (
        CHATS,
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        Grammar(GrammarKind.JSON_SCHEMA, without(WRITTEN)),
    ),
]


async def test_what_one_door_takes_for_a_grammar_the_other_does_too() -> None:
    async with http_door() as door, AsyncClient(door.target) as client:
        for path, fields, grammar in CASES:
            seeded = {"seed": 3, "ignore_eos": True}
            answer = await door.served(path, USUAL[path] | fields | seeded)
            assert "jdisagg-ignored-fields" not in answer.headers
            prompt: dict[str, Any] = {"prompt": "hi"} if path == COMPLETIONS else {"messages": HI}
            await client.complete(**prompt, max_tokens=2, grammar=grammar, **seeded)
            http, grpc = door.path.requests[-2:]
            assert http.sampling.grammar == grammar
            assert (http.sampling, http.stop_ids) == (grpc.sampling, grpc.stop_ids)
            assert http.stop_ids, "an answer of a form has an end"


async def test_who_asks_for_no_form_gets_any_text(door: HttpDoor) -> None:
    nothing = {"json": None, "disable_any_whitespace": False}
    for fields in ({}, {"structured_outputs": {}}, {"structured_outputs": nothing}):
        answer = await door.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 1, **fields})
        assert answer.status == 200 and door.path.requests[-1].sampling.grammar is None


LOOK_AHEAD: Any = {"type": "string", "pattern": "^(?!a)[a-z]+$"}
MINE: Any = {"type": "object", "properties": {"a": LOOK_AHEAD, "b": {"type": "integer"}}}
WITHOUT: Any = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
IGNORED = "jdisagg-ignored-fields"


def _restricted(strict: bool) -> list[tuple[str, str, dict[str, Any]]]:
    form = {"name": "x", "schema": MINE, "strict": strict}
    return [
        (CHATS, "response_format", {"type": "json_schema", "json_schema": form}),
        (COMPLETIONS, "response_format", {"type": "json_schema", "json_schema": form}),
        (RESPONSES, "text", {"format": {"type": "json_schema", **form}}),
    ]


async def test_a_pattern_that_cannot_be_enforced_is_left_out_and_named_in_a_header(
    door: HttpDoor,
) -> None:
    form = {"format": {"type": "json_schema", "schema": MINE}}
    others = [(CHATS, "structured_outputs", {"json": MINE}), (CHATS, "guided_json", MINE)]
    for path, name, value in [
        *_restricted(False),
        *others,
        ("/v1/messages", "output_config", form),
    ]:
        answer = await door.served(path, {**USUAL[path], name: value})
        assert answer.headers[IGNORED].endswith(".properties.a.pattern"), (path, name)
        grammar = door.path.requests[-1].sampling.grammar
        assert grammar is not None and json.loads(grammar.text) == WITHOUT
    for path, name, value in _restricted(True):
        answer = await door.ask(path, {**USUAL[path], name: value})
        assert (answer.status, answer.error["param"]) == (400, name)
        assert "properties.a.pattern: " in answer.error["message"]
        assert "look-around" in answer.error["message"]


@pytest.mark.parametrize("strict", [False, True])
async def test_the_same_holds_for_the_arguments_of_a_forced_call(strict: bool) -> None:
    function = {"name": "f", "parameters": MINE, "strict": strict}
    tools = {CHATS: {"type": "function", "function": function}, RESPONSES: function}
    tools["/v1/messages"] = {"name": "f", "input_schema": MINE, "strict": strict}
    async with http_door(template=TEMPLATE) as door:
        for path, tool in tools.items():
            choice: Any = "required" if path != "/v1/messages" else {"type": "any"}
            asked = {**USUAL[path], "tools": [tool], "tool_choice": choice}
            answer = await door.ask(path, asked)
            assert answer.status == (400 if strict else 200), answer.body
            if strict:
                assert "tools.f.properties.a.pattern: " in answer.error["message"]
                continue
            assert answer.headers[IGNORED] == "tools.f.properties.a.pattern"
            request = door.path.requests[-1]
            assert request.sampling.grammar and "(?!a)" not in request.sampling.grammar.text
            assert b"(?!a)" in bytes(request.prompt_token_ids), "the model is shown all of it"


async def test_a_number_of_a_tool_that_a_float_cannot_hold_is_refused() -> None:
    tool = {"name": "f", "parameters": {"properties": {"a": {"const": 2**53 + 1}}}}
    asked = {**USUAL[CHATS], "tools": [tool], "tool_choice": "required"}
    async with http_door(template=TEMPLATE) as door:
        answer = await door.ask(CHATS, asked)
        assert answer.status == 400
        assert "tools.f.properties.a.const: the number 9007199254740993" in answer.error["message"]
        await door.served(CHATS, asked | {"tool_choice": "auto"})
        shown = bytes(door.path.requests[-1].prompt_token_ids)
        assert b"9007199254740993" in shown

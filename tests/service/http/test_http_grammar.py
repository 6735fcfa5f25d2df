"""What OpenAI's and vLLM's fields say of an answer's form reaches the path as what gRPC's `grammar`
says."""

import json
from typing import Any

import openai
import pytest

from jdisagg.client import AsyncClient
from jdisagg.grammar.json_blanks import without
from jdisagg.grammar.structural_tags import structural_lark
from jdisagg.request import Grammar, GrammarKind
from tests.service.http_doors import http_door

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
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
    (CHATS, {"response_format": {"type": "json_schema", "json_schema": NAMED}}, AS_SCHEMA),
    (COMPLETIONS, {"response_format": {"type": "json_schema", "json_schema": NAMED}}, AS_SCHEMA),
    (RESPONSES, {"text": {"format": {"type": "json_schema", **NAMED}}}, AS_SCHEMA),
    (RESPONSES, {"text": {"format": {"type": "json_object"}, "verbosity": "low"}}, AS_OBJECT),
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
            usual: dict[str, Any] = {
                COMPLETIONS: {"prompt": "x", "max_tokens": 2},
                CHATS: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
                RESPONSES: {"input": "x", "max_output_tokens": 2},
            }[path]
            seeded = {"seed": 3, "ignore_eos": True}
            answer = await door.ask(path, usual | fields | seeded)
            assert answer.status == 200, answer.body
            assert "jdisagg-ignored-fields" not in answer.headers
            prompt: dict[str, Any] = (
                {"prompt": "x"}
                if path == COMPLETIONS
                else {"messages": [{"role": "user", "content": "x"}]}
            )
            await client.complete(**prompt, max_tokens=2, grammar=grammar, **seeded)
            http, grpc = door.path.requests[-2:]
            assert http.sampling.grammar == grammar
            assert (http.sampling, http.stop_ids) == (grpc.sampling, grpc.stop_ids)
            assert http.stop_ids, "an answer of a form has an end"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "disable_any_whitespace": False}},
        {"guided_json": None},
    ],
)
async def test_who_asks_for_no_form_gets_any_text(fields: dict[str, Any]) -> None:
    async with http_door() as door:
        answer = await door.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 1, **fields})
        assert answer.status == 200
        assert door.path.requests[-1].sampling.grammar is None


async def test_openais_client_asks_for_a_schema_as_it_does_elsewhere() -> None:
    async with http_door() as door, door.client() as client:
        with pytest.raises(openai.LengthFinishReasonError):
            await client.chat.completions.parse(
                model="tiny",
                messages=[{"role": "user", "content": "x"}],
                max_tokens=1,
                response_format={"type": "json_schema", "json_schema": NAMED},  # type: ignore[arg-type]
            )
        grammar = door.path.requests[-1].sampling.grammar
        assert grammar is not None and json.loads(grammar.text) == SCHEMA

"""Where a call is required, all that a grammar lets through is calls, each by its tool's schema."""

import json

import jsonschema
import pytest

from jdisagg.chat.forced_calls import ForcedParser, forced_calls
from jdisagg.chat.messages import ChatMessage, ChatPrompt, ChatTool, ToolChoice, check_chat
from jdisagg.errors import InvalidRequestError
from jdisagg.request import Grammar
from tests.chat.transcripts import read
from tests.grammar.matching import allowed, begin, ends, ids_of, text, walk

WEATHER = {
    "type": "object",
    "properties": {"days": {"$ref": "#/$defs/days"}, "metric": {"type": "boolean"}},
    "required": ["days", "metric"],
    "additionalProperties": False,
    "$defs": {"days": {"enum": [1, 2, 7]}},
}
TOOLS = (ChatTool("weather", "", WEATHER), ChatTool("f-2.x"))


def required(**options: object) -> ChatPrompt:
    prompt = ChatPrompt(
        (ChatMessage("user", "hi"),), tools=TOOLS, tool_choice=ToolChoice.REQUIRED, **options
    )
    check_chat(prompt)
    return prompt


def grammar_of(prompt: ChatPrompt) -> Grammar:
    grammar = forced_calls(prompt)
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("name", ["", "weather"])
def test_what_the_grammar_lets_through_is_calls_of_the_tools_by_their_schemas(name: str) -> None:
    grammar = grammar_of(required(tool_name=name))
    ended = 0
    for seed in range(8):
        ids, end = walk(grammar, seed)
        ended += end
        answer = read(ForcedParser(), text(ids))
        assert not answer.content
        for called, arguments in answer.calls if end else ():
            assert called == name or (not name and called in ("weather", "f-2.x"))
            schema = WEATHER if called == "weather" else {"type": "object"}
            jsonschema.validate(json.loads(arguments), schema)
        assert not end or answer.calls
    assert ended, "nothing to judge"


def test_a_named_call_and_one_without_company_are_made_once() -> None:
    one = '{"name": "weather", "arguments": {"days": 7, "metric": true}}'
    several = f"[{one}, {one}]"
    assert ends(grammar_of(required()), f"[{one}]")
    assert ends(grammar_of(required()), several)
    assert not ends(grammar_of(required()), "[]")
    for once in (required(tool_name="weather"), required(parallel_tool_calls=False)):
        assert ends(grammar_of(once), f"[{one}]")
        assert not ends(grammar_of(once), several)
    assert read(ForcedParser(), several).parsed() == [("weather", {"days": 7, "metric": True})] * 2


def sized(size: str, **more: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {"size": {"$ref": "#/definitions/size"}, "in": {"$ref": "#"}},
        "required": ["size"],
        "additionalProperties": False,
        "definitions": {"size": {"enum": [size]}},
    } | more


ANCHORED: dict[str, object] = {
    "properties": {"size": {"$ref": "#here"}},
    "$defs": {"size": {"$anchor": "here", "enum": ["a"]}},
}
NESTED = sized("a", properties={"size": {"$ref": "/size"}}, definitions={})
NESTED["$defs"] = {
    "size": {"$id": "/size", "$ref": "#/$defs/one", "$defs": {"one": {"enum": ["a"]}}}
}


@pytest.mark.parametrize(
    "schema",
    [
        sized("a", **{"$id": "https://x.example/t"}),
        sized("a", **{"$id": "/t#"}),
        sized(
            "a", id="http://x.example/t#", **{"$schema": "http://json-schema.org/draft-04/schema#"}
        ),
        sized("a", properties={"size": {"$ref": "/t#/definitions/size"}}, **{"$id": "/t"}),
        sized("a", **ANCHORED),
        NESTED,
    ],
)
def test_a_schema_with_ids_and_anchors_is_followed_beside_one_of_the_same_id(
    schema: dict[str, object],
) -> None:
    other = sized("b", **{name: schema[name] for name in ("$id", "id") if name in schema})
    tools = (ChatTool("f", "", schema), ChatTool("g", "", other))
    prompt = ChatPrompt((ChatMessage("user", "hi"),), tools=tools, tool_choice=ToolChoice.REQUIRED)
    for name, size, right in (
        ("f", "a", True),
        ("g", "b", True),
        ("f", "b", None),
        ("g", "a", None),
    ):
        written = f'[{{"name": "{name}", "arguments": {{"size": "{size}"}}}}]'
        assert ends(grammar_of(prompt), written) is right


def test_blanks_do_not_fill_an_answer() -> None:
    grammar = grammar_of(required(tool_name="weather"))
    spaced = '[ { "name" : "weather" , "arguments" : { "days" : 7 , "metric" : true } } ]'
    for written in (spaced, spaced.replace(" ", "")):
        assert ends(grammar, written)
    (blank,), (line,) = ids_of(" "), ids_of("\n")
    for at in (at for at, character in enumerate(spaced) if character == " "):
        assert not {blank, line} & set(allowed(begin(grammar, ids_of(spaced[: at + 1])))), at


def test_a_call_is_given_out_as_it_is_written_and_cut_off_where_it_is() -> None:
    written = '[{"name": "weather", "arguments": {"days": 7'
    for at in range(len(written)):
        answer = read(ForcedParser(), [written[:at], written[at:]])
        assert answer.calls == [["weather", '{"days": 7']] and not answer.content
    assert read(ForcedParser(), '[{"na').calls == []


def test_no_grammar_where_no_call_is_required_and_no_call_of_what_there_is_not() -> None:
    for choice in (ToolChoice.AUTO, ToolChoice.NONE):
        prompt = ChatPrompt((ChatMessage("user", "hi"),), tools=TOOLS, tool_choice=choice)
        assert forced_calls(prompt) is None
    with pytest.raises(InvalidRequestError, match="'g', which is not one of the tools"):
        required(tool_name="g")

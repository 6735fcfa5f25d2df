"""Tools as agents send them to /v1/responses: in namespaces, with any text as input, beside hosted
ones; and answers of a form that may be calls as well."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from jdisagg.grammar.chat_answers import may_think_or_call
from tests.service.chats import (
    CALLS,
    CHAT,
    FLAT,
    ROUND,
    SCHEMA,
    TEMPLATE,
    WEATHER,
    Script,
    prompts,
    responses,
    say,
    streamed,
    whole,
)
from tests.service.doors import MODEL
from tests.service.http_doors import HttpDoor, http_door


@pytest.fixture
async def door() -> AsyncIterator[HttpDoor]:
    async with http_door(Script(), template=TEMPLATE) as one:
        one.frontend.model = replace(MODEL, context_tokens=2048)  # for the lists of tools
        yield one


MAPS: Any = {
    "type": "namespace",
    "name": "mcp__maps",
    "description": "maps",
    "tools": [{"type": "function", "name": "find", "parameters": SCHEMA}],
}
PATCH: Any = {
    "type": "custom",
    "name": "patch",
    "description": "edits",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
OWN_ROUND: Any = [
    {"role": "developer", "content": "Now."},
    ROUND[0],
    {
        "type": "function_call",
        "call_id": "c1",
        "namespace": "mcp__maps",
        "name": "find",
        "arguments": '{"city": "Rom"}',
    },
    {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": 'a\n"b"'},
    {"type": "function_call_output", "call_id": "c1", "output": "here"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
]


@pytest.mark.parametrize("characters", [3, 1000])
async def test_a_response_calls_tools_by_the_names_that_were_sent(
    door: HttpDoor, client: openai.AsyncOpenAI, characters: int
) -> None:
    text = (
        '<tool_call>{"name": "mcp__maps__find", "arguments": {"city": "Rom"}}</tool_call>'
        '<tool_call>{"name": "patch", "arguments": {"input": "a\\n\\"b\\""}}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    )
    say(door, text, characters)
    asked: dict[str, Any] = {"model": "tiny", "input": "hi", "tools": [MAPS, PATCH, FLAT]}
    reply, events = await responses(client, **asked)
    for output in (reply.output, events[-1].response.output):
        found, patched, weather = (item.to_dict() for item in output)
        assert (found["type"], found["namespace"], found["name"]) == (
            *("function_call", "mcp__maps", "find"),
        )
        assert found["arguments"] == '{"city": "Rom"}'
        assert (patched["type"], patched["name"]) == ("custom_tool_call", "patch")
        assert patched["input"] == 'a\n"b"' and "namespace" not in patched
        assert (weather["type"], weather["name"]) == ("function_call", "weather")
    inputs = [event for event in events if "custom_tool_call_input" in event.type]
    assert [getattr(event, "delta", None) or event.input for event in inputs] == ['a\n"b"'] * 2


async def test_the_model_is_shown_tools_by_joined_names(door: HttpDoor) -> None:
    say(door, "ok")
    tools = [MAPS, {"type": "web_search"}, PATCH, {"type": "image_generation"}]
    asked = {"input": OWN_ROUND, "instructions": "Be brief.", "tools": tools}
    answer = await door.served("/v1/responses", asked)
    ignored = answer.headers["jdisagg-ignored-fields"]
    assert ignored == "tools.web_search, tools.image_generation"
    shown, _, said = prompts(door)[0].partition("<system>")
    maps, patch = (json.loads(one)["function"] for one in shown[1:-1].split("]["))
    assert (maps["name"], maps["parameters"]) == ("mcp__maps__find", SCHEMA)
    assert patch["name"] == "patch" and patch["parameters"]["required"] == ["input"]
    assert patch["description"].startswith("edits\n\n") and "start: /.+/" in patch["description"]
    assert said == (
        "Be brief.\n\nNow.<user>hi<assistant><tool_call>mcp__maps__find Rom c1</tool_call>"
        "<tool_call>patch  c2</tool_call><tool>here(c1)<tool>done(c2)<assistant>"
    )


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "function", "namespace": "mcp__maps", "name": "find"}, "mcp__maps__find"),
        ({"type": "custom", "name": "patch"}, "patch"),
    ],
    ids=str,
)
async def test_a_response_may_be_made_to_call_every_kind_of_tool(
    door: HttpDoor, choice: Any, name: str
) -> None:
    asked = {"input": "hi", "tools": [MAPS, PATCH, FLAT], "tool_choice": choice}
    await door.served("/v1/responses", asked)
    grammar = door.path.requests[0].sampling.grammar
    assert grammar is not None and f'"const": "{name}"' in grammar.text


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
async def test_an_answer_of_a_form_may_be_a_call_and_follow_a_thought(
    door: HttpDoor, client: openai.AsyncOpenAI, kind: str
) -> None:
    asked: dict[str, Any] = {"tools": [WEATHER], "response_format": {"type": kind}}
    asked["response_format"]["json_schema"] = {"name": "x", "schema": SCHEMA}
    for text, content, calls in (
        ("<think>hm</think>\n\n" + CALLS, "", 2),
        ('<think>hm</think>\n\n{"city": "Rom"}', '{"city": "Rom"}', 0),
    ):
        say(door, text)
        for (said,) in (await whole(client, **asked), await streamed(client, **asked)):
            assert (said.content, said.reasoning, len(said.calls)) == (content, "hm", calls)
    say(door, CALLS)
    ((said,),) = [await whole(client, **asked, tool_choice="none")]
    assert (said.content, said.calls) == (CALLS, [])
    grammars = [request.sampling.grammar for request in door.path.requests]
    assert all(may_think_or_call(one) for one in grammars) and len({*grammars}) == 2
    assert all("<tool_call>" in (one.text if one else "") for one in grammars[:-1])


async def test_a_reply_says_that_no_parser_knows_the_calls_of_the_model() -> None:
    for template, noted in ((TEMPLATE.replace("tool_call>", "call>"), True), (TEMPLATE, False)):
        async with http_door(Script(text="<call>weather</call>"), template=template) as door:
            for path in ("/v1/chat/completions", "/v1/chat/completions/render"):
                answer = await door.ask(path, {"messages": CHAT, "tools": [WEATHER]})
                assert answer.status == 200
                header = answer.headers.get("jdisagg-ignored-fields")
                assert header == ("tools.no_parser" if noted else None)
            answer = await door.ask("/v1/chat/completions", {"messages": CHAT})
            assert "jdisagg-ignored-fields" not in answer.headers

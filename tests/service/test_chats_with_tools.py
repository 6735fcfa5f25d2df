"""Chats with tools and reasoning at both doors: what the model is shown, and its answers taken
apart, whole and streamed, as OpenAI's own client and ours read them."""

import asyncio
import contextlib
import json
import re
from typing import Any

import openai
import pytest

from jdisagg.chat.messages import ChatPrompt
from jdisagg.client import AsyncClient, ChatMessage, ChatTool
from jdisagg.request import (
    AcceptedChild,
    FinishReason,
    Grammar,
    GrammarKind,
    Request,
    Resumption,
    SamplingParams,
    StreamEvent,
)
from tests.service.chats import (
    CALLS,
    CHAT,
    FLAT,
    ROUND,
    SCHEMA,
    TEMPLATE,
    THOUGHT,
    WEATHER,
    Said,
    Script,
    over_grpc,
    prompts,
    responses,
    say,
    script_door,
    streamed,
    whole,
)
from tests.service.doors import make_frontend
from tests.service.http_doors import CHATS, HttpDoor, http_door, taken

opens = script_door
TOOLS = (ChatTool("weather", "of a city", SCHEMA),)


@pytest.mark.parametrize(("characters", "cut"), [(1, False), (3, True), (1000, False)])
async def test_calls_and_reasoning_are_told_from_words_at_both_doors(
    door: HttpDoor, client: openai.AsyncOpenAI, characters: int, cut: bool
) -> None:
    say(door, THOUGHT, characters, cut)
    asked: dict[str, Any] = {"tools": [WEATHER], "n": 2}
    own = {"extra_body": {"request_id": "same"}}
    http = await whole(client, **asked, **own)
    assert http == await streamed(client, **asked, **own)
    called = [("weather", '{"city": "Köln"}'), ("weather", "{}")]
    for one in (*http, *await over_grpc(door, **asked, request_id="same")):
        assert (one.content, one.reasoning) == ("Let me see.", "hmm")
        assert [call[1:] for call in one.calls] == called
        assert one.end == ("length" if cut else "tool_calls")
    ids = [call[0] for one in http for call in one.calls]
    assert len(set(ids)) == 4 and all(one.startswith("call_") for one in ids)
    assert not any(request.sampling.skip_special_tokens for request in door.path.requests)


async def test_usage_says_how_many_tokens_were_reasoning(door: HttpDoor) -> None:
    say(door, "<think>hm</think>yes", 1)
    usage = (await door.ask(CHATS, {"messages": CHAT})).fields["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 17}
    response = (await door.ask("/v1/responses", {"input": "hi"})).fields
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 17}


async def test_an_answer_of_calls_alone_has_no_content(door: HttpDoor) -> None:
    say(door, CALLS)
    asked = {"messages": CHAT, "tools": [WEATHER], "parallel_tool_calls": False}
    message = (await door.ask(CHATS, asked)).fields["choices"][0]["message"]
    assert message["content"] is None and "reasoning_content" not in message
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]


@pytest.mark.parametrize(
    ("words", "cut", "characters"), [("Let me see.\n", False, 3), ("", False, 1000), ("", True, 60)]
)
async def test_a_response_calls_tools_whole_and_streamed(
    door: HttpDoor, client: openai.AsyncOpenAI, words: str, cut: bool, characters: int
) -> None:
    say(door, words + CALLS, characters, cut)
    asked: dict[str, Any] = {"model": "tiny", "input": ROUND, "tools": [FLAT]}
    reply, events = await responses(client, **asked)
    called = [(item.name, item.arguments) for item in reply.output if item.type == "function_call"]
    assert called == [("weather", '{"city": "Köln"}'), ("weather", "{}")]
    assert reply.output_text == words.strip() and len(reply.output) == 2 + bool(words)
    assert reply.status == ("incomplete" if cut else "completed")
    assert prompts(door)[0].endswith(
        "<user>hi<assistant><tool_call>weather Rom c1</tool_call><tool>wet(c1)<assistant>"
    )
    said = [(item.type, getattr(item, "arguments", None)) for item in reply.output]
    last = events[-1].response.output
    assert [(item.type, getattr(item, "arguments", None)) for item in last] == said
    arguments = ["", "", ""]
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            arguments[event.output_index] += event.delta
        if event.type == "response.function_call_arguments.done":
            assert event.arguments == arguments[event.output_index]
    kinds = [event.type.removeprefix("response.output_item.") for event in events]
    assert [kind for kind in kinds if "." not in kind] == ["added", "done"] * len(reply.output)


@pytest.mark.parametrize("asked", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
async def test_without_tools_nothing_is_a_call(
    door: HttpDoor, client: openai.AsyncOpenAI, asked: dict[str, Any]
) -> None:
    say(door, CALLS)
    for said in await whole(client, **asked), await streamed(client, **asked):
        assert said == [Said(CALLS, end="stop")]
    assert prompts(door) == ["<user>hi<assistant>"] * 2


@pytest.mark.parametrize("thinks", [True, False])
async def test_reasoning_may_begin_in_the_prompt(
    door: HttpDoor, client: openai.AsyncOpenAI, thinks: bool
) -> None:
    say(door, "a\n</think>\n\nb" if thinks else "b")
    kwargs = {"enable_thinking": thinks}
    (said,) = await streamed(client, extra_body={"chat_template_kwargs": kwargs})
    assert said == Said("b", "a" if thinks else "", end="stop")


async def test_an_answer_goes_on_at_whatever_token_it_is_resumed() -> None:
    path = Script(text=THOUGHT, characters=1)
    frontend = make_frontend(path, template=TEMPLATE)
    chat = ChatPrompt((ChatMessage("user", "hi"),), tools=TOOLS)

    async def events(resumption: Resumption | None = None) -> list[StreamEvent]:
        request = await frontend.build_request(chat, request_id="r", life=7, resumption=resumption)
        return [event async for event in frontend.stream(request, chat)]

    whole = await events()
    assert len(whole) > 100 and whole[-1].finish_reason is FinishReason.TOOL_CALLS
    for at in range(1, len(whole)):
        had = tuple(token for event in whole[:at] for token in event.token_ids)
        assert await events(Resumption(1, (AcceptedChild(had),))) == whole[at:]


NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(("choice", "end"), [("required", "tool_calls"), (NAMED, "stop")])
async def test_a_call_that_is_required_is_made_one_by_a_grammar(
    door: HttpDoor, client: openai.AsyncOpenAI, choice: Any, end: str
) -> None:
    say(door, '[{"name": "weather", "arguments": {"city":"Köln"}}]')
    asked: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice}
    for (said,) in await whole(client, **asked), await streamed(client, **asked):
        assert [call[1:] for call in said.calls] == [("weather", '{"city":"Köln"}')]
        assert (said.content, said.reasoning, said.end) == ("", "", end)
    grammars = {request.sampling.grammar for request in door.path.requests}
    assert len(door.path.requests) == 2 and len(grammars) == 1 and None not in grammars


HARMONY = (
    "<|channel|>analysis<|message|>hmm<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city": "Köln"}'
)


async def test_a_response_shows_reasoning_words_and_calls_of_gpt_oss() -> None:
    path = Script(text=HARMONY, characters=7)
    asked: dict[str, Any] = {"model": "tiny", "input": "hi", "tools": [FLAT]}
    async with (
        http_door(path, template="{# <|channel|> #}" + TEMPLATE) as door,
        door.client() as client,
    ):
        reply, events = await responses(client, **asked)
    thought, said, call = (item.model_dump(exclude={"id"}) for item in reply.output)
    assert thought["content"] == [{"type": "reasoning_text", "text": "hmm"}]
    assert (thought["type"], thought["status"]) == ("reasoning", "completed")
    assert (said["type"], reply.output_text) == ("message", "Let me see.")
    assert (call["name"], call["arguments"]) == ("weather", '{"city": "Köln"}')
    last = events[-1]
    assert [item.model_dump(exclude={"id", "call_id"}) for item in last.response.output] == [
        item.model_dump(exclude={"id", "call_id"}) for item in reply.output
    ]
    thoughts = [event for event in events if event.type.startswith("response.reasoning_text")]
    assert "".join(getattr(event, "delta", "") for event in thoughts) == "hmm"
    assert {event.output_index for event in thoughts if hasattr(event, "output_index")} == {0}


async def test_what_was_thought_may_be_sent_back(
    door: HttpDoor, client: openai.AsyncOpenAI
) -> None:
    thought: Any = {"type": "reasoning", "id": "rs_1", "summary": []}
    thought["content"] = [{"type": "reasoning_text", "text": "hmm"}]
    words: Any = {"type": "message", "role": "assistant", "content": "Let me see."}
    for items in ([ROUND[0], thought, *ROUND[1:]], [ROUND[0], thought, words, *ROUND[1:]]):
        await client.responses.create(model="tiny", input=items, tools=[FLAT])
    for prompt, said in zip(prompts(door), ("", "Let me see."), strict=True):
        assert f"<assistant><think>hmm</think>{said}<tool_call>weather Rom c1</tool_call>" in prompt


OTHER: Any = {"type": "function", "function": {"name": "other"}}
OTHER_FLAT: Any = {"type": "function", "name": "other"}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_the_model_is_shown_the_tools_that_are_allowed(
    door: HttpDoor, client: openai.AsyncOpenAI, mode: Any
) -> None:
    say(door, '[{"name": "weather", "arguments": {}}]')
    choice: Any = {"type": "allowed_tools", "mode": mode, "tools": [OTHER_FLAT]}
    await client.responses.create(
        model="tiny", input="hi", tools=[FLAT, OTHER_FLAT], tool_choice=choice
    )
    allowed = {"mode": mode, "tools": [OTHER]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    await whole(client, tools=[WEATHER, OTHER], tool_choice=choice)
    for request in door.path.requests:
        prompt = bytes(request.prompt_token_ids).decode()
        assert '"other"' in prompt and "weather" not in prompt
        assert (request.sampling.grammar is None) == (mode == "auto")


async def test_the_form_of_words_says_nothing_of_a_call_that_is_required(
    door: HttpDoor, client: openai.AsyncOpenAI
) -> None:
    say(door, '[{"name": "weather", "arguments": {}}]')
    asked: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required"}
    schema: Any = {"type": "json_schema", "name": "dog", "schema": {"type": "object"}}
    for form in ({}, {"response_format": {"type": "json_object"}}):
        ((said,),) = [await whole(client, **asked, **form)]
        assert [call[1:] for call in said.calls] == [("weather", "{}")]
    reply = await client.responses.create(
        model="tiny", input="hi", tools=[FLAT], tool_choice="required", text={"format": schema}
    )
    assert [item.type for item in reply.output] == ["function_call"]
    grammars = {request.sampling.grammar for request in door.path.requests}
    assert len(door.path.requests) == 3 and len(grammars) == 1 and None not in grammars


async def test_an_answer_by_a_grammar_is_that_and_nothing_else() -> None:
    path = Script(text=CALLS)
    frontend = make_frontend(path, template=TEMPLATE)
    chat = ChatPrompt((ChatMessage("user", "hi"),), tools=TOOLS)
    sampling = SamplingParams(max_tokens=300, grammar=Grammar(GrammarKind.JSON_OBJECT))
    request = Request("r", (1,), sampling)
    events = [event async for event in frontend.stream(request, chat)]
    assert "".join(event.text for event in events) == CALLS
    assert not any(event.tool_calls for event in events)


async def test_a_client_whose_stream_breaks_within_a_call_gets_all_of_it() -> None:
    second = Script(text=THOUGHT)
    first = Script(text=THOUGHT, held_at=3 * (THOUGHT.index("K") // 3))
    first.gate.clear()
    async with contextlib.AsyncExitStack() as stack:
        async with http_door(first, template=TEMPLATE) as door:
            other = await stack.enter_async_context(http_door(second, template=TEMPLATE))
            targets = ",".join(one.target.removeprefix("ipv4:") for one in (door, other))
            client = await stack.enter_async_context(AsyncClient(f"ipv4:{targets}"))
            held = asyncio.ensure_future(first.held.wait())
            while not held.done():  # the client may connect to the other server first
                answer = asyncio.ensure_future(client.complete(messages=CHAT, tools=TOOLS, n=2))
                await asyncio.wait({answer, held}, return_when=asyncio.FIRST_COMPLETED)
        done = await answer
    again = second.requests[-1]
    assert again.resumption.children[0].finish_reason is FinishReason.TOOL_CALLS
    assert 0 < len(again.resumption.children[1].token_ids) < len(THOUGHT.encode())
    for choice in done.choices:
        assert (choice.text, choice.reasoning) == ("Let me see.", "hmm")
        assert [json.loads(call.arguments) for call in choice.tool_calls] == [{"city": "Köln"}, {}]
        assert choice.finish_reason is FinishReason.TOOL_CALLS
    assert len({call.id for choice in done.choices for call in choice.tool_calls}) == 4


@pytest.mark.parametrize(
    ("sign", "text", "ids"),
    [
        (
            "<|tool_call_begin|>",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            "functions[.]weather:1",
        ),
        ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "weather", "arguments": {}}]', "[0-9a-f]{9}"),
    ],
)
async def test_ids_are_those_that_the_models_template_takes(sign: str, text: str, ids: str) -> None:
    call = {"function": {"name": "weather", "arguments": "{}"}}
    earlier = {"role": "assistant", "content": None, "tool_calls": [call]}
    template = "{# " + sign + " #}" + TEMPLATE
    async with (
        http_door(Script(text=text), template=template) as door,
        AsyncClient(door.target) as ours,
    ):
        done = await ours.complete(messages=[*CHAT, earlier], tools=TOOLS)
    (called,) = done.choices[0].tool_calls
    assert re.fullmatch(ids, called.id) and called.name == "weather"


async def test_tools_that_the_model_would_not_see_are_refused() -> None:
    async with http_door() as door:
        answer = await door.ask(CHATS, {"messages": CHAT, "tools": [WEATHER]})
        assert answer.status == 400 and "shows none to the model" in answer.error["message"]


ARGUMENTS = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1]"}}
WITH: dict[str, Any] = {"tools": [WEATHER]}
ALLOWED: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}
F_ALLOWED: Any = {"mode": "auto", "tools": [{"function": {"name": "f"}}]}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "requires a call, but there are no tools"),
    (WITH | {"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
    (WITH | {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "'f', which is not"),
    (WITH | {"tool_choice": {"type": "custom"}}, "is not supported"),
    (WITH | {"tool_choice": "all"}, "is not supported"),
    (
        WITH | {"tool_choice": ALLOWED | {"allowed_tools": F_ALLOWED}},
        "tool_choice.allowed_tools.tools names 'f', which is not one of the tools",
    ),
    (
        WITH | {"tool_choice": ALLOWED | {"allowed_tools": {"mode": "all"}}},
        "tool_choice.allowed_tools.mode must be auto or required, got 'all'",
    ),
    (WITH | {"tool_choice": "required", "bad_words": ["x"]}, "tools and bad_words cannot restrict"),
    (
        {"tools": [{"function": {"name": "f", "parameters": {"type": "x"}}}]}
        | {"tool_choice": "required"},
        "Invalid type: x",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function.name is missing"),
    ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [WEATHER, WEATHER]}, "twice"),
    ({"tools": [{"function": {"name": "f", "parameters": 3}}]}, "parameters must be"),
    ({"messages": [{"role": "user", "content": "", "tool_calls": [ARGUMENTS]}]}, "assistant"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "function.name is missing"),
]


async def test_what_is_no_tool_and_no_call_is_refused_by_name(door: HttpDoor) -> None:
    assert not await taken(door, [(CHATS, {"messages": CHAT, **asked}, w) for asked, w in WRONG])

"""Chats with tools and reasoning at both doors: what the model is shown, and its answers taken
apart, whole and streamed, as OpenAI's own client and ours read them."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from jdisagg.chat.messages import ChatPrompt
from jdisagg.client import AsyncClient, ChatMessage, ChatTool, ToolCall
from jdisagg.errors import InvalidRequestError
from jdisagg.request import (
    AcceptedChild,
    FinishReason,
    Grammar,
    GrammarKind,
    Request,
    Resumption,
    SamplingParams,
    StreamEvent,
    Usage,
)
from tests.service.doors import FakePath, make_frontend
from tests.service.http_doors import HttpDoor, http_door

# As Qwen 3 writes it, in small.
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{"
    " m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for c in m.tool_calls %}"
    "<tool_call>{{ c.function.name }} {{ c.function.arguments.city }} {{ c.id }}</tool_call>"
    "{% endfor %}{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>\n{% endif %}"
    "{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA},
}
CHAT: Any = [{"role": "user", "content": "hi"}]
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
)


@dataclass
class Script(FakePath):
    """Says `text`, some characters an event, and stops; a resumed request goes on where it was. Cut
    off, it ends by its length. The last child waits at character `held_at` for the gate."""

    text: str = ""
    characters: int = 3
    cut: bool = False
    held_at: int | None = None
    held: asyncio.Event = field(default_factory=asyncio.Event)

    async def stream(self, request: Request) -> AsyncIterator[StreamEvent]:
        self.requests.append(request)
        had = request.resumption.children if request.resumption is not None else ()
        data, end = self.text.encode(), FinishReason.LENGTH if self.cut else FinishReason.STOP
        for child in range(request.sampling.n):
            first = len(had[child].token_ids) if had else 0
            while not had or had[child].finish_reason is None:
                if child + 1 == request.sampling.n and first == self.held_at:
                    self.held.set()
                    await self.gate.wait()
                some = tuple(data[first : first + self.characters])
                last = first + len(some) >= len(data)
                shown = data[: first + len(some)].decode("utf-8", "ignore")
                before = data[:first].decode("utf-8", "ignore")
                usage = Usage(len(request.prompt_token_ids), len(data))
                yield StreamEvent(
                    child=child,
                    first_index=first,
                    token_ids=some,
                    text=shown[len(before) :],
                    finish_reason=end if last else None,
                    usage=usage if last and child + 1 == request.sampling.n else None,
                )
                first += len(some)
                if last:
                    break


@pytest.fixture
async def door() -> AsyncIterator[HttpDoor]:
    async with http_door(Script(), template=TEMPLATE) as one:
        yield one


@pytest.fixture
async def client(door: HttpDoor) -> AsyncIterator[openai.AsyncOpenAI]:
    async with door.client() as one:
        yield one


@dataclass
class Said:
    """An answer, however it came."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    end: str | None = None


async def whole(client: openai.AsyncOpenAI, **asked: Any) -> list[Said]:
    reply = await client.chat.completions.create(model="tiny", messages=CHAT, **asked)
    ChatCompletion.model_validate(reply.model_dump(warnings=False), strict=True)
    return [
        Said(
            choice.message.content or "",
            getattr(choice.message, "reasoning_content", ""),
            [
                (call.id, call.function.name, call.function.arguments)
                for call in choice.message.tool_calls or ()
                if call.type == "function"
            ],
            choice.finish_reason,
        )
        for choice in reply.choices
    ]


async def streamed(client: openai.AsyncOpenAI, **asked: Any) -> list[Said]:
    said: dict[int, Said] = {}
    async for chunk in await client.chat.completions.create(
        model="tiny", messages=CHAT, stream=True, **asked
    ):
        ChatCompletionChunk.model_validate(chunk.model_dump(warnings=False), strict=True)
        for choice in chunk.choices:
            one, delta = said.setdefault(choice.index, Said()), choice.delta
            one.content += delta.content or ""
            one.reasoning += getattr(delta, "reasoning_content", None) or ""
            assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
            one.end = choice.finish_reason or one.end
            for call in delta.tool_calls or ():
                assert call.function
                if call.function.name:
                    assert call.id and call.index == len(one.calls) and call.type == "function"
                    one.calls.append((call.id, call.function.name, ""))
                called, name, arguments = one.calls[call.index]
                arguments += call.function.arguments or ""
                one.calls[call.index] = called, name, arguments
    return [said[index] for index in sorted(said)]


async def over_grpc(door: HttpDoor, **asked: Any) -> list[Said]:
    async with AsyncClient(door.target) as ours:
        done = await ours.complete(messages=CHAT, **asked)
    return [
        Said(
            choice.text,
            choice.reasoning,
            [(call.id, call.name, call.arguments) for call in choice.tool_calls],
            choice.finish_reason and choice.finish_reason.value,
        )
        for choice in done.choices
    ]


@pytest.mark.parametrize("characters", [1, 3, 1000])
@pytest.mark.parametrize("cut", [False, True])
async def test_calls_and_reasoning_are_told_from_words_at_both_doors(
    door: HttpDoor, client: openai.AsyncOpenAI, characters: int, cut: bool
) -> None:
    path = door.path
    assert isinstance(path, Script)
    path.text, path.characters = "<think>\nhmm\n</think>\n\nLet me see.\n" + CALLS, characters
    path.cut = cut
    asked: dict[str, Any] = {"tools": [WEATHER], "n": 2}
    own = {"extra_body": {"request_id": "same"}}
    some = await whole(client, **asked, **own), await streamed(client, **asked, **own)
    ours = await over_grpc(door, **asked, request_id="same")
    assert some[0] == some[1]
    assert [(one.content, one.reasoning) for one in ours] == [("Let me see.", "hmm")] * 2
    called = [("weather", '{"city": "Köln"}'), ("weather", "{}")]
    for one in (*some[0], *ours):
        assert (one.content, one.reasoning) == ("Let me see.", "hmm")
        assert [call[1:] for call in one.calls] == called
        assert one.end == ("length" if cut else "tool_calls")
    ids = [call[0] for one in some[0] for call in one.calls]
    assert len(set(ids)) == 4 and all(one.startswith("call_") for one in ids)
    assert not any(request.sampling.skip_special_tokens for request in path.requests)


@pytest.mark.parametrize("characters", [1, 1000])
async def test_usage_says_how_many_tokens_were_reasoning(door: HttpDoor, characters: int) -> None:
    path = door.path
    assert isinstance(path, Script)
    path.text, path.characters = "<think>hm</think>yes", characters
    usage = (await door.ask("/v1/chat/completions", {"messages": CHAT})).fields["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 17}
    response = (await door.ask("/v1/responses", {"input": "hi"})).fields
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 17}
    async with AsyncClient(door.target) as ours:
        done = await ours.complete(messages=CHAT)
    assert done.usage is not None and done.usage.reasoning_tokens == 17


async def test_an_answer_of_calls_alone_has_no_content(door: HttpDoor) -> None:
    door.path.text = CALLS  # type: ignore[attr-defined]
    asked = {"messages": CHAT, "tools": [WEATHER], "parallel_tool_calls": False}
    message = (await door.ask("/v1/chat/completions", asked)).fields["choices"][0]["message"]
    assert message["content"] is None and "reasoning_content" not in message
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]


@pytest.mark.parametrize("asked", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
async def test_without_tools_nothing_is_a_call(
    door: HttpDoor, client: openai.AsyncOpenAI, asked: dict[str, Any]
) -> None:
    door.path.text = CALLS  # type: ignore[attr-defined]
    http = await whole(client, **asked), await streamed(client, **asked)
    for said in (*http, await over_grpc(door, **asked)):
        assert said == [Said(CALLS, end="stop")]
    prompts = [bytes(request.prompt_token_ids).decode() for request in door.path.requests]
    assert prompts == ["<user>hi<assistant>"] * 3


@pytest.mark.parametrize("thinks", [True, False])
async def test_reasoning_may_begin_in_the_prompt(
    door: HttpDoor, client: openai.AsyncOpenAI, thinks: bool
) -> None:
    door.path.text = "a\n</think>\n\nb" if thinks else "b"  # type: ignore[attr-defined]
    kwargs = {"enable_thinking": thinks}
    (said,) = await streamed(client, extra_body={"chat_template_kwargs": kwargs})
    assert [said] == await over_grpc(door, chat_template_kwargs=kwargs)
    assert said == Said("b", "a" if thinks else "", end="stop")


async def test_the_model_is_shown_tools_calls_and_results(
    door: HttpDoor, client: openai.AsyncOpenAI
) -> None:
    door.path.text = "ok"  # type: ignore[attr-defined]
    call = {"name": "weather", "arguments": '{"city": "Rom"}'}
    messages: Any = [
        *CHAT,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "wet"},
    ]
    await client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])
    (await door.ask("/tokenize", {"messages": messages, "tools": [WEATHER]})).fields["tokens"]
    async with AsyncClient(door.target) as ours:
        messages[1]["content"] = ""
        await ours.complete(messages=messages, tools=[WEATHER])
        asked = (
            ChatMessage("user", "hi"),
            ChatMessage(
                "assistant",
                "",
                reasoning="hm",
                tool_calls=(ToolCall("weather", '{"city": "Rom"}', "c1"),),
            ),
            ChatMessage("tool", "wet", tool_call_id="c1"),
        )
        await ours.complete(messages=asked, tools=[ChatTool("weather", "of a city", SCHEMA)])
    expected = (
        f"[{json.dumps(WEATHER)}]<user>hi<assistant><think>hm</think>"
        "<tool_call>weather Rom c1</tool_call><tool>wet(c1)<assistant>"
    )
    for request in door.path.requests:
        assert bytes(request.prompt_token_ids).decode() == expected
    assert len(door.path.requests) == 3


THOUGHT = "<think>\nhmm\n</think>\n\nLet me see.\n" + CALLS
TOOLS = (ChatTool("weather", "of a city", SCHEMA),)


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
    door.path.text = '[{"name": "weather", "arguments": {"city":"Köln"}}]'  # type: ignore
    asked: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice}
    for (said,) in (
        await whole(client, **asked),
        await streamed(client, **asked),
        await over_grpc(door, **asked),
    ):
        assert [call[1:] for call in said.calls] == [("weather", '{"city":"Köln"}')]
        assert (said.content, said.reasoning, said.end) == ("", "", end)
    grammars = {request.sampling.grammar for request in door.path.requests}
    assert len(door.path.requests) == 3 and len(grammars) == 1 and None not in grammars


FLAT: Any = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": SCHEMA,
}
ROUND: Any = [
    {"role": "user", "content": "hi"},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rom"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "wet"},
]


async def responses(client: openai.AsyncOpenAI, **asked: Any) -> tuple[Response, list[Any]]:
    """A response as it comes whole, and the events of the same one; both as their types say."""
    reply = await client.responses.create(**asked)
    Response.model_validate(reply.model_dump(warnings=False), strict=True)
    events = [event async for event in await client.responses.create(**asked, stream=True)]
    for event in events:
        type(event).model_validate(event.model_dump(warnings=False), strict=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return reply, events


@pytest.mark.parametrize(("words", "cut"), [("Let me see.\n", False), ("", False), ("", True)])
@pytest.mark.parametrize("characters", [3, 60, 1000])
async def test_a_response_calls_tools_whole_and_streamed(
    door: HttpDoor, client: openai.AsyncOpenAI, words: str, cut: bool, characters: int
) -> None:
    path = door.path
    assert isinstance(path, Script)
    path.text, path.cut, path.characters = words + CALLS, cut, characters
    asked: dict[str, Any] = {"model": "tiny", "input": ROUND, "tools": [FLAT]}
    reply, events = await responses(client, **asked)
    called = [(item.name, item.arguments) for item in reply.output if item.type == "function_call"]
    assert called == [("weather", '{"city": "Köln"}'), ("weather", "{}")]
    assert reply.output_text == words.strip() and len(reply.output) == 2 + bool(words)
    assert reply.status == ("incomplete" if cut else "completed")
    prompt = bytes(door.path.requests[0].prompt_token_ids).decode()
    assert prompt.endswith(
        "<user>hi<assistant><tool_call>weather Rom c1</tool_call><tool>wet(c1)<assistant>"
    )
    last = events[-1]
    assert [(item.type, getattr(item, "arguments", None)) for item in last.response.output] == [
        (item.type, getattr(item, "arguments", None)) for item in reply.output
    ]
    arguments = ["", "", ""]
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            arguments[event.output_index] += event.delta
        if event.type == "response.function_call_arguments.done":
            assert event.arguments == arguments[event.output_index]
    kinds = [event.type.removeprefix("response.output_item.") for event in events]
    assert [kind for kind in kinds if "." not in kind] == ["added", "done"] * len(reply.output)


HARMONY = (
    "<|channel|>analysis<|message|>hmm<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city": "Köln"}'
)


@pytest.mark.parametrize("characters", [1, 7, 1000])
async def test_a_response_shows_reasoning_words_and_calls_of_gpt_oss(characters: int) -> None:
    path = Script(text=HARMONY, characters=characters)
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
    assert {event.output_index for event in thoughts if hasattr(event, "output_index")} == {0}  # type: ignore


async def test_what_was_thought_may_be_sent_back(
    door: HttpDoor, client: openai.AsyncOpenAI
) -> None:
    thought: Any = {"type": "reasoning", "id": "rs_1", "summary": []}
    thought["content"] = [{"type": "reasoning_text", "text": "hmm"}]
    words: Any = {"type": "message", "role": "assistant", "content": "Let me see."}
    for items in ([ROUND[0], thought, *ROUND[1:]], [ROUND[0], thought, words, *ROUND[1:]]):
        await client.responses.create(model="tiny", input=items, tools=[FLAT])
    prompts = [bytes(request.prompt_token_ids).decode() for request in door.path.requests]
    for prompt, said in zip(prompts, ("", "Let me see."), strict=True):
        assert f"<assistant><think>hmm</think>{said}<tool_call>weather Rom c1</tool_call>" in prompt


async def test_a_response_may_be_made_to_call(door: HttpDoor, client: openai.AsyncOpenAI) -> None:
    door.path.text = '[{"name": "weather", "arguments": {}}]'  # type: ignore[attr-defined]
    choice: Any = {"type": "function", "name": "weather"}
    reply = await client.responses.create(
        model="tiny", input="hi", tools=[FLAT], tool_choice=choice
    )
    assert [(item.type, getattr(item, "name", "")) for item in reply.output] == [
        ("function_call", "weather")
    ]


OTHER: Any = {"type": "function", "function": {"name": "other"}}
OTHER_FLAT: Any = {"type": "function", "name": "other"}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_the_model_is_shown_the_tools_that_are_allowed(
    door: HttpDoor, client: openai.AsyncOpenAI, mode: Any
) -> None:
    door.path.text = '[{"name": "weather", "arguments": {}}]'  # type: ignore[attr-defined]
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
    door.path.text = '[{"name": "weather", "arguments": {}}]'  # type: ignore[attr-defined]
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
    assert again.resumption is not None
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


ARGUMENTS = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1]"}}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tool_choice": "required"}, "requires a call, but there are no tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "'f', which is not one of the tools",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "custom"}}, "is not supported"),
        ({"tools": [WEATHER], "tool_choice": "all"}, "is not supported"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "f"}}]},
                },
            },
            "tool_choice.allowed_tools.tools names 'f', which is not one of the tools",
        ),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "all"}},
            },
            "tool_choice.allowed_tools.mode must be auto or required, got 'all'",
        ),
        (
            {
                "tools": [{"function": {"name": "f", "parameters": {"type": "thing"}}}],
                "tool_choice": "required",
            },
            "tools: .*thing",
        ),
        (
            {"tools": [WEATHER], "tool_choice": "required", "bad_words": ["x"]},
            "tools and bad_words cannot restrict one answer",
        ),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function.name is missing"),
        ({"tools": [{"function": {"name": "a b"}}]}, r"tools\[0\].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "twice"),
        ({"tools": [{"function": {"name": "f", "parameters": 3}}]}, "parameters must be"),
        ({"messages": [{"role": "user", "content": "", "tool_calls": [ARGUMENTS]}]}, "assistant"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "function.name is missing"),
    ],
)
async def test_what_is_no_tool_and_no_call_is_refused_by_name(
    door: HttpDoor, asked: dict[str, Any], message: str
) -> None:
    answer = await door.ask("/v1/chat/completions", {"messages": CHAT, **asked})
    assert answer.status == 400
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(answer.error["message"])


async def test_tools_that_the_model_would_not_see_are_refused() -> None:
    async with http_door() as door:
        answer = await door.ask("/v1/chat/completions", {"messages": CHAT, "tools": [WEATHER]})
        assert answer.status == 400 and "shows none to the model" in answer.error["message"]
        async with AsyncClient(door.target) as ours:
            with pytest.raises(InvalidRequestError, match="shows none to the model"):
                await ours.complete(messages=CHAT, tools=[WEATHER])

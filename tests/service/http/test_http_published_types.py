"""The objects of every endpoint have the fields that the clients of OpenAI and Anthropic publish as
required, with values of the published types."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic.types as messages_api
import openai.types as openai_api
import pytest
import pytest_asyncio
from anthropic.types import RawMessageStreamEvent
from openai.types import responses as responses_api
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, TypeAdapter

from jdisagg.config import ServiceConfig
from tests.service.chats import CALLS, SCHEMA, TEMPLATE, WEATHER, Script
from tests.service.http_doors import (
    CHATS,
    COMPLETIONS,
    HI,
    MESSAGES,
    RESPONSES,
    HttpDoor,
    events,
    http_door,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi"},
    CHATS: {"messages": HI, "tools": [WEATHER]},
    RESPONSES: {"input": "hi", "tools": [{"type": "function", **WEATHER["function"]}]},
    MESSAGES: {
        "messages": HI,
        "max_tokens": 500,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
    },
}
# Required by the published description of the Responses API, where Python's types have a default.
OF_RESPONSES = {
    *("error", "incomplete_details", "instructions", "metadata", "temperature", "top_p", "text"),
    *("truncation", "background", "reasoning", "previous_response_id", "status", "usage", "user"),
    *("max_output_tokens", "max_tool_calls", "top_logprobs", "presence_penalty", "completed_at"),
    *("frequency_penalty", "service_tier", "safety_identifier", "prompt_cache_key", "store"),
}
# Required by Anthropic's TypeScript types, but not by those of Python.
OF_MESSAGES = {"container", "stop_details", "stop_reason", "stop_sequence"}
TEXTS = ["<think>\nhm\n</think>\nyes", f"so\n{CALLS}", ""]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door() -> AsyncIterator[HttpDoor]:
    service = ServiceConfig(kept_responses_mib=1)
    async with http_door(Script(), template=TEMPLATE, service=service) as one:
        yield one


async def ask(door: HttpDoor, path: str, said: str, /, **more: Any) -> Any:
    assert isinstance(door.path, Script)
    door.path.text = said
    answer = await door.served(path, {**ASK[path], **more})
    if not more.get("stream"):
        return answer.fields
    if path in (COMPLETIONS, CHATS):
        return [json.loads(event) for event in events(answer.body)[:-1]]
    frames = filter(None, answer.body.decode().split("\n\n"))
    return [json.loads(one.partition("data: ")[2]) for one in frames]


def check(kind: Any, value: Any) -> None:
    TypeAdapter(kind).validate_python(value, strict=True)


WHOLE: dict[str, type[BaseModel]] = {
    COMPLETIONS: openai_api.Completion,
    CHATS: ChatCompletion,
    RESPONSES: responses_api.Response,
    MESSAGES: messages_api.Message,
}
EVENTS: dict[str, Any] = {
    COMPLETIONS: openai_api.Completion,
    CHATS: ChatCompletionChunk,
    RESPONSES: responses_api.ResponseStreamEvent,
    MESSAGES: RawMessageStreamEvent,
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("path", ASK)
async def test_replies_and_events_have_the_published_fields(
    door: HttpDoor, path: str, text: str
) -> None:
    check(WHOLE[path], await ask(door, path, text))
    options = {"stream_options": {"include_usage": True}} if path in (COMPLETIONS, CHATS) else {}
    for event in await ask(door, path, text, stream=True, **options):
        if path == COMPLETIONS:  # null until the end, other than the type says
            event["choices"] = [{**one, "finish_reason": "stop"} for one in event["choices"]]
        check(EVENTS[path], event)
        if "response" in event:
            assert event["response"].keys() >= OF_RESPONSES
        if "message" in event:
            assert event["message"].keys() >= OF_MESSAGES


async def test_a_response_states_the_values_used(door: HttpDoor) -> None:
    plain = await ask(door, RESPONSES, "x")
    used = {
        "temperature": 1.0,
        "top_p": 1.0,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "background": False,
        "reasoning": {"effort": None, "summary": None},
        "previous_response_id": None,
        "tool_choice": "auto",
        "metadata": {},
    }
    assert {name: plain[name] for name in used} == used
    assert plain["tools"][0] | {"strict": False} == plain["tools"][0]
    asked = {"temperature": "0.5", "truncation": "auto", "tool_choice": "any"}
    asked |= {"text": {"verbosity": "low"}, "reasoning": {"effort": "low"}}
    asked |= {"previous_response_id": plain["id"], "metadata": {"a": "b"}}
    told = await ask(door, RESPONSES, "[]", **asked)
    check(responses_api.Response, told)
    assert (told["temperature"], told["truncation"]) == (0.5, "disabled")
    assert told["tool_choice"] == "required"
    assert told["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert told["reasoning"] == {"effort": "low", "summary": None}
    assert (told["previous_response_id"], told["metadata"]) == (plain["id"], {"a": "b"})


async def test_stored_responses_and_counts_have_the_published_fields(door: HttpDoor) -> None:
    made = await ask(door, RESPONSES, "x", background=True)
    check(responses_api.Response, made)
    assert made.keys() >= OF_RESPONSES
    listed = (await door.ask(f"{RESPONSES}/{made['id']}")).fields
    check(responses_api.Response, listed)
    counted = await door.ask(f"{RESPONSES}/input_tokens", {"input": "hi"})
    assert counted.fields.keys() == {"object", "input_tokens"}
    asked = {"messages": HI}
    check(
        messages_api.MessageTokensCount, (await door.ask(f"{MESSAGES}/count_tokens", asked)).fields
    )


async def test_models_and_errors_have_the_published_fields(door: HttpDoor) -> None:
    for card in (await door.ask("/v1/models")).fields["data"]:
        check(openai_api.Model, card)
        TypeAdapter(messages_api.ModelInfo).validate_python(card)
    for path in (COMPLETIONS, CHATS, RESPONSES, "/tokenize", "/nothing"):
        answer = await door.ask(path, {"model": 3})
        assert set(answer.error) == {"message", "type", "param", "code"}
    wrong = (await door.ask(MESSAGES, {})).fields
    check(messages_api.ErrorResponse, wrong)
    assert "request_id" in wrong

"""Anthropic's Messages API: what the model is shown, and messages whole and as events. The client
`anthropic` itself runs in `tests.http_clients`."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jdisagg.request import Request, StreamEvent
from jdisagg.service.http import generation
from tests.service.chats import CALLS, SCHEMA, TEMPLATE, THOUGHT, Script, prompts, say, script_door
from tests.service.doors import CACHED, MODEL, FakePath
from tests.service.http_doors import MESSAGES, HttpDoor, http_door, taken, with_tokens

opens = script_door
HI: Any = {"max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]}
WEATHER: Any = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}


@dataclass
class Stopped(Script):
    """A script that a stop string ends."""

    async def stream(self, request: Request) -> AsyncIterator[StreamEvent]:
        async for event in super().stream(request):
            if event.finish_reason is not None:
                object.__setattr__(event, "stop_string", "###")
            yield event


def frames(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream; each is named as its data is."""
    found = []
    for event in filter(None, body.decode().split("\n\n")):
        if event.startswith(":"):
            continue
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def accumulated(some: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's events add up to, as Anthropic's documentation describes it."""
    first, *rest = [event for event in some if event["type"] != "ping"]
    assert first["type"] == "message_start" and rest[-1] == {"type": "message_stop"}
    message, partial = first["message"], ""
    assert (message["content"], message["stop_reason"]) == ([], None)
    for event in rest[:-1]:
        kind, content = event["type"], message["content"]
        if kind == "content_block_start":
            assert event["index"] == len(content)
            content.append(event["content_block"])
            partial = ""
        elif kind == "content_block_delta":
            delta = event["delta"]
            match delta["type"]:
                case "input_json_delta":
                    partial += delta["partial_json"]
                case "signature_delta":
                    content[-1]["signature"] = delta["signature"]
                case named:
                    name = named.removesuffix("_delta")
                    content[-1][name] += delta[name]
        elif kind == "content_block_stop":
            assert event["index"] == len(content) - 1
            if content[-1]["type"] == "tool_use":
                assert content[-1]["input"] == {}
                content[-1]["input"] = json.loads(partial or "{}")
        else:
            assert kind == "message_delta"
            message |= event["delta"]
            message["usage"] |= event["usage"]
    return message


async def both(door: HttpDoor, asked: dict[str, Any]) -> dict[str, Any]:
    """The message whole, which equals the message streamed."""
    asked = asked | {"request_id": "same"}
    answer = await door.ask(MESSAGES, asked)
    assert answer.status == 200 and answer.headers["request-id"] == "same"
    streamed = await door.ask(MESSAGES, asked | {"stream": True})
    assert accumulated(frames(streamed.body)) == answer.fields
    return answer.fields


@pytest.mark.parametrize("characters", [1, 1000])
async def test_thinking_text_and_calls_are_blocks(door: HttpDoor, characters: int) -> None:
    say(door, THOUGHT, characters)
    message = await both(door, HI | {"tools": [WEATHER]})
    thinking, text, *calls = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "hmm")
    assert thinking["signature"] and text == {
        "type": "text",
        "text": "Let me see.",
        "citations": None,
    }
    assert [(one["type"], one["name"], one["input"]) for one in calls] == [
        ("tool_use", "weather", {"city": "Köln"}),
        ("tool_use", "weather", {}),
    ]
    assert len({one["id"] for one in calls}) == 2
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny")
    assert message["id"] == "msg_same"


@pytest.mark.parametrize(("cut", "reason"), [(False, "end_turn"), (True, "max_tokens")])
async def test_why_a_message_ended(door: HttpDoor, cut: bool, reason: str) -> None:
    say(door, "yes", cut=cut)
    message = await both(door, HI | {"max_tokens": 3})
    assert message["stop_reason"] == reason
    assert message["content"] == [{"type": "text", "text": "yes", "citations": None}]
    used = {"input_tokens": 19, "output_tokens": 3}
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    unknown = ("cache_creation", "inference_geo", "server_tool_use", "service_tier")
    assert message["usage"] == used | cache | dict.fromkeys(unknown)


async def test_a_full_context_is_not_max_tokens(door: HttpDoor) -> None:
    say(door, "yes", cut=True)
    message = await both(door, HI | {"max_tokens": 32_000})
    assert message["stop_reason"] == "model_context_window_exceeded"
    request = door.path.requests[0]
    assert len(request.prompt_token_ids) + request.sampling.max_tokens == MODEL.context_tokens


async def test_a_stop_sequence_is_named() -> None:
    async with http_door(Stopped(text="yes"), template=TEMPLATE) as door:
        message = await both(door, HI | {"stop_sequences": ["###", "y"]})
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "###")
        assert door.path.requests[0].sampling.stop == ("###", "y")


async def test_cached_tokens_are_left_out_of_input_tokens() -> None:
    async with http_door() as door:
        usage = (await both(door, HI | {"max_tokens": 4}))["usage"]
        prompt = len(door.path.requests[0].prompt_token_ids)
        assert usage["cache_read_input_tokens"] == CACHED.total
        assert usage["input_tokens"] == prompt - CACHED.total


ROUND: Any = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Well."},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rom"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "c1",
                "content": [{"type": "text", "text": "wet"}],
                "is_error": False,
            },
            {"type": "text", "text": "so", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "then"},
        ],
    },
]


async def test_tools_of_anthropics_servers_are_left_out_beside_others(door: HttpDoor) -> None:
    say(door, "ok")
    hosted = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]
    answer = await door.ask(MESSAGES, HI | {"tools": [*hosted, WEATHER | {"defer_loading": True}]})
    assert answer.headers["jdisagg-ignored-fields"] == "tools.web_search_20250305"
    assert "web_search" not in prompts(door)[0] and '"name": "weather"' in prompts(door)[0]
    answer = await door.ask(MESSAGES, HI | {"tools": hosted})
    assert answer.status == 400 and "tools[0].type must be custom" in answer.error["message"]


SHOWN = (
    "<system>Be\nbrief<user>hi<assistant><think>hm</think>Well.<tool_call>weather Rom c1"
    "</tool_call><tool>wet(c1)<user>so\nthen<assistant>"
)


async def test_the_model_is_shown_the_whole_conversation(door: HttpDoor) -> None:
    say(door, "ok")
    system = [{"type": "text", "text": text} for text in ("Be", "brief")]
    asked = {"messages": ROUND, "system": system, "tools": [WEATHER]}
    answer = await door.ask(MESSAGES, asked | {"max_tokens": 9, "metadata": {"user_id": "u"}})
    assert "jdisagg-ignored-fields" not in answer.headers
    function = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
    tools = json.dumps({"type": "function", "function": function})
    assert prompts(door) == [f"[{tools}]{SHOWN}"]
    counted = await door.ask(f"{MESSAGES}/count_tokens", asked)
    assert counted.fields == {"input_tokens": len(door.path.requests[0].prompt_token_ids)}


async def test_a_final_message_of_the_assistant_is_continued(door: HttpDoor) -> None:
    say(door, "ok")
    messages = [*HI["messages"], {"role": "assistant", "content": "Well, "}]
    message = await both(door, HI | {"messages": messages})
    assert prompts(door)[0] == "<user>hi<assistant>Well, "
    assert message["content"] == [{"type": "text", "text": "ok", "citations": None}]


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("disabled", False)])
async def test_thinking_is_asked_of_the_template(door: HttpDoor, kind: str, thinks: bool) -> None:
    say(door, "a</think>b" if thinks else "b")
    message = await both(door, HI | {"thinking": {"type": kind, "budget_tokens": 1024}})
    assert prompts(door)[0].endswith("<think>\n") == thinks
    assert [one["type"] for one in message["content"]] == ["thinking"] * thinks + ["text"]


async def test_without_a_tool_choice_of_calls_nothing_is_a_call(door: HttpDoor) -> None:
    say(door, CALLS)
    message = await both(door, HI | {"tools": [WEATHER], "tool_choice": {"type": "none"}})
    assert message["content"] == [{"type": "text", "text": CALLS, "citations": None}]
    one = {"type": "auto", "disable_parallel_tool_use": True}
    message = await both(door, HI | {"tools": [WEATHER], "tool_choice": one})
    assert len(message["content"]) == 1 and message["stop_reason"] == "tool_use"


async def test_no_tokens_fill_the_cache_alone(door: HttpDoor) -> None:
    say(door, "ok")
    message = await both(door, HI | {"max_tokens": 0})
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    assert message["usage"]["output_tokens"] == 0


async def test_a_long_wait_is_filled_with_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "COMMENT_SECONDS", 0.02)
    async with http_door(FakePath(pause_seconds=0.2)) as door:
        some = frames((await door.ask(MESSAGES, HI | {"max_tokens": 2, "stream": True})).body)
        assert some[0] == {"type": "ping"} and len(accumulated(some)["content"]) == 1


async def test_the_key_may_come_as_x_api_key(tmp_path: Path) -> None:
    async with http_door(service=with_tokens(tmp_path, "secret")) as door:
        keys: list[tuple[dict[str, Any], int]] = [
            ({"x_api_key": "secret"}, 200),
            ({"authorization": "Bearer secret"}, 200),
            ({"x_api_key": "wrong"}, 401),
            ({}, 401),
        ]
        for headers, status in keys:
            answer = await door.ask(MESSAGES, HI | {"max_tokens": 2}, **headers)
            assert answer.status == status
        assert answer.error["type"] == "authentication_error"


# Blocks that are texts in another form, and the text that the model is shown.
CONTENT: Any = {"type": "content", "content": [{"type": "text", "text": "facts"}]}
FOUND: Any = {"type": "search_result", "title": "T", "source": "http://x"}
TEXTS: list[tuple[Any, str]] = [
    ({"type": "document", "source": {"type": "text", "data": "facts"}}, "facts"),
    ({"type": "document", "title": "T", "context": "C", "source": CONTENT}, "T\nC\nfacts"),
    ({"type": "document", "source": {"type": "content", "content": "facts"}}, "facts"),
    (FOUND | {"content": [{"type": "text", "text": one} for one in "ab"]}, "T\nhttp://x\na\nb"),
    ({"text": "facts"}, "facts"),
    ("facts", "facts"),
]


async def test_a_text_may_have_every_form(door: HttpDoor) -> None:
    say(door, "ok")
    referred = {"type": "tool_reference", "tool_name": "weather"}
    called = {"role": "assistant", "content": [{"type": "tool_use", "name": "weather"}]}
    for block, shown in TEXTS:
        result = {"type": "tool_result", "tool_use_id": "c1", "content": [referred, block]}
        said = [HI["messages"][0], called, {"role": "user", "content": [result, block]}]
        await door.served(MESSAGES, HI | {"messages": said})
        expected = f"<tool>weather\n{shown}(c1)<user>{shown}<assistant>"
        assert prompts(door)[-1].endswith(expected), block


async def test_a_call_in_the_history_is_accepted_however_it_is_written(door: HttpDoor) -> None:
    say(door, "ok")
    thought = {"type": "thinking", "signature": "s"}  # whose text was left out
    for given, city in (({"city": "Rom"}, "Rom"), ('{"city": "Rom"}', "Rom"), (None, ""), ("", "")):
        called = {"type": "tool_use", "name": "weather", "input": given}
        said = [HI["messages"][0], {"role": "assistant", "content": [thought, called]}]
        await door.served(MESSAGES, HI | {"messages": said})
        assert f"<assistant><tool_call>weather {city} </tool_call>" in prompts(door)[-1], given


async def test_thinking_of_earlier_turns_is_cleared(door: HttpDoor) -> None:
    say(door, "ok")
    a, b = ({"type": "thinking", "thinking": one} for one in "ab")
    call = {"type": "tool_use", "name": "weather", "id": "c1", "input": {}}
    said = HI["messages"] + [
        {"role": "assistant", "content": [a, "x"]},
        *HI["messages"],
        {"role": "assistant", "content": [b, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1"}]},
        {"role": "assistant", "content": [b, "y"]},
    ]
    turns = [{"keep": {"type": "thinking_turns", "value": value}} for value in (1, 2)]
    keeps: list[tuple[dict[str, Any], int]] = [({}, 0), ({"keep": "all"}, 1)]
    keeps += [({"keep": {"type": "all"}}, 1), (turns[0], 0), (turns[1], 1)]
    for keep, kept in keeps:
        edits = {"edits": [{"type": "clear_thinking_20251015", **keep}]}
        await door.served(MESSAGES, HI | {"messages": said, "context_management": edits})
        shown = prompts(door)[-1]
        assert [shown.count(f"<think>{one}</think>") for one in "ab"] == [kept, 2], keep


async def test_a_call_that_is_required_is_made_and_one_that_was_cut_off_keeps_its_text(
    door: HttpDoor,
) -> None:
    say(door, '[{"name": "weather", "arguments": {"city":"Köln"}}]')
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        message = await both(door, HI | {"tools": [WEATHER], "tool_choice": choice})
        assert message["stop_reason"] == "tool_use"
        assert [one["input"] for one in message["content"]] == [{"city": "Köln"}]
        assert door.path.requests[-1].sampling.grammar is not None
    say(door, CALLS[: CALLS.index("Köln") + 2], cut=True)
    (call,) = (await door.ask(MESSAGES, HI | {"tools": [WEATHER]})).fields["content"]
    assert call["input"] == {"INVALID_JSON": '{"city": "Kö'}


BLOCK: Any = {"role": "user", "content": [{"type": "unheard_of"}]}
PDF: Any = {"type": "document", "source": {"type": "base64", "data": ""}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"messages": None}, "messages is missing"),
    ({"messages": [BLOCK]}, "messages[0].content[0].type must be text, image"),
    ({"messages": [{"role": "user", "content": [PDF]}]}, "content[0].source.type must be text or"),
    ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role must be user or assist"),
    ({"system": [{"type": "image"}]}, "system[0].type must be text"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type must be custom"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type must be auto, any, none or tool"),
    ({"thinking": {"type": "deep"}}, "thinking.type must be enabled"),
    ({"context_management": {"edits": [{"type": "compact"}]}}, "context_management.edits[0].type"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers="),
    ({"n": 2}, "n=2 is not supported"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type must be"),
]


async def test_what_is_wrong_is_named(door: HttpDoor) -> None:
    assert not await taken(door, [(MESSAGES, HI | fields, words) for fields, words in WRONG])


async def test_errors_have_anthropics_form_and_end_a_stream_that_began() -> None:
    async with http_door() as door:
        few = HI | {"max_tokens": 5}
        for asked, status, kind in (
            ({"n": 2}, 400, "invalid_request_error"),
            ({"model": "other"}, 404, "not_found_error"),
            ({"tenant": "crowd"}, 529, "overloaded_error"),
            ({"tenant": "bug"}, 500, "api_error"),
        ):
            answer = await door.ask(MESSAGES, few | asked)
            assert (answer.status, answer.fields["type"]) == (status, "error")
            assert answer.error.keys() == {"type", "message"} and answer.error["type"] == kind
        lost = few | {"tenant": "lost", "stream": True}
        *_, last = frames((await door.ask(MESSAGES, lost)).body)
        error = {"type": "api_error", "message": "lost"}
        assert last == {"type": "error", "error": error, "request_id": None}

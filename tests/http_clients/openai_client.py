"""openai-python: what the tests of the lanes hold at a path whose tokens are known, here over a
server of the shipped model; and the helpers that read structured answers and calls."""

import json

import checks
import openai
from checks import CITIES, CITY, KEY, MODEL, STORY, TOOL_TOKENS, WEATHER, Dog, strict

CHAT = [{"role": "user", "content": STORY}]
ASKED = {"model": MODEL, "messages": CHAT, "temperature": 0}
ASKED_RESPONSE = {"model": MODEL, "input": STORY, "temperature": 0}
FLAT = {"type": "function", "name": "weather", "strict": True, "parameters": CITY}


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def test_a_chat_and_its_stream_say_the_same(url: str) -> None:
    create = client(url).chat.completions.create
    whole = create(**ASKED, max_completion_tokens=12)
    strict(whole)
    chunks = list(
        create(
            **ASKED, max_completion_tokens=12, stream=True, stream_options={"include_usage": True}
        )
    )
    for chunk in chunks:
        strict(chunk)
    *spoken, last = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in spoken)
    assert text == whole.choices[0].message.content
    assert not last.choices and last.usage == whole.usage


def test_structured_answers_are_parsed_whole_and_streamed(url: str) -> None:
    chats, responses = client(url).chat.completions, client(url).responses
    asked = ASKED | {"max_tokens": TOOL_TOKENS, "response_format": Dog}
    assert isinstance(chats.parse(**asked).choices[0].message.parsed, Dog)
    with chats.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        found = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(found, Dog) and "content.done" in kinds
    asked = ASKED_RESPONSE | {"max_output_tokens": TOOL_TOKENS, "text_format": Dog}
    assert isinstance(responses.parse(**asked).output_parsed, Dog)
    with responses.stream(**asked) as stream:
        list(stream)
        assert isinstance(stream.get_final_response().output_parsed, Dog)


def test_tools_of_a_chat(url: str) -> None:
    chats = client(url).chat.completions
    named = {"type": "function", "function": {"name": "weather"}}
    part = {"mode": "required", "tools": [named]}
    for choice in (named, "required", {"type": "allowed_tools", "allowed_tools": part}):
        asked = ASKED | {"tools": [WEATHER], "tool_choice": choice, "max_tokens": TOOL_TOKENS}
        asked |= {"parallel_tool_calls": False}
        message = chats.create(**asked).choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments)["city"] in CITIES and message.content is None
        with chats.stream(**asked) as stream:
            list(stream)
            final = stream.get_final_completion().choices[0].message
        assert final.tool_calls[0].function.arguments == call.function.arguments
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        turn = [*CHAT, message.model_dump(), result]
        assert chats.create(**ASKED | {"messages": turn}, tools=[WEATHER], max_tokens=8).choices


def test_tools_of_a_response(url: str) -> None:
    responses = client(url).responses
    named = {"type": "function", "name": "weather"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for choice in (named, "required", allowed):
        asked = ASKED_RESPONSE | {"tools": [FLAT], "tool_choice": choice}
        asked |= {"max_output_tokens": TOOL_TOKENS, "parallel_tool_calls": False}
        reply = responses.create(**asked)
        strict(reply)
        (call,) = reply.output
        assert json.loads(call.arguments)["city"] in CITIES
        assert [tool.name for tool in reply.tools] == ["weather"]
        with responses.stream(**asked) as stream:
            list(stream)
            assert stream.get_final_response().output[0].arguments == call.arguments
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        turn = [{"role": "user", "content": STORY}, call.model_dump(), result]
        more = ASKED_RESPONSE | {"input": turn, "tools": [FLAT], "max_output_tokens": 8}
        assert responses.create(**more).output_text


def test_errors_have_the_clients_types(url: str) -> None:
    one = client(url)
    for kind, ask in (
        (openai.NotFoundError, lambda: one.embeddings.create(model=MODEL, input="x")),
        (openai.NotFoundError, lambda: one.chat.completions.create(model="x", messages=CHAT)),
        (openai.NotFoundError, lambda: one.files.list()),
        (openai.BadRequestError, lambda: one.completions.create(model=MODEL, prompt="x " * 4000)),
        (openai.BadRequestError, lambda: one.chat.completions.create(**ASKED | {"n": 1000})),
    ):
        try:
            ask()
        except kind as error:
            assert error.code and error.type in ("invalid_request_error", "not_found_error")
        else:
            raise AssertionError(f"no {kind.__name__}")


def test_cache_hints_are_taken_and_usage_tells_what_was_cached(url: str) -> None:
    text = f"{openai.__version__} " + " ".join(f"Law {at}." for at in range(80))
    hints = {"prompt_cache_key": "agent", "prompt_cache_retention": "24h"}
    asked = {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0}
    create = client(url).chat.completions.create
    first, again = (create(**asked, **hints, max_completion_tokens=2) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens >= 128
    assert first.choices[0].message.content == again.choices[0].message.content
    reply = client(url).responses.create(
        model=MODEL, input=text + "!", max_output_tokens=16, **hints
    )
    strict(reply)
    agent = {"agent_hints": {"priority": 1, "osl": 2, "pause_seconds": 30}}
    body = {"session_id": "agent", "nvext": agent | {"cache_control": {"ttl": "1h"}}}
    chunks = create(
        **asked,
        max_completion_tokens=2,
        extra_body=body,
        stream=True,
        stream_options={"include_usage": True},
    )
    *_, last = chunks
    assert last.usage.prompt_tokens_details.cached_tokens >= 128
    raw = client(url).chat.completions.with_raw_response.create(
        **asked, max_completion_tokens=1, extra_body=body
    )
    assert "jdisagg-ignored-fields" not in raw.headers
    session = client(url).get("/sessions/agent", cast_to=object)
    assert session["workers"] and all(one["tokens"] >= 128 for one in session["workers"])
    assert client(url).delete("/sessions/agent", cast_to=object)["deleted"] is True


if __name__ == "__main__":
    checks.run(dict(globals()))

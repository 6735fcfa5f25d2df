"""openai-python: what the tests of the lanes hold at a path whose tokens are known, here over a
server of the shipped model; and the helpers that read structured answers and calls."""

import asyncio
import json
from typing import Literal

import checks
import openai
from checks import CITIES, KEY, MODEL, STORY, TOOL_TOKENS
from pydantic import BaseModel

CHAT = [{"role": "user", "content": STORY}]
ASKED = {"model": MODEL, "messages": CHAT, "temperature": 0}
ASKED_RESPONSE = {"model": MODEL, "input": STORY, "temperature": 0}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": list(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
}
FLAT = {"type": "function", "name": "weather", "strict": True, "parameters": CITY}
WEATHER = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": CITY}}


class Dog(BaseModel):
    name: Literal["Rex", "Bo"]
    age: Literal[1, 2, 3]


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def strict(reply: BaseModel) -> None:
    """Clients build their objects of whatever comes; this holds a reply against their types."""
    type(reply).model_validate(reply.model_dump(warnings=False, by_alias=True), strict=True)


def test_the_model_is_listed(url: str) -> None:
    assert [model.id for model in client(url).models.list()] == [MODEL]
    assert client(url).models.retrieve(MODEL).id == MODEL


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


def test_log_probabilities(url: str) -> None:
    reply = client(url).chat.completions.create(
        **ASKED, max_tokens=5, logprobs=True, top_logprobs=2
    )
    strict(reply)
    content = reply.choices[0].logprobs.content
    assert len(content) == reply.usage.completion_tokens
    assert all(one.logprob == one.top_logprobs[0].logprob for one in content)


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


def test_a_response_and_its_stream_say_the_same(url: str) -> None:
    responses = client(url).responses
    whole = responses.create(**ASKED_RESPONSE, max_output_tokens=12)
    strict(whole)
    events = list(responses.create(**ASKED_RESPONSE, max_output_tokens=12, stream=True))
    for event in events:
        strict(event)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    counted = responses.input_tokens.count(model=MODEL, input=STORY)
    assert counted.input_tokens == whole.usage.input_tokens


def test_completions(url: str) -> None:
    create = client(url).completions.create
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 8}
    several = create(**asked, prompt=["Once upon", "A dog"], n=2, logprobs=2)
    strict(several)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    echoed = create(**asked, prompt="Once upon", echo=True)
    assert echoed.choices[0].text == "Once upon" + several.choices[0].text
    pieces = [chunk.choices[0].text for chunk in create(**asked, prompt="A dog", stream=True)]
    assert "".join(pieces) == several.choices[2].text


async def test_asynchronous_streams_side_by_side_one_left_early(url: str) -> None:
    plain = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)

    async def read(leave: bool) -> str:
        stream = await plain.chat.completions.create(**ASKED, max_tokens=40, stream=True)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if leave:
                await stream.close()
                break
        return text

    left, *others = await asyncio.gather(*(read(number == 0) for number in range(8)))
    assert set(others) == {others[0]} and others[0].startswith(left)


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


if __name__ == "__main__":
    checks.run(dict(globals()))

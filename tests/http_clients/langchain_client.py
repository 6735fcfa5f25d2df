"""LangChain's ChatOpenAI and OpenAI."""

from typing import Literal

import checks
from checks import CITIES, KEY, MODEL, STORY, TOOL_TOKENS, Dog
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(city: Literal["Rome", "Ulm"]) -> str:
    """Of a city."""
    return "sunny"


def chat(url: str, **options: object) -> ChatOpenAI:
    options = {"max_tokens": 12, "temperature": 0} | options
    return ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model=MODEL, max_retries=0, **options)


def test_a_chat_and_its_stream_say_the_same(url: str) -> None:
    messages = [SystemMessage("Be brief"), HumanMessage([{"type": "text", "text": STORY}])]
    whole = chat(url).invoke(messages)
    assert whole.content and whole.response_metadata["finish_reason"] in ("stop", "length")
    assert whole.usage_metadata["output_tokens"] <= 12
    pieces = list(chat(url).stream(messages, stream_usage=True))
    assert "".join(piece.content for piece in pieces) == whole.content
    used = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert used == [used[0]] and used[0]["total_tokens"] == whole.usage_metadata["total_tokens"]


def test_a_tool_is_called_and_its_result_taken(url: str) -> None:
    for choice in ("any", "weather"):
        bound = chat(url, max_tokens=TOOL_TOKENS).bind_tools(
            [weather], tool_choice=choice, strict=True, parallel_tool_calls=False
        )
        reply = bound.invoke(STORY)
        call = reply.tool_calls[0]
        assert call["name"] == "weather" and call["args"]["city"] in CITIES
        streamed: AIMessage | None = None
        for piece in bound.stream(STORY):
            streamed = piece if streamed is None else streamed + piece
        assert [one["args"] for one in streamed.tool_calls] == [
            one["args"] for one in reply.tool_calls
        ]
        results = [ToolMessage("sunny", tool_call_id=one["id"]) for one in reply.tool_calls]
        free = chat(url).bind_tools([weather])
        assert free.invoke([HumanMessage(STORY), reply, *results]).content


def test_structured_output_by_schema_and_by_tool(url: str) -> None:
    for method in ("json_schema", "function_calling"):
        model = chat(url, max_tokens=TOOL_TOKENS).with_structured_output(
            Dog, method=method, strict=True
        )
        found = model.invoke(STORY)
        assert isinstance(found, Dog), found
    *_, last = chat(url, max_tokens=TOOL_TOKENS).with_structured_output(Dog).stream(STORY)
    assert isinstance(last, Dog)


def test_responses_are_chats_in_another_form(url: str) -> None:
    model = chat(url, use_responses_api=True)
    assert model.invoke(STORY).text
    assert "".join(piece.text for piece in model.stream(STORY)) == model.invoke(STORY).text
    bound = chat(url, use_responses_api=True, max_tokens=TOOL_TOKENS).bind_tools(
        [weather], tool_choice="weather", strict=True
    )
    reply = bound.invoke(STORY)
    (call,) = reply.tool_calls
    assert call["args"]["city"] in CITIES
    result = ToolMessage("sunny", tool_call_id=call["id"])
    assert model.bind_tools([weather]).invoke([HumanMessage(STORY), reply, result]).text
    dog = chat(url, use_responses_api=True, max_tokens=TOOL_TOKENS).with_structured_output(Dog)
    assert isinstance(dog.invoke(STORY), Dog)


if __name__ == "__main__":
    checks.run(dict(globals()))

"""LiteLLM, as a library, in front of a server that speaks OpenAI's API."""

import json
import os

import checks

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched
import litellm
from checks import CITIES, KEY, MODEL, STORY, TOOL_TOKENS, WEATHER, Dog

litellm.suppress_debug_info = True
MESSAGES = [{"role": "user", "content": STORY}]


def asked(url: str, **options: object) -> dict[str, object]:
    usual = {"max_tokens": 12, "temperature": 0, "messages": MESSAGES}
    return {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": KEY} | usual | options


def hosted(url: str, **options: object) -> dict[str, object]:
    """As LiteLLM calls a server of vLLM's kind."""
    return asked(url, **options) | {"model": f"hosted_vllm/{MODEL}"}


def test_a_chat_and_its_stream_say_the_same(url: str) -> None:
    for form in (asked, hosted):
        whole = litellm.completion(**form(url))
        assert whole.choices[0].message.content and whole.usage.completion_tokens <= 12
        stream = litellm.completion(
            **form(url, stream=True, stream_options={"include_usage": True})
        )
        pieces = list(stream)
        spoken = [piece for piece in pieces if piece.choices]
        text = "".join(piece.choices[0].delta.content or "" for piece in spoken)
        assert text == whole.choices[0].message.content
        (usage,) = [piece.usage for piece in pieces if getattr(piece, "usage", None)]
        assert usage.total_tokens == whole.usage.total_tokens


def test_a_tool_is_called_and_its_result_taken(url: str) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        more = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": TOOL_TOKENS}
        more |= {"parallel_tool_calls": False}
        message = litellm.completion(**asked(url, **more)).choices[0].message
        assert json.loads(message.tool_calls[0].function.arguments)["city"] in CITIES
        pieces = list(litellm.completion(**asked(url, stream=True, **more)))
        built = litellm.stream_chunk_builder(pieces).choices[0].message
        assert [one.function.arguments for one in built.tool_calls] == [
            one.function.arguments for one in message.tool_calls
        ]
        results = [
            {"role": "tool", "tool_call_id": one.id, "content": "sunny"}
            for one in message.tool_calls
        ]
        turn = [*MESSAGES, message.model_dump(), *results]
        assert litellm.completion(**asked(url, messages=turn, tools=[WEATHER])).choices


def test_structured_output(url: str) -> None:
    reply = litellm.completion(**asked(url, response_format=Dog, max_tokens=TOOL_TOKENS))
    assert Dog.model_validate_json(reply.choices[0].message.content)


def test_errors_have_litellms_types(url: str) -> None:
    for wrong, kind in (
        ({"temperature": -3}, litellm.BadRequestError),
        ({"messages": [{"role": "user", "content": "x " * 4000}]}, litellm.BadRequestError),
        ({"model": "openai/other"}, litellm.NotFoundError),
    ):
        try:
            litellm.completion(**asked(url) | wrong)
        except kind:
            continue
        raise AssertionError(f"{wrong} was answered")


if __name__ == "__main__":
    checks.run(dict(globals()))

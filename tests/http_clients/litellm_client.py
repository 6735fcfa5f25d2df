"""LiteLLM, as a library, in front of a server that speaks OpenAI's API."""

import json
import os

import checks

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched
import litellm
from checks import CITIES, KEY, MODEL, STORY, TOOL_TOKENS

litellm.suppress_debug_info = True
MESSAGES = [{"role": "user", "content": STORY}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": list(CITIES)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


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


async def test_an_asynchronous_chat(url: str) -> None:
    whole = await litellm.acompletion(**asked(url))
    stream = await litellm.acompletion(**asked(url, stream=True))
    text = "".join([piece.choices[0].delta.content or "" async for piece in stream])
    assert text == whole.choices[0].message.content


def test_log_probabilities(url: str) -> None:
    reply = litellm.completion(**asked(url, logprobs=True, top_logprobs=2))
    content = reply.choices[0].logprobs.content
    assert len(content) == reply.usage.completion_tokens
    assert all(len(one.top_logprobs) == 2 for one in content)


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
    schema = {"type": "json_schema", "json_schema": {"name": "dog", "strict": True, "schema": {
        "type": "object", "properties": {"name": {"enum": ["Rex", "Bo"]}}, "required": ["name"],
        "additionalProperties": False}}}  # fmt: skip
    reply = litellm.completion(**asked(url, response_format=schema, max_tokens=TOOL_TOKENS))
    assert json.loads(reply.choices[0].message.content)["name"] in ("Rex", "Bo")


def test_responses(url: str) -> None:
    more = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": KEY, "input": STORY}
    reply = litellm.responses(**more, max_output_tokens=8, temperature=0)
    assert reply.output[0].content[0].text
    kinds = [
        one.type
        for one in litellm.responses(**more, max_output_tokens=8, temperature=0, stream=True)
    ]
    assert kinds[0] == "response.created" and kinds[-1].startswith("response.")


def test_completions(url: str) -> None:
    asking = {"model": f"text-completion-openai/{MODEL}", "api_base": f"{url}/v1", "api_key": KEY}
    asking |= {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    whole = litellm.text_completion(**asking).choices[0].text
    pieces = litellm.text_completion(**asking, stream=True)
    assert "".join(piece.choices[0].text or "" for piece in pieces) == whole


def test_embeddings_are_refused_by_a_typed_error(url: str) -> None:
    try:
        litellm.embedding(model=f"openai/{MODEL}", api_base=f"{url}/v1", api_key=KEY, input=["x"])
    except litellm.NotFoundError as error:
        assert "/v1/embeddings" in str(error)
    else:
        raise AssertionError("embeddings were answered")


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

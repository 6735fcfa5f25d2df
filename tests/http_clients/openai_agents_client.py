"""OpenAI's Agents SDK, over chats and over responses."""

from typing import Literal

import checks
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import CITIES, KEY, MODEL, STORY, TOOL_TOKENS, Dog
from openai import AsyncOpenAI

set_tracing_disabled(True)
CALLED: list[str] = []


@function_tool
def weather(city: Literal["Rome", "Ulm"]) -> str:
    """Of a city."""
    CALLED.append(city)
    return "sunny"


def models(url: str) -> list[OpenAIChatCompletionsModel | OpenAIResponsesModel]:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    return [OpenAIChatCompletionsModel(MODEL, client), OpenAIResponsesModel(MODEL, client)]


def settings(**more: object) -> ModelSettings:
    return ModelSettings(**({"temperature": 0.0, "max_tokens": TOOL_TOKENS} | more))


async def test_a_run_and_its_stream_say_the_same(url: str) -> None:
    for model in models(url):
        agent = Agent("one", instructions="Be brief", model=model, model_settings=settings())
        whole = await Runner.run(agent, STORY)
        stream = Runner.run_streamed(agent, STORY)
        kinds = [event.type async for event in stream.stream_events()]
        assert "raw_response_event" in kinds
        assert whole.final_output and stream.final_output == whole.final_output


async def test_a_typed_answer(url: str) -> None:
    for model in models(url):
        agent = Agent("one", model=model, output_type=Dog, model_settings=settings())
        assert isinstance((await Runner.run(agent, STORY)).final_output, Dog)


async def test_a_tool_that_is_named_is_run_and_its_result_goes_back(url: str) -> None:
    for model in models(url):
        for choice in ("weather", "required"):
            CALLED.clear()
            one = settings(tool_choice=choice, parallel_tool_calls=False)
            agent = Agent("one", model=model, tools=[weather], model_settings=one)
            result = await Runner.run(agent, STORY)
            assert CALLED and set(CALLED) <= set(CITIES)
            assert result.final_output is not None


if __name__ == "__main__":
    checks.run(dict(globals()))

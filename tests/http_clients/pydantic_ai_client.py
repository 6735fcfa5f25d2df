"""Pydantic AI: agents with tools and typed answers, over chats, responses and messages."""

import checks
from checks import KEY, MODEL, STORY, TOOL_TOKENS, Dog
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS = {"max_tokens": TOOL_TOKENS, "temperature": 0.0}


def models(url: str) -> list[OpenAIChatModel | OpenAIResponsesModel | AnthropicModel]:
    return [*openai_models(url), anthropic_model(url)]


def anthropic_model(url: str) -> AnthropicModel:
    return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=url, api_key=KEY))


def openai_models(url: str) -> list[OpenAIChatModel | OpenAIResponsesModel]:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
    return [
        OpenAIChatModel(MODEL, provider=provider),
        OpenAIResponsesModel(MODEL, provider=provider),
    ]


async def test_a_run_and_its_stream_say_the_same(url: str) -> None:
    for model in models(url):
        agent = Agent(model, instructions="Be brief", model_settings=SETTINGS | {"max_tokens": 12})
        whole = await agent.run(STORY)
        assert whole.output and whole.usage.output_tokens <= 12
        async with agent.run_stream(STORY) as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True)]
        assert "".join(pieces) == whole.output


async def test_a_typed_answer_by_schema_and_by_tool(url: str) -> None:
    for model in models(url):
        forms = [ToolOutput(Dog)]
        if not isinstance(model, AnthropicModel):  # it has schemas for models of known names alone
            forms.append(NativeOutput(Dog))
        for form in forms:
            agent = Agent(model, output_type=form, model_settings=SETTINGS)
            found = await agent.run(STORY)
            assert isinstance(found.output, Dog)


async def test_a_typed_answer_that_is_streamed(url: str) -> None:
    for model in openai_models(url):
        agent = Agent(model, output_type=NativeOutput(Dog), model_settings=SETTINGS)
        async with agent.run_stream(STORY) as stream:
            *_, last = [one async for one in stream.stream_output()]
        assert isinstance(last, Dog)


async def test_tools_are_shown_and_turns_go_on(url: str) -> None:
    for model in models(url):
        agent = Agent(model, model_settings=SETTINGS | {"max_tokens": 12})

        @agent.tool_plain
        def weather(city: str) -> str:
            """Of a city."""
            return f"sunny in {city}"

        first = await agent.run(STORY)
        second = await agent.run("And then?", message_history=first.all_messages())
        assert first.output and second.output


if __name__ == "__main__":
    checks.run(dict(globals()))

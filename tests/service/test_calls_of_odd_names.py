"""Calls that begin within a thought, and calls of tools that the request lacks, over both APIs."""

from collections.abc import AsyncIterator

import openai
import pytest

from tests.service.http_doors import HttpDoor, http_door
from tests.service.test_chats_with_tools import (
    CALLS,
    TEMPLATE,
    WEATHER,
    Script,
    over_grpc,
    streamed,
    whole,
)


@pytest.fixture
async def door() -> AsyncIterator[HttpDoor]:
    async with http_door(Script(), template=TEMPLATE) as one:
        yield one


@pytest.fixture
async def client(door: HttpDoor) -> AsyncIterator[openai.AsyncOpenAI]:
    async with door.client() as one:
        yield one


@pytest.mark.parametrize("characters", [1, 3, 1000])
async def test_a_call_before_the_thought_was_closed_ends_it(
    door: HttpDoor, client: openai.AsyncOpenAI, characters: int
) -> None:
    path = door.path
    assert isinstance(path, Script)
    path.text, path.characters = "<think>\nI look.\n" + CALLS, characters
    http = await whole(client, tools=[WEATHER]), await streamed(client, tools=[WEATHER])
    for (said,) in (*http, await over_grpc(door, tools=[WEATHER])):
        assert [call[1] for call in said.calls] == ["weather", "weather"]
        assert (said.content, said.reasoning, said.end) == ("", "I look.", "tool_calls")


@pytest.mark.parametrize("characters", [1, 3, 1000])
async def test_a_call_of_a_tool_that_the_request_lacks_stays_text(
    door: HttpDoor, client: openai.AsyncOpenAI, characters: int
) -> None:
    path = door.path
    assert isinstance(path, Script)
    path.text, path.characters = CALLS.replace("weather", "call00003"), characters
    http = await whole(client, tools=[WEATHER]), await streamed(client, tools=[WEATHER])
    for (said,) in (*http, await over_grpc(door, tools=[WEATHER])):
        assert (said.content, said.calls, said.end) == (path.text, [], "stop")

"""The experts of tokens through the doors, over a path that has made them up: in choices, in the
last event of a stream, and in the Python client."""

import base64
import json
import struct
from typing import Any

import pytest

from jdisagg.client import AsyncClient
from jdisagg.prompt.experts import ChosenExperts
from tests.service.http_doors import CHATS, COMPLETIONS, HI, HttpDoor, events

ASKED: dict[str, Any] = {"return_routed_experts": True, "max_tokens": 3}


def positions(found: dict[str, Any], tokens: int) -> None:
    """All but the last token, each with its position as the expert of two layers."""
    assert found["shape"] == [tokens - 1, 2, 1] and found["dtype"] == "int16"
    numbers = struct.unpack(f"<{2 * (tokens - 1)}h", base64.b64decode(found["data"]))
    assert list(numbers) == [number for number in range(tokens - 1) for _ in range(2)]


async def test_each_choice_has_the_experts_of_its_prompt_and_answer(door: HttpDoor) -> None:
    asked = {**ASKED, "prompt": ["abc", "defgh"], "n": 2}
    choices = (await door.served(COMPLETIONS, asked)).fields["choices"]
    for choice, prompt in zip(choices, ("abc", "abc", "defgh", "defgh"), strict=True):
        positions(choice["routed_experts"], len(prompt) + 3)
        assert choice["logprobs"]["token_logprobs"] == [-0.5] * 3
    (chat,) = (await door.served(CHATS, {**ASKED, "messages": HI})).fields["choices"]
    positions(chat["routed_experts"], len(door.path.requests[-1].prompt_token_ids) + 3)
    (silent,) = (await door.served(COMPLETIONS, {"prompt": "a", "max_tokens": 2})).fields["choices"]
    assert "routed_experts" not in silent


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
async def test_the_last_event_of_a_stream_has_them(door: HttpDoor, path: str) -> None:
    what = {"prompt": "abc"} if path == COMPLETIONS else {"messages": HI}
    answer = await door.served(path, {**ASKED, **what, "stream": True})
    told = [json.loads(one) for one in events(answer.body) if one != "[DONE]"]
    choices = [one["choices"][0] for one in told if one["choices"]]
    assert [at for at, one in enumerate(choices) if "routed_experts" in one] == [len(choices) - 1]
    tokens = len(door.path.requests[-1].prompt_token_ids) + 3
    positions(choices[-1]["routed_experts"], tokens)


async def test_the_client_joins_them(door: HttpDoor) -> None:
    async with AsyncClient(f"127.0.0.1:{door.grpc_port}") as client:
        (choice,) = (await client.complete("abc", **ASKED)).choices
    found = choice.routed_experts
    assert found is not None
    positions(found.as_json(), 6)


def test_a_record_that_begins_at_the_start_again_adds_one_position() -> None:
    """As after a preemption, when a prefill computes prompt and answer again."""
    records = [ChosenExperts(1, 2, bytes(range(4 * end))[-4 * own :]) for end, own in _SHAPES]
    joined = ChosenExperts.joined([None, *records])
    assert joined is not None and joined.data == bytes(range(20)) and joined.positions == 5


_SHAPES = ((3, 3), (4, 1), (5, 5))

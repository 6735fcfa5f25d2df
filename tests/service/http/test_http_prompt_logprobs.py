"""Log-probabilities of prompts through the HTTP door, over a path that has made them up: vLLM's
field, and OpenAI's echo, as those who score texts ask for it."""

import json
from typing import Any

import pytest

from tests.service.doors import expected_tokens
from tests.service.http_doors import CHATS, COMPLETIONS, HttpDoor, events


async def choices(door: HttpDoor, **asked: Any) -> list[dict[str, Any]]:
    answer = await door.served(COMPLETIONS, asked)
    return answer.fields["choices"]


def entry(logprob: float, rank: int, text: str) -> dict[str, object]:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}


def told(prompt: str) -> list[object]:
    """Of the fake path, with two likely tokens."""
    return [
        None,
        *(
            {str(ord(one)): entry(-1.5, 2, one), str(ord(one) + 1): entry(-0.25, 1, after)}
            for one, after in ((one, chr(ord(one) + 1)) for one in prompt[1:])
        ),
    ]


async def test_a_prompts_logprobs_are_told_by_token_id(door: HttpDoor) -> None:
    asked = {"max_tokens": 2, "prompt_logprobs": 2}
    found = await choices(door, **asked, prompt=["abc", "x"], n=2)
    assert [one["prompt_logprobs"] for one in found] == [*2 * [told("abc")], *2 * [told("x")]]
    assert all(one["logprobs"] is None for one in found)
    chat = (
        await door.ask(CHATS, {**asked, "messages": [{"role": "user", "content": "hi"}]})
    ).fields
    whole = "".join(map(chr, door.path.requests[-1].prompt_token_ids))
    assert chat["prompt_logprobs"] == told(whole)
    assert "prompt_logprobs" not in (await door.ask(COMPLETIONS, {"prompt": "ab"})).fields


async def test_an_echoed_prompt_stands_first_in_the_logprobs(door: HttpDoor) -> None:
    (one,) = await choices(door, prompt="abc", echo=True, logprobs=2, max_tokens=1)
    made = expected_tokens(door.path.requests[0], 0)[0]
    assert one["text"] == "abc" + chr(made)
    assert one["logprobs"] == {
        "tokens": ["a", "b", "c", chr(made)],
        "token_logprobs": [None, -1.5, -1.5, -0.5],
        "top_logprobs": [None, {"b": -1.5, "c": -0.25}, {"c": -1.5, "d": -0.25}, {chr(made): -0.5}],
        "text_offset": [0, 1, 2, 3],
    }
    assert "prompt_logprobs" not in one
    asked = {"echo": True, "logprobs": 0, "prompt_logprobs": 2}
    (both,) = await choices(door, prompt="abc", max_tokens=1, **asked)
    assert both["prompt_logprobs"] == told("abc")
    assert both["logprobs"]["top_logprobs"][:2] == [None, {"b": -1.5}]


@pytest.mark.parametrize("most", [0, 1])
async def test_in_a_stream_the_prompt_comes_with_the_first_chunk(door: HttpDoor, most: int) -> None:
    asked = {"prompt": "abc", "echo": True, "logprobs": 2, "max_tokens": most, "prompt_logprobs": 2}
    (whole,) = await choices(door, **asked)
    assert whole["logprobs"]["token_logprobs"] == [None, -1.5, -1.5, -0.5][: 3 + most]
    assert whole["finish_reason"] == "length" and len(whole["text"]) == 3 + most
    streamed = await door.ask(COMPLETIONS, {**asked, "stream": True})
    (chunk,) = (json.loads(one)["choices"][0] for one in events(streamed.body)[:-1])
    assert chunk == whole
    refused = await door.ask(COMPLETIONS, {"prompt": "abc", "max_tokens": 0})
    assert refused.status == 400 and "max_tokens" in refused.error["message"]


async def test_a_token_without_text_of_its_own_stands_where_the_next_begins(door: HttpDoor) -> None:
    (one,) = await choices(door, prompt="aéb", echo=True, logprobs=0, max_tokens=0)
    assert one["logprobs"]["tokens"] == ["a", "", "é", "b"]
    assert one["logprobs"]["text_offset"] == [0, 1, 1, 2]


async def test_more_numbers_than_a_reply_holds_are_refused(door: HttpDoor) -> None:
    asked = {"prompt": ["x" * 400] * 200, "prompt_logprobs": 20, "max_tokens": 1}
    answer = await door.ask(COMPLETIONS, asked)
    assert answer.status == 400
    assert "prompt_logprobs: " in answer.error["message"] and "at most" in answer.error["message"]

"""What clients of OpenAI, Anthropic and Dynamo tell about their requests reaches the request as
hints, and what has no meaning is named."""

import json
from typing import Any

import pytest

from jdisagg.prompt.hints import Hints, Retention
from jdisagg.request import Request
from jdisagg.service.http.hints import USUAL_WEIGHT
from tests.service.chats import TEMPLATE, prompts
from tests.service.http_doors import CHATS, MESSAGES, RESPONSES, HttpDoor, http_door, taken

HI: Any = {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
ASKED = {CHATS: HI, MESSAGES: HI, RESPONSES: {"input": "hi"}}
EPHEMERAL = {"type": "ephemeral"}
PAUSE = {"nvext": {"agent_hints": {"pause_seconds": 40}}}
NEGATIVE = {"nvext": {"agent_hints": {"pause_seconds": -1}}}


def retained(seconds: float, weight: float = USUAL_WEIGHT) -> Retention:
    return Retention(weight, seconds)


async def sent(door: HttpDoor, path: str, asked: dict[str, Any]) -> tuple[Request, str]:
    answer = await door.ask(path, asked)
    assert answer.status == 200, answer.body
    return door.path.requests[-1], answer.headers.get("jdisagg-ignored-fields", "")


@pytest.mark.parametrize("path", ASKED)
async def test_each_name_gives_the_one_form_and_none_gives_nothing(path: str) -> None:
    async with http_door(template=TEMPLATE) as door:
        agent = {"agent_hints": {"priority": 2, "osl": 40, "speculative_prefill": True}}
        for fields, hints, ignored in (
            ({}, None, ""),
            ({"prompt_cache_key": "k"}, Hints("k"), ""),
            ({"session_id": "s", "prompt_cache_key": "k"}, Hints("s"), ""),
            (
                {"session_id": "s", "nvext": {"agent_hints": {"pause_seconds": 40}}},
                Hints("s", pause_seconds=40.0),
                "",
            ),
            ({"prompt_cache_retention": "24h"}, Hints("", retained(86_400.0)), ""),
            ({"prompt_cache_retention": "in_memory"}, Hints("", retained(600.0)), ""),
            ({"cache_control": EPHEMERAL}, Hints("", retained(300.0)), ""),
            ({"cache_control": EPHEMERAL | {"ttl": "1h"}}, Hints("", retained(3600.0)), ""),
            (
                {"nvext": agent | {"annotations": ["a"]}},
                Hints("", retained(300.0, USUAL_WEIGHT + 2), answer_tokens=40),
                "nvext.annotations, nvext.agent_hints.speculative_prefill",
            ),
        ):
            request, left = await sent(door, path, ASKED[path] | fields)
            assert (request.hints, set(left.split(", "))) == (hints, set(ignored.split(", ")))


async def test_a_breakpoint_retains_the_prompt_up_to_its_block() -> None:
    async with http_door(template=TEMPLATE) as door:
        system = [
            {"type": "text", "text": "s" * 300, "cache_control": EPHEMERAL | {"ttl": "1h"}},
            {"type": "text", "text": "t" * 100},
        ]
        request, _ = await sent(door, MESSAGES, HI | {"system": system})
        hints = request.hints
        assert hints is not None and hints.retention == retained(3600.0)
        tokens = len(request.prompt_token_ids)
        # one token a character
        end = prompts(door)[-1].rindex("s" * 300) + 300
        assert tokens > 400 and abs(hints.retained_tokens - end) < 40
        last = {"role": "user", "content": [{"type": "text", "text": "x"}]}
        last["content"][0]["cache_control"] = EPHEMERAL
        request, _ = await sent(door, CHATS, HI | {"messages": [*HI["messages"], last]})
        assert request.hints is not None and request.hints.retention == retained(300.0)
        assert request.hints.retained_tokens in (0, len(request.prompt_token_ids))


async def test_wrong_hints_are_refused_with_their_names() -> None:
    async with http_door(template=TEMPLATE) as door:
        block = {"type": "text", "text": "x", "cache_control": {"ttl": "2h"}}
        marked = {"messages": [{"role": "user", "content": [block]}]}
        rows = [
            (CHATS, HI | {"prompt_cache_retention": "1y"}, "prompt_cache_retention must be one of"),
            (MESSAGES, HI | {"cache_control": {"ttl": "2h"}}, "cache_control.ttl must be one of"),
            (MESSAGES, HI | marked, "messages[0].content[0].cache_control.ttl must be one of"),
            (CHATS, HI | {"session_id": 3}, "session_id must be a string"),
            (CHATS, HI | {"prompt_cache_key": "k" * 300}, "prompt_cache_key may hold at most 256"),
            (CHATS, HI | PAUSE, "nvext.agent_hints.pause_seconds=40 is that of a session"),
            (CHATS, HI | {"session_id": "s"} | NEGATIVE, "pause_seconds must be in [0, 86400"),
            (CHATS, HI | {"session_params": {"id": "s"}}, "its key as session_id"),
        ]
        assert not await taken(door, rows)
        huge = {"messages": [{"role": "user", "content": [block | {"x": 12345}]}]}
        for path in (CHATS, MESSAGES):
            raw = json.dumps(HI | huge).replace("12345", "1e999").encode()
            answer = await door.ask(path, raw=raw)
            assert answer.status == 400 and "64-bit floats" in answer.error["message"]

"""The HTTP door over the real engine: what it says gRPC says, too, and what a client leaves is
freed."""

import asyncio
import json
from typing import Any

import openai
import pytest
import pytest_asyncio

from jdisagg.config import LimitsConfig, ServiceConfig
from jdisagg.request import Grammar, GrammarKind
from jdisagg.settings.timeouts import RequestTimeouts, Timeouts
from tests.end_to_end.doors import SENTENCE, Served, mixed_requests, served
from tests.end_to_end.schemas import random_schema
from tests.service.doors import FakePath
from tests.service.http_doors import HttpDoor
from tests.service.parity import both
from tests.shapes import config
from tests.time_scale import seconds

pytestmark = [pytest.mark.ci, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door():
    patient = Timeouts(request=RequestTimeouts(grammar_seconds=seconds(60)))
    limits = LimitsConfig(handoff_lease_seconds=5.0, timeouts=patient)
    engine = config(limits=limits)
    async with served(engine, ServiceConfig(port=0, http_port=0, drain_seconds=5.0)) as door:
        yield door


def http(door: Served) -> HttpDoor:
    return HttpDoor(FakePath(), door.server)


def with_grammars() -> list[dict[str, Any]]:
    grammars = (
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(random_schema(1))),
        Grammar(GrammarKind.JSON_OBJECT),
        Grammar(GrammarKind.REGEX, "[0-9]{3}-[0-9]{4}"),
        Grammar(GrammarKind.LARK, 'start: ("a" | "b")+'),
        Grammar.of_choices(("one dog", "two dogs", "three")),
    )
    return [
        {"prompt": SENTENCE, "max_tokens": 30, "seed": 7, "n": 1 + at % 2, "grammar": grammar}
        for at, grammar in enumerate(grammars)
    ]


async def test_both_doors_give_the_same_ids_text_and_log_probabilities(door: Served) -> None:
    chats: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": SENTENCE}], "max_tokens": 20, "seed": seed}
        for seed in range(4)
    ]
    requests = [*map(dict, mixed_requests(20, seed=5)), *chats, *with_grammars()]
    await asyncio.gather(
        *(
            both(http(door), door.client, asked, stream=number % 2 == 0, within=1e-3)
            for number, asked in enumerate(requests)
        )
    )
    await door.quiet()


async def test_openais_client_chats(door: Served) -> None:
    async with http(door).client() as client:
        (model,) = [model async for model in client.models.list()]
        messages: Any = [{"role": "user", "content": "Tell me a story"}]
        asked: dict[str, Any] = {"model": model.id, "messages": messages, "temperature": 0}
        whole = await client.chat.completions.create(**asked, max_tokens=20)
        stream = await client.chat.completions.create(**asked, max_tokens=20, stream=True)
        pieces = [chunk.choices[0].delta.content async for chunk in stream]
        assert whole.choices[0].message.content == "".join(piece or "" for piece in pieces)
        with pytest.raises(openai.BadRequestError, match="context of 512"):
            await client.chat.completions.create(**asked, max_tokens=512)

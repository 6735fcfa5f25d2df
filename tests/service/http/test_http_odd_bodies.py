"""Bodies of which a server might read a part only, and bodies of any JSON at all."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jdisagg.config import ServiceConfig
from jdisagg.service.http.openapi import openapi_json
from tests.service.chats import SCHEMA, TEMPLATE, WEATHER
from tests.service.http.request_fields import TEMPLATE as SHOWN
from tests.service.http_doors import CHATS, HI, MESSAGES, USUAL, HttpDoor, http_door

ASK: dict[str, dict[str, Any]] = USUAL | {
    "/v1/chat/completions/render": {"messages": HI},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/responses/input_tokens": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/sleep": {},
    "/wake_up": {},
    "/update_weights_from_disk": {"model_path": "x"},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "y"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
}
FORM: Any = {"type": "json_schema", "schema": SCHEMA}

REFUSED = [
    ("/tokenize", {"prompt": ["a", "b"]}, "prompt has 2 prompts"),
    ("/tokenize", {"prompt": [[1], [2]]}, "prompt has 2 prompts"),
    (CHATS, {"thinking": {"type": "some"}}, "thinking.type must be"),
    (CHATS, {"thinking": "some"}, "thinking must be true or false"),
    (MESSAGES, {"output_config": {"format": FORM}, "output_format": FORM}, "both have a format"),
]


async def test_what_would_be_used_by_half_is_refused() -> None:
    async with http_door(template=TEMPLATE) as door:
        for path, more, words in REFUSED:
            answer = await door.ask(path, ASK[path] | more)
            assert answer.status == 400 and words in answer.error["message"], answer.body


async def test_stop_and_stop_sequences_both_end_a_message() -> None:
    async with http_door(template=TEMPLATE) as door:
        await door.ask(MESSAGES, ASK[MESSAGES] | {"stop": "a", "stop_sequences": ["b"]})
        assert door.path.requests[-1].sampling.stop == ("a", "b")


async def test_odd_bodies_are_refused_and_noted_as_ever() -> None:
    """odd_bodies.json has, by path, bodies with the status, the `param` of the error and the header
    with ignored fields that each gets."""
    table: Any = json.loads((Path(__file__).parent / "odd_bodies.json").read_text())
    assert sum(map(len, table.values())) > 400
    changed = []
    async with http_door(template=SHOWN, service=ServiceConfig(kept_responses_mib=1)) as door:
        for path, body, *expected in ((path, *row) for path, rows in table.items() for row in rows):
            answer = await door.ask(path, body)
            param = answer.error.get("param") if answer.status != 200 else None
            got = [answer.status, param, answer.headers.get("jdisagg-ignored-fields", "")]
            if got != expected:
                changed.append((path, body, expected, got))
    assert not changed


OPENAPI: Any = json.loads(openapi_json())["paths"]
FIELDS = {
    path: [
        *OPENAPI[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    ]
    for path in ASK
}
WORDS = (
    "",
    "a",
    "\ud800",
    "\x00",
    "auto",
    "required",
    "user",
    "text",
    "function_call",
    "compaction",
)
KEYS = ("type", "role", "content", "text", "name", "id", "function", "parameters", "input", "tools")
KEYS += ("schema", "json_schema", "strict", "format", "pattern", "const", "enum", "items", "source")
SEEN: list[Any] = [HI, [WEATHER], SCHEMA, FORM, {"type": "item_reference", "id": "x"}]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.sampled_from(WORDS),
    st.sampled_from(SEEN),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=8,
)
BODIES = st.sampled_from([*ASK]).flatmap(
    lambda path: st.tuples(
        st.just(path), st.dictionaries(st.sampled_from(FIELDS[path]), VALUES, max_size=4)
    )
)


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_body_is_an_error_of_the_server(count: int) -> None:
    async def answered(door: HttpDoor, path: str, body: dict[str, Any]) -> None:
        answer = await door.ask(path, ASK[path] | {"max_tokens": 1} | body)
        assert answer.status != 500, (path, body, answer.body)
        assert b'"type":"server_error"' not in answer.body, (path, body, answer.body)

    with asyncio.Runner() as runner:
        service = ServiceConfig(kept_responses_mib=1)
        opened = http_door(template=TEMPLATE, service=service)
        door = runner.run(opened.__aenter__())

        @settings(
            max_examples=count,
            derandomize=count < 1000,
            deadline=None,
            database=None,
            suppress_health_check=[*HealthCheck],
        )
        @given(BODIES)
        def ask(case: tuple[str, dict[str, Any]]) -> None:
            runner.run(answered(door, *case))

        try:
            ask()
        finally:
            runner.run(opened.__aexit__(None, None, None))

"""Both APIs make the same request of the same parameters, and answer with the same ids, text,
log-probabilities, ends and usage."""

import json
import random
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from jdisagg.client import AsyncClient
from jdisagg.errors import InvalidRequestError
from jdisagg.request import Grammar, GrammarKind, SamplingOptions
from jdisagg.service.grpc import common_pb2, generation_pb2_grpc
from jdisagg.service.grpc import generation_pb2 as pb
from jdisagg.service.http.chat import chat_prompt
from jdisagg.service.http.fields import Fields
from tests.service.chats import TEMPLATE as TOOLS_TEMPLATE
from tests.service.chats import Script
from tests.service.doors import MODEL
from tests.service.http_doors import CHATS, http_door
from tests.service.parity import both

TEMPLATE = (
    "{% if first %}{{ first }}{% endif %}{% for m in messages %}<{{ m.role | upper }}>"
    "{{ m.content }}{% endfor %}>"
)
# What an answer is held to, as the arguments of our client; few, for each is tried in a process.
RESTRICTIONS: tuple[dict[str, Any], ...] = (
    {"allowed_token_ids": [40, 41, 42, 50]},
    {"bad_words": ["A", "BC"]},
    {"grammar": Grammar(GrammarKind.REGEX, "[A-F]{3}-[0-9]{4}")},
    {"grammar": Grammar(GrammarKind.LARK, 'start: ("a" | "b")+')},
    {"grammar": Grammar(GrammarKind.JSON_OBJECT)},
    {"grammar": Grammar(GrammarKind.JSON_SCHEMA, '{"enum": ["A", 17, {"B": null}]}')},
    {"grammar": Grammar.of_choices(("ONE DOG", "TWO DOGS", "3"))},
)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789.,"


def some_request(draw: random.Random, number: int) -> dict[str, Any]:
    """Arguments of our own client, each parameter set in about half of the requests."""
    text = "".join(draw.choice(LETTERS) for _ in range(draw.randint(1, 30)))
    prompts: tuple[dict[str, Any], ...] = (
        {"prompt": text},
        {"token_ids": list(text.encode())},
        {
            "messages": [{"role": "system", "content": "BE"}, {"role": "user", "content": text}],
            "continue_final_message": draw.random() < 0.5 and bool(text.strip()),
            "chat_template_kwargs": draw.choice([{}, {"first": "NOW"}, {"other": [1, None]}]),
        },
    )
    most = draw.randint(1, 24)
    options: dict[str, Any] = {
        "temperature": draw.choice([0.0, 0.5, 1.0, 3.0]),
        "top_k": draw.randint(0, 90),
        "top_p": draw.uniform(0.1, 1.0),
        "min_p": draw.uniform(0.0, 1.0),
        "presence_penalty": draw.uniform(-2, 2),
        "frequency_penalty": draw.uniform(-2, 2),
        "repetition_penalty": draw.uniform(0.5, 2.0),
        "logit_bias": {draw.randrange(MODEL.vocabulary): draw.uniform(-100, 100)},
        "min_tokens": draw.randint(0, most),
        "stop": draw.sample(LETTERS, draw.randint(1, 3)),
        "stop_token_ids": draw.sample(range(MODEL.vocabulary), 3),
        "ignore_eos": draw.random() < 0.5,
        "include_stop_str_in_output": draw.random() < 0.5,
        "skip_special_tokens": draw.random() < 0.5,
        "logprobs": draw.randint(0, 5),
        "prompt_logprobs": draw.randint(0, 5),
        "n": draw.randint(1, 3),
        "priority": draw.randint(-5, 5),
        "tenant": draw.choice("ab"),
        "cache_salt": draw.choice(["", "salt"]),
        "deadline_seconds": 600.0,
    }
    chosen = {name: value for name, value in options.items() if draw.random() < 0.5}
    if (at := number % (2 * len(RESTRICTIONS))) < len(RESTRICTIONS):
        chosen |= RESTRICTIONS[at]
    return {**prompts[number % 3], "seed": draw.getrandbits(40), "max_tokens": most, **chosen}


async def test_random_requests_are_the_same_at_both_doors_and_get_the_same() -> None:
    """Of all parameters, and of those that only one field of HTTP has. The model has no reasoning
    to limit (tests/service/http/test_http_thinking_budget.py), and no experts."""
    draw = random.Random(7)
    requests = [some_request(draw, number) for number in range(21)]
    every = SamplingOptions.__annotations__.keys() | {"priority", "tenant", "cache_salt"}
    drawn = {name for asked in requests for name in asked}
    assert every - {"thinking_budget", "return_routed_experts"} <= drawn
    async with http_door(template=TEMPLATE) as door, AsyncClient(door.target) as client:
        for number, asked in enumerate(requests):
            await both(door, client, asked, stream=number % 2 == 0)
            one, other = (replace(made, life=0, request_id="") for made in door.path.requests[-2:])
            assert one == other, asked
        ignored = {"prompt": "A", "seed": 1, "max_tokens": 1, "user": "me", "n": None}
        assert (
            await door.ask("/v1/completions", ignored | {"top_k": -1, "best_of": 1})
        ).status == 200
        assert door.path.requests[-1].sampling.top_k == 0


CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "a"}, "b"]},
        {"role": "developer", "content": "c"},
        {"role": "user", "content": ""},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "why",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": tr'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "d"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "so"}, "e"]},
        {"role": "user", "content": "f", "name": "Ann"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {"type": "object"},
                "return": {"type": "string"},
            },
        },
        {"name": "g", "description": "of the other API"},
    ],
    "documents": [{"title": "t", "text": "d"}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
    "chat_template_kwargs": {"enable_thinking": False},
}


async def test_a_chat_over_grpc_is_the_chat_that_http_reads() -> None:
    """Mappings, jdisagg's own classes and a body that is sent as it is become one request."""
    body = CHAT | {"max_tokens": 3, "seed": 1, "rid": "r", "cache_salt": "s", "frobnicate": 1}
    read = chat_prompt(Fields.of(json.dumps(CHAT).encode()))
    own = CHAT | {"messages": read.messages, "tools": read.tools}
    said = {"max_tokens": 3, "seed": 1, "request_id": "r", "cache_salt": "s"}
    async with http_door(Script(), template=TOOLS_TEMPLATE) as door:
        await door.served(CHATS, body)
        async with AsyncClient(door.target) as client:
            for options in (CHAT, own):
                await client.complete(**options, **said)
        async with grpc.aio.insecure_channel(door.target) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.Generate(
                pb.GenerateRequest(
                    chat_json=json.dumps(body | {"seed": 2}),
                    sampling=common_pb2.SamplingParams(seed=1),
                )
            )
            async for _ in call:
                pass
            ignored = dict(await call.trailing_metadata())["jdisagg-ignored-fields"]
    first, *others = [replace(one, life=0) for one in door.path.requests]
    assert others == [first] * 3
    assert ignored == "frobnicate"


async def test_hints_in_the_body_of_a_chat_reach_the_request() -> None:
    block = {"type": "text", "text": "a" * 30, "cache_control": {"type": "ephemeral"}}
    body = {"messages": [{"role": "user", "content": [block, "b" * 30]}], "session_id": "s"}
    body |= {"nvext": {"agent_hints": {"osl": 40}}, "rid": "r", "seed": 1, "max_tokens": 2}
    async with http_door() as door, grpc.aio.insecure_channel(door.target) as channel:
        await door.served(CHATS, body)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        async for _ in stub.Generate(pb.GenerateRequest(chat_json=json.dumps(body))):
            pass
    over_http, over_grpc = [replace(one, life=0) for one in door.path.requests]
    assert over_grpc == over_http and over_http.hints is not None
    assert over_http.hints.session == "s" and 0 < over_http.hints.retained_tokens < 70


async def test_a_chat_whose_body_asks_for_answers_is_resumed_where_they_stopped() -> None:
    """The number of answers and the seed may stand in the body."""
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], "n": 2, "seed": 3})
    had = [pb.AcceptedTokens(child=1, token_ids=[65, 66])]
    again = pb.GenerateRequest(chat_json=body, request_id="r", resumption=1, accepted=had)
    async with http_door() as door, grpc.aio.insecure_channel(door.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        async for _ in stub.Generate(again):
            pass
    (asked,) = door.path.requests
    assert asked.sampling.n == 2 and asked.resumption is not None
    assert [one.token_ids for one in asked.resumption.children] == [(), (65, 66)]


async def test_a_chats_body_that_is_wrong_is_refused_by_the_path_of_its_field() -> None:
    resumed = {"resumption": {"life": 1}, "request_id": "r", "seed": 1, "stream": True}
    async with http_door() as door, AsyncClient(door.target) as client:
        for options, words in (
            ({"messages": [{"role": 3}]}, r"messages\[0\].role must be"),
            ({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, r"tools\[0\]"),
        ):
            with pytest.raises(InvalidRequestError, match=words):
                await client.complete(**options)
        async with grpc.aio.insecure_channel(door.target) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            for body, words in (
                ("[1]", "must be a JSON object"),
                (json.dumps(CHAT | resumed), "leave it out of the chat's body"),
            ):
                with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
                    await stub.Generate(pb.GenerateRequest(chat_json=body)).read()
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

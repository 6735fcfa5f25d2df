"""Both APIs make the same request of the same parameters, and answer with the same ids, text,
log-probabilities, ends and usage."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from jdisagg.client import AsyncClient
from jdisagg.errors import InvalidRequestError
from jdisagg.request import Grammar, GrammarKind, SamplingOptions
from jdisagg.service.client.request import GenerateOptions
from jdisagg.service.client.request import asked as client_request
from jdisagg.service.grpc import generation_pb2 as pb
from jdisagg.service.grpc.wire_generation import client_request_from_proto, client_request_to_proto
from jdisagg.service.http.chat import chat_prompt
from jdisagg.service.http.fields import Fields
from tests.service.doors import MODEL
from tests.service.http_doors import http_door
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
    to limit (tests/service/http/test_http_thinking_budget.py)."""
    draw = random.Random(7)
    requests = [some_request(draw, number) for number in range(50)]
    every = SamplingOptions.__annotations__.keys() | {"priority", "tenant", "cache_salt"}
    assert every - {"thinking_budget"} <= {name for asked in requests for name in asked}
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


def test_a_chat_over_grpc_is_the_chat_that_http_reads() -> None:
    over_http = chat_prompt(Fields.of(json.dumps(CHAT).encode()))
    message = client_request_to_proto(client_request(None, GenerateOptions(**CHAT)))
    sent = pb.GenerateRequest.FromString(message.SerializeToString())
    over_grpc = client_request_from_proto(sent).prompt
    assert over_grpc == over_http
    assert over_http.messages[0].content == ("a", "b")
    assert over_http.messages[3].content is None
    assert over_http.tools[0].returns == {"type": "string"}
    assert over_http.arguments["documents"] == CHAT["documents"]
    objects = GenerateOptions(**CHAT | {"messages": over_http.messages, "tools": over_http.tools})
    again = client_request_to_proto(client_request(None, objects))
    assert client_request_from_proto(again).prompt == over_http, (
        "jdisagg's own classes mean the same"
    )


def test_content_and_parts_of_a_message_exclude_each_other() -> None:
    both = pb.ChatMessage(role="user", content="a", parts=["b"])
    request = pb.GenerateRequest(chat=pb.ChatMessages(messages=[both]))
    with pytest.raises(
        InvalidRequestError, match="content, parts and mixed_parts exclude each other"
    ):
        client_request_from_proto(request)

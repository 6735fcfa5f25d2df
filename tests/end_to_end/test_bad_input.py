"""Invalid input: a typed error at once that names subject, value and remedy, while other requests
are served.

Requests are sent over gRPC to a frontend with the shipped model's tokenizer, beside a stream that
must lose nothing."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from jdisagg.client import AsyncClient, ChatMessage
from jdisagg.config import ServiceConfig
from jdisagg.errors import ConfigError, InvalidRequestError, LayoutError
from jdisagg.service.server import GenerationServer
from launch.model import deployment
from models.tokenizer import Tokenizer
from tests import time_scale
from tests.service.doors import MODEL, FakePath, expected_tokens, make_frontend
from tests.shapes import LLAMA, config

GENERATE = "/jdisagg.v1.GenerationService/Generate"


@asynccontextmanager
async def busy_door() -> AsyncIterator[tuple[AsyncClient, str]]:
    """A server with a running stream, which ends whole when the block is left; and its address."""
    tokenizer, path = Tokenizer.from_directory(LLAMA), FakePath()
    model = replace(MODEL, vocabulary=tokenizer.vocabulary, context_tokens=256)
    server = GenerationServer(make_frontend(path, model, codec=tokenizer), ServiceConfig(port=0))
    target = f"127.0.0.1:{await server.start()}"
    async with AsyncClient(target) as client:
        path.gate.clear()
        events = client.generate("Once upon a time", max_tokens=40)
        seen = [await anext(events)]
        yield client, target
        path.gate.set()
        seen += [event async for event in events]
        tokens = [token for event in seen for token in event.token_ids]
        assert tuple(tokens) == expected_tokens(path.requests[0], 0)
        assert len(path.requests) == 1, "nothing of the others was let in"
    await server.drain()


async def mistaken(
    rows: list[tuple[dict[str, Any], str]], call: Callable[[dict[str, Any]], Any]
) -> list[object]:
    """The rows that were not refused with a message that has the pattern."""
    found: list[object] = []
    for options, pattern in rows:
        said = "served"
        try:
            await asyncio.wait_for(call(options), time_scale.seconds(10))
        except InvalidRequestError as error:
            said = error.message
        except TimeoutError:
            pass  # let in, where it waits as the running stream does
        if not re.search(pattern, said):
            found.append((str(options)[:60], said))
    return found


# One of each kind: `tests/dispatch/test_frontend.py` has all fields.
PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": float("nan")}, r"temperature must be in \[0.0, 100.0\], got nan"),
    ({"max_tokens": 2**62}, r"max_tokens must be in \[1, 2147483647\], got 4611686018427387904"),
    ({"min_tokens": 10**6, "max_tokens": None}, "min_tokens=1000000 exceeds the"),
    ({"stop": 5}, "stop=5 cannot be sent"),
    ({"stop": [b"\xff"]}, "stop=.*cannot be sent"),
    ({"stop_token_ids": [10**7]}, r"stop_token_ids\[0\]=10000000 is not a token id"),
    ({"logit_bias": [(2**40, 1.0)]}, r"logit_bias\[0\]=1099511627776 is not a token id"),
    ({"beams": 4}, "unknown sampling option beams; known are"),
]


async def test_bad_parameters_are_refused_by_name() -> None:
    async with busy_door() as (client, _):
        complete = lambda options: client.complete("a dog", **({"max_tokens": 8} | options))  # noqa: E731
        assert await mistaken(PARAMETERS, complete) == []


PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": []}, "token_ids is empty"),
    ({"messages": []}, "chat messages are empty"),
    (
        {"messages": [ChatMessage("a pirate", "arr")]},
        r"messages\[0\].role must be 1 to 64 letters, digits and _-., such as user, got 'a pirate'",
    ),
    (
        {"prompt": "the dog ran " * 200},
        (
            r"prompt has \d+ tokens; the model's context of 256 holds at most 255 and one new"
            r" token; shorten"
        ),
    ),
    (
        {"token_ids": [5] * 256},
        "prompt has 256 tokens; the model's context of 256 holds at most 255",
    ),
    ({"prompt": "x" * (10 << 20)}, "prompt has 10485760 bytes or more; at most 4194304 are taken"),
    (
        {"messages": [ChatMessage("user", "y " * (5 << 20))]},
        "has 10485760 bytes or more; at most 4194304",
    ),
    ({"prompt": "z" * (40 << 20)}, "the message is too large"),
    (
        {"prompt": "a big dog and a red ball " * 150_000},
        "prompt has more than 512 tokens in its first|prompt has .* tokens",
    ),
    ({"token_ids": [5] * (2 << 20)}, "prompt has 2097152 tokens"),
    ({"token_ids": [-1]}, r"token_ids\[0\]=-1 is not a token id of the model; they are 0 to"),
    ({"token_ids": [5, 10**6]}, r"token_ids\[1\]=1000000 is not a token id"),
    ({"token_ids": [2**62]}, r"token_ids\[0\]=4611686018427387904 is not a token id"),
    ({"token_ids": [2**70]}, "a value cannot be sent"),
    ({"prompt": "a \ud800 surrogate"}, "cannot be sent"),
    ({}, "give exactly one of prompt, token_ids, messages"),
]


async def test_bad_prompts_are_refused_by_name() -> None:
    async with busy_door() as (client, _):
        complete = lambda prompt: client.complete(**prompt, max_tokens=8)  # noqa: E731
        assert await mistaken(PROMPTS, complete) == []


NOT_UTF8 = "malformed or has text that is not valid UTF-8"
NOISE: list[tuple[dict[str, Any], str]] = [
    ({"data": b"\x0a\x04\xff\xfe\xfd\xfc"}, NOT_UTF8),
    ({"data": b"\x0a\x7fshort"}, "malformed"),
    ({"data": b"\xff\xff\xff\xff"}, "malformed"),
    ({"data": b"\x0a\x01a\x22\x06\x62\x04\xff\xfe\xfd\xfc"}, NOT_UTF8),
    ({"data": b""}, "prompt is missing: set one of text, token_ids, chat"),
]


async def test_bytes_that_are_no_request_are_refused() -> None:
    async with busy_door() as (_, target), grpc.aio.insecure_channel(target) as channel:

        async def send(row: dict[str, Any]) -> None:
            raw = {"request_serializer": bytes, "response_deserializer": bytes}
            try:
                async for _ in channel.unary_stream(GENERATE, **raw)(row["data"]):
                    pass
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert dict(error.trailing_metadata())["jdisagg-error"] == "InvalidRequestError"
                raise InvalidRequestError(error.details() or "") from None

        assert await mistaken(NOISE, send) == []


async def test_noise_on_the_port_ends_that_connection_alone() -> None:
    async with busy_door() as (_, target):
        for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40, b""):
            reader, writer = await asyncio.open_connection(*target.split(":"))
            writer.write(noise)
            if noise:
                await asyncio.wait_for(reader.read(), 30)
            writer.close()


async def test_text_services_refuse_alike() -> None:
    async with busy_door() as (client, _):
        rows = [({"text": "x" * (10 << 20)}, "at most 4194304")]
        assert await mistaken(rows, lambda row: client.tokenize(row["text"])) == []
        rows = [
            ({"token_ids": [token]}, rf"token_ids\[0\]={token} is not a token id")
            for token in (10**6, -1)
        ]
        assert await mistaken(rows, lambda row: client.detokenize(row["token_ids"])) == []


def test_devices_and_contexts_that_are_not_there_are_refused_with_the_numbers() -> None:
    with pytest.raises(LayoutError, match=r"prefill \(.*need 10 devices, and there are 8"):
        deployment(config(prefill="tp=8", decode="dp=2"))
    with pytest.raises(ConfigError, match=r"context_tokens=100000 exceeds the model's \d+; lower"):
        deployment(config(context=100_000))

"""Invalid input: a typed error at once that names subject, value and remedy, while other requests
are served.

Requests are sent over gRPC to a frontend with the shipped model's tokenizer, beside a stream that
must lose nothing. Invalid models and layouts are given to the code that the launch commands
share."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from jdisagg.client import AsyncClient, ChatMessage
from jdisagg.config import ServiceConfig
from jdisagg.errors import CheckpointError, ConfigError, InvalidRequestError, LayoutError
from jdisagg.service.server import GenerationServer
from launch.model import deployment
from models.tokenizer import Tokenizer
from tests import time_scale
from tests.service.doors import MODEL, FakePath, expected_tokens, make_frontend
from tests.shapes import LLAMA, MOE, config

NAN, INF = float("nan"), float("inf")
GENERATE = "/jdisagg.v1.GenerationService/Generate"
MANY = [f"stop {index}" for index in range(17)]


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


PARAMETERS: list[tuple[dict[str, Any], str]] = [
    *(
        ({"temperature": value}, r"temperature must be in \[0.0, 100.0\], got")
        for value in (-0.5, NAN, INF, -INF, 1e30)
    ),
    *(({"top_p": value}, r"top_p must be in") for value in (0.0, -0.1, 1.5, NAN)),
    *(({"min_p": value}, r"min_p must be in \[0.0, 1.0\]") for value in (-0.1, 1.1, NAN)),
    *(({"top_k": value}, r"top_k must be in \[0, ") for value in (-1, 2**40)),
    *(
        ({"max_tokens": value}, rf"max_tokens must be in \[1, 2147483647\], got {value}")
        for value in (0, -5, 2**62)
    ),
    (
        {"max_tokens": 10**9},
        (
            r"max_tokens=1000000000 and the prompt's \d+ tokens exceed the model's context of 256;"
            r" ask for at most"
        ),
    ),
    *(({"seed": value}, r"seed must be in \[0, ") for value in (-1, -(2**63))),
    *(
        ({"presence_penalty": value}, r"presence_penalty must be in \[-2.0, 2.0\]")
        for value in (-2.1, 3.0, NAN, INF)
    ),
    *(
        ({"frequency_penalty": value}, r"frequency_penalty must be in \[-2.0, 2.0\]")
        for value in (-9.0, 1e300, NAN)
    ),
    *(
        ({"repetition_penalty": value}, r"repetition_penalty must be in \[0.01, 100.0\]")
        for value in (0.0, -1.0, INF, NAN)
    ),
    *(({"logprobs": value}, r"logprobs must be in \[0, 20\]") for value in (-1, 21)),
    *(({"n": value}, r"n must be in \[1, 64\]") for value in (0, -2, 65, 2**60)),
    ({"min_tokens": 9, "max_tokens": 5}, r"min_tokens must be in \[0, 5\], got 9"),
    ({"min_tokens": 10**6, "max_tokens": None}, "min_tokens=1000000 exceeds the"),
    ({"stop": MANY}, "stop may hold at most 16, got 17"),
    ({"stop": [""]}, "stop must hold non-empty strings"),
    ({"stop": ["x" * 2000]}, "stop string bytes may hold at most 1024, got 2000"),
    ({"stop": 5}, "stop=5 cannot be sent"),
    ({"stop": [b"\xff"]}, "stop=.*cannot be sent"),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids may hold at most 64, got 65"),
    (
        {"stop_token_ids": [-1]},
        r"stop_token_ids\[0\]=-1 is not a token id of the model; they are 0 to",
    ),
    ({"stop_token_ids": [10**7]}, r"stop_token_ids\[0\]=10000000 is not a token id"),
    (
        {"logit_bias": [(index, 1.0) for index in range(513)]},
        "logit_bias may hold at most 512, got 513",
    ),
    ({"logit_bias": [(3, NAN)]}, r"logit_bias\[3\] must be in \[-100.0, 100.0\], got nan"),
    ({"logit_bias": [(3, 1.0), (3, 2.0)]}, "contains a token id twice"),
    ({"logit_bias": [(2**40, 1.0)]}, r"logit_bias\[0\]=1099511627776 is not a token id"),
    *(
        ({"deadline_seconds": value}, "deadline_seconds must be positive and finite, got")
        for value in (0.0, -3.0, NAN, INF)
    ),
    ({"priority": 2**40}, "priority must be in"),
    ({"request_id": "i" * 1000}, "request_id may hold at most 256 bytes"),
    ({"tenant": "t" * 1000}, "tenant may hold at most 256 bytes"),
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


def deploy(directory: Path, prefill: str = "tp=2", decode: str = "dp=2") -> None:
    deployment(config(directory=directory, prefill=prefill, decode=decode))


Spoil = Callable[[Path], object]


def without(field: str) -> Spoil:
    return lambda directory: edit(directory, lambda fields: fields.pop(field))


def stating(name: str, value: object) -> Spoil:
    return lambda directory: edit(directory, lambda fields: fields.update({name: value}))


def cut_to(size: int) -> Spoil:
    def cut(directory: Path) -> None:
        path = directory / "model.safetensors"
        path.write_bytes(path.read_bytes()[:size])

    return cut


def edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    fields = json.loads((directory / "config.json").read_text())
    change(fields)
    (directory / "config.json").write_text(json.dumps(fields))


TRUNCATED = r"model.safetensors.*(truncated|ends|bytes|header).*(fetch|again)"
NEEDED = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    "intermediate_size",
)
SPOILED: list[tuple[str, Spoil, str]] = [
    ("no directory", shutil.rmtree, "spoiled.*(does not exist|no config.json)"),
    ("an empty directory", lambda copy: shutil.rmtree(copy) or copy.mkdir(), "config.json"),
    *((f"weights cut to {size}", cut_to(size), TRUNCATED) for size in (0, 5, 300, 100_000)),
    ("no weights", lambda copy: (copy / "model.safetensors").unlink(), "safetensors"),
    *((f"no {name}", without(name), f"needed field '{name}' is missing") for name in NEEDED),
    ("a family of others", stating("model_type", "mamba"), "mamba"),
    ("no family", stating("model_type", None), "model_type"),
    ("a text", stating("hidden_size", "wide"), "hidden_size must be an integer"),
    ("too many layers", stating("num_hidden_layers", 9), "missing"),
    ("another width", stating("intermediate_size", 640), "of another shape"),
    (
        "an unknown rope",
        stating("rope_scaling", {"rope_type": "magic", "factor": 2.0}),
        "rope_type 'magic'",
    ),
    (
        "an unknown quantization",
        stating("quantization_config", {"quant_method": "gptq"}),
        "quantization_config",
    ),
    ("another activation", stating("hidden_act", "gelu"), "hidden_act must be 'silu'"),
    (
        "a config that is no JSON",
        lambda copy: (copy / "config.json").write_text("{not json"),
        "config.json is not valid JSON",
    ),
    (
        "a broken tokenizer",
        lambda copy: (copy / "tokenizer.json").write_text("{}"),
        "tokenizer.json is not a readable tokenizer",
    ),
    ("no tokenizer", lambda copy: (copy / "tokenizer.json").unlink(), "no tokenizer.json"),
]


def test_models_that_cannot_be_served_are_refused_by_name(tmp_path: Path) -> None:
    mistakes = []
    for number, (what, spoil, pattern) in enumerate(SPOILED):
        copy = Path(shutil.copytree(LLAMA, tmp_path / str(number) / "spoiled"))
        spoil(copy)
        try:
            deploy(copy)
        except CheckpointError as error:
            if not re.search(pattern, error.message):
                mistakes.append((what, error.message))
        else:
            mistakes.append((what, "served"))
    assert mistakes == []


def test_layouts_that_do_not_fit_name_the_numbers() -> None:
    for directory, prefill, decode, message in [
        (LLAMA, "tp=3", "dp=2", "tp=3 does not divide"),
        (LLAMA, "tp=1", "dp=3,tp=3", "tp=3|9"),
        (
            LLAMA,
            "tp=8",
            "dp=2",
            r"prefill \(.*\) and decode \(.*\) need 10 devices, and there are 8",
        ),
        (LLAMA, "dp=2,tp=1,ep=2", "dp=2", "ep=2: the model has no experts; use ep=1"),
        (MOE, "tp=2,ep=2", "dp=3,ep=3", "ep=3 does not divide|3.*experts"),
    ]:
        with pytest.raises(LayoutError, match=message):
            deploy(directory, prefill, decode)


def test_more_context_than_the_model_has_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"context_tokens=100000 exceeds the model's \d+; lower it"
    ):
        deployment(config(context=100_000))

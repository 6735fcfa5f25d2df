"""Invalid input: a typed error at once that names subject, value and remedy, while other requests
are served.

Requests are sent over gRPC to the real engine, beside a stream that must lose nothing. Invalid
models and layouts are given to the code that the launch commands share."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from jdisagg.client import ChatMessage
from jdisagg.config import EngineConfig, InstanceConfig, ModelConfig
from jdisagg.errors import CheckpointError, ConfigError, InvalidRequestError, LayoutError
from jdisagg.layout.axes import Layout
from launch.model import deployment
from tests.end_to_end.clusters import LLAMA, MOE, config
from tests.end_to_end.doors import Served, served

on_one_loop = pytest.mark.asyncio(loop_scope="module")

NAN, INF = float("nan"), float("inf")
GENERATE = "/jdisagg.v1.GenerationService/Generate"
MANY = [f"stop {index}" for index in range(17)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door():
    async with served(config(context=256, slots=4)) as door:
        yield door


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference(door: Served):
    return await door.client.complete(
        "Once upon a time", temperature=0, max_tokens=60, ignore_eos=True
    )


async def refused(door: Served, reference: Any, call: Callable[[], Any]) -> InvalidRequestError:
    """Makes the bad call while a good stream runs, which must not notice; returns what the bad one
    got."""
    good = asyncio.ensure_future(
        door.client.complete("Once upon a time", temperature=0, max_tokens=60, ignore_eos=True)
    )
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        with pytest.raises(InvalidRequestError) as caught:
            await call()
    done = await good
    assert (done.choices, done.usage) == (reference.choices, reference.usage)
    return caught.value


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
    ({"n": 40}, "n=40 exceeds the 16 samples of one prefill; ask for fewer"),
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


@on_one_loop
@pytest.mark.parametrize(
    ("options", "message"), PARAMETERS, ids=[str(options)[:40] for options, _ in PARAMETERS]
)
async def test_a_bad_parameter_is_refused_by_name(
    door: Served, reference: Any, options: dict[str, Any], message: str
):
    error = await refused(
        door, reference, lambda: door.client.complete("a dog", **{"max_tokens": 8, **options})
    )
    assert re.search(message, error.message), error.message


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


@on_one_loop
@pytest.mark.parametrize(
    ("prompt", "message"), PROMPTS, ids=[str(prompt)[:40] for prompt, _ in PROMPTS]
)
async def test_a_bad_prompt_is_refused_by_name(
    door: Served, reference: Any, prompt: dict[str, Any], message: str
):
    error = await refused(door, reference, lambda: door.client.complete(**prompt, max_tokens=8))
    assert re.search(message, error.message), error.message


@on_one_loop
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x0a\x04\xff\xfe\xfd\xfc", "malformed or has text that is not valid UTF-8"),
        (b"\x0a\x7fshort", "malformed"),
        (b"\xff\xff\xff\xff", "malformed"),
        (
            b"\x0a\x01a\x22\x06\x62\x04\xff\xfe\xfd\xfc",
            "malformed or has text that is not valid UTF-8",
        ),
        (b"", "prompt is missing: set one of text, token_ids, chat"),
    ],
    ids=["text that is not UTF-8", "cut short", "noise", "a stop that is not UTF-8", "nothing"],
)
async def test_bytes_that_are_no_request_are_refused(
    door: Served, reference: Any, data: bytes, message: str
):
    async def call() -> None:
        async with grpc.aio.insecure_channel(door.target) as channel:
            stream = channel.unary_stream(
                GENERATE, request_serializer=lambda raw: raw, response_deserializer=lambda raw: raw
            )(data)
            try:
                async for _ in stream:
                    pass
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert dict(error.trailing_metadata())["jdisagg-error"] == "InvalidRequestError"
                raise InvalidRequestError(error.details() or "") from None

    assert message in (await refused(door, reference, call)).message


@on_one_loop
async def test_noise_on_the_port_ends_that_connection_alone(door: Served, reference: Any):
    good = asyncio.ensure_future(
        door.client.complete("Once upon a time", temperature=0, max_tokens=60, ignore_eos=True)
    )
    for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40, b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(noise)
        if noise:
            await asyncio.wait_for(reader.read(), 30)
        writer.close()
    assert (await good).choices == reference.choices


@on_one_loop
async def test_a_request_id_that_runs_already_is_refused_and_the_first_goes_on(
    door: Served, reference: Any
):
    first = door.client.generate(
        "Once upon a time", temperature=0, max_tokens=60, ignore_eos=True, request_id="mine"
    )
    seen = [await anext(first)]
    with pytest.raises(
        InvalidRequestError, match="'mine' is in use by a running request; choose another"
    ):
        await door.client.complete("a dog", request_id="mine")
    assert (
        await door.client.complete("a dog", request_id="mine", tenant="another", max_tokens=2)
    ).choices
    seen += [event async for event in first]
    assert "".join(event.text for event in seen) == reference.text


@pytest.mark.ci
@on_one_loop
async def test_extremes_that_are_allowed_are_served(door: Served):
    done = await door.client.complete(
        "a dog", max_tokens=5, temperature=100.0, top_k=2**31 - 1, top_p=1e-9, min_p=1.0, seed=2**63 - 1, n=4, logprobs=20,  # noqa: E501
        repetition_penalty=100.0, presence_penalty=-2.0, logit_bias=[(7, -100.0)], min_tokens=5, stop=["x"] * 16, deadline_seconds=1e300,  # noqa: E501
        priority=-(2**31) + 1, ignore_eos=True,
    )  # fmt: skip
    assert [len(choice.token_ids) for choice in done.choices] == [5] * 4
    longest = await door.client.complete(token_ids=[5] * 255)
    assert [len(choice.token_ids) for choice in longest.choices] in ([0], [1])
    await door.quiet()


@on_one_loop
async def test_text_services_refuse_alike(door: Served, reference: Any):
    for call, message in [
        (lambda: door.client.tokenize("x" * (10 << 20)), "at most 4194304"),
        (lambda: door.client.detokenize([10**6]), r"token_ids\[0\]=1000000 is not a token id"),
        (lambda: door.client.detokenize([-1]), r"token_ids\[0\]=-1 is not a token id"),
    ]:
        error = await refused(door, reference, call)
        assert re.search(message, error.message), error.message


def deploy(
    directory: Path | str, prefill: str = "tp=2", decode: str = "dp=2", **model: Any
) -> None:
    deployment(
        EngineConfig(
            model=ModelConfig(str(directory), **model),
            prefill=InstanceConfig(layout=Layout.parse(prefill), chunk_tokens=64, page_size=16),
            decode=InstanceConfig(layout=Layout.parse(decode), chunk_tokens=64, page_size=16),
        )
    )


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


@pytest.mark.parametrize(
    ("spoil", "message"), [one[1:] for one in SPOILED], ids=[one[0] for one in SPOILED]
)
def test_a_model_that_cannot_be_served_is_refused_by_name(
    tmp_path: Path, spoil: Spoil, message: str
):
    copy = Path(shutil.copytree(LLAMA, tmp_path / "spoiled"))
    spoil(copy)
    with pytest.raises(CheckpointError, match=message):
        deploy(copy)


@pytest.mark.parametrize(
    ("directory", "prefill", "decode", "message"),
    [
        (LLAMA, "tp=3", "dp=2", "tp=3 does not divide"),
        (LLAMA, "tp=1", "dp=3,tp=3", "tp=3|9"),
        (
            LLAMA,
            "tp=8",
            "dp=2",
            (
                r"prefill \(dp=1,tp=8,ep=1\) and decode \(dp=2,tp=1,ep=1\) need 10 devices, and"
                r" there are 8"
            ),
        ),
        (LLAMA, "dp=2,tp=1,ep=2", "dp=2", "ep=2: the model has no experts; use ep=1"),
        (MOE, "tp=2,ep=2", "dp=3,ep=3", "ep=3 does not divide|3.*experts"),
    ],
)
def test_a_layout_that_does_not_fit_names_the_numbers(
    directory: Path, prefill: str, decode: str, message: str
):
    if not directory.is_dir():
        pytest.skip(f"{directory.name} is not there")
    with pytest.raises(LayoutError, match=message):
        deploy(directory, prefill, decode)


@pytest.mark.parametrize("layout", ["tp=0", "tp=-1", "tp=2,tp=2", "pp=0", "tp", "dp=2,tp=2,ep=3"])
def test_a_layout_that_is_none_is_named(layout: str):
    with pytest.raises(LayoutError, match="layout"):
        deploy(LLAMA, layout)


def test_more_context_than_the_model_has_is_refused():
    with pytest.raises(
        ConfigError, match=r"context_tokens=100000 exceeds the model's \d+; lower it"
    ):
        deploy(LLAMA, context_tokens=100_000)

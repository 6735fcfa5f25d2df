"""/v1/embeddings through OpenAI's client: inputs, forms of vectors, prompts by name, refusals."""

import base64
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from jdisagg.config import ServiceConfig
from jdisagg.prompt.embedding import EmbeddingForm
from jdisagg.prompt.logprobs import POOLINGS, PromptLogprobs
from jdisagg.request import FinishReason, Request, StreamEvent, Usage
from jdisagg.service.server import GenerationServer
from tests.service.doors import MODEL, FakePath, byte_tokenizer, eventually, make_frontend
from tests.service.http_doors import HttpDoor, http_door, request, running

FORM = EmbeddingForm("last", True, {"query": "Find: "})


def state_of(ids: Sequence[int]) -> np.ndarray:
    return np.array([len(ids), ids[0], ids[-1], 1], np.float32)


@dataclass
class States(FakePath):
    async def stream(self, request: Request) -> AsyncIterator[StreamEvent]:
        self.requests.append(request)
        try:
            await self.gate.wait()
        finally:
            self.closed.append(request.request_id)
        state = state_of(request.prompt_token_ids)
        yield StreamEvent(
            0,
            0,
            (65,),
            finish_reason=FinishReason.LENGTH,
            usage=Usage(len(request.prompt_token_ids), 1),
            prompt_logprobs=PromptLogprobs(POOLINGS[request.pooling], hidden=state.tobytes()),
        )


@asynccontextmanager
async def embedder(form: EmbeddingForm = FORM) -> AsyncIterator[HttpDoor]:
    path, codec = States(), byte_tokenizer()
    codec.embedding = form
    frontend = make_frontend(path, replace(MODEL, name="tiny"), codec=codec)
    config = ServiceConfig(port=0, http_port=0)
    async with running(path, GenerationServer(frontend, config), frontend) as door:
        yield door


def unit(text: str) -> list[float]:
    state = state_of(tuple(text.encode()))
    return (state / np.linalg.norm(state)).tolist()


async def test_inputs_are_embedded_in_their_order() -> None:
    async with embedder() as door, door.client() as client:
        texts = [f"text {'x' * at}" for at in range(100)]
        for given, wanted in (
            ("hello", ["hello"]),
            (texts, texts),
            (list(b"hello"), ["hello"]),
            ([list(b"a"), list(b"bc")], ["a", "bc"]),
        ):
            reply = await client.embeddings.create(model="tiny", input=given)  # base64 by default
            plain = await client.embeddings.create(
                model="tiny", input=given, encoding_format="float"
            )
            for answer in (reply, plain):
                assert [one.index for one in answer.data] == list(range(len(wanted)))
                for one, text in zip(answer.data, wanted, strict=True):
                    assert one.embedding == pytest.approx(unit(text))
            count = sum(map(len, wanted))
            assert reply.usage.prompt_tokens == reply.usage.total_tokens == count
        assert all(one.prefill_only and one.pooling == "last" for one in door.path.requests)
        assert {one.sampling.max_tokens for one in door.path.requests} == {1}


async def test_vectors_have_the_form_that_is_asked_for() -> None:
    async with embedder() as door:
        usual: dict[str, Any] = {"input": "hello", "model": "tiny"}
        coded = (await door.served("/v1/embeddings", usual | {"encoding_format": "base64"})).fields
        values = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4")
        assert values.tolist() == pytest.approx(unit("hello"))
        cut = (await door.served("/v1/embeddings", usual | {"dimensions": 2})).fields
        state = state_of(b"hello")[:2]
        assert cut["data"][0]["embedding"] == pytest.approx(state / np.linalg.norm(state))
    async with embedder(EmbeddingForm("mean", False)) as door:
        mean = (await door.served("/v1/embeddings", usual)).fields
        assert mean["data"][0]["embedding"] == pytest.approx(state_of(b"hello") / 5)


async def test_prompts_are_named() -> None:
    async with embedder() as door:
        for more in ({"prompt_name": "query"}, {"input_type": "query"}):
            await door.served("/v1/embeddings", {"input": ["a", "b"]} | more)
            shown = {bytes(one.prompt_token_ids) for one in door.path.requests[-2:]}
            assert shown == {b"Find: a", b"Find: b"}
        ids = {"input": list(b"a"), "prompt_name": "query"}
        await door.served("/v1/embeddings", ids)
        assert bytes(door.path.requests[-1].prompt_token_ids) == b"a", "token ids are left alone"


async def test_a_client_that_goes_away_ends_the_computation_of_its_inputs() -> None:
    async with embedder() as door:
        door.path.gate.clear()
        _, writer = await door.connect()
        writer.write(request("/v1/embeddings", {"input": ["a", "b", "c"]}))
        await eventually(lambda: len(door.path.requests) == 3)
        writer.close()
        await eventually(lambda: len(door.path.closed) == 3)


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({}, 400, "input is missing"),
    ({"input": []}, 400, "input is empty"),
    ({"input": ["a", 3]}, 400, "input mixes texts and token ids"),
    ({"input": ["a"] * 2049}, 400, "input may hold at most 2048"),
    ({"input": "a" * 600}, 400, "prompt has 600 tokens"),
    ({"input": "a", "dimensions": 5}, 400, "dimensions must be in [1, 4], got 5"),
    ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format must be float or base64"),
    ({"input": "a", "prompt_name": "x"}, 400, "prompt_name='x' is not a prompt"),
    ({"input": "a", "model": "x"}, 404, "model must be"),
]


async def test_what_cannot_be_embedded_is_refused() -> None:
    async with embedder() as door:
        for fields, status, words in REFUSED:
            answer = await door.ask("/v1/embeddings", fields)
            assert answer.status == status and words in answer.error["message"], answer.body
    async with http_door() as door:
        answer = await door.ask("/v1/embeddings", {"input": "a"})
        assert answer.status == 404 and "is not an embedding model" in answer.error["message"]

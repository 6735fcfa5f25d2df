"""/v1/score and /v1/rerank: prompts, the choice between yes and no, order, and refusals."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from jdisagg.config import ServiceConfig
from jdisagg.request import FinishReason, Request, StreamEvent, TokenLogprobs, Usage
from jdisagg.service.server import GenerationServer
from models.tokenizer import Tokenizer
from tests.service.doors import EOS, MODEL, FakePath, byte_backend, eventually, make_frontend
from tests.service.http_doors import HttpDoor, http_door, request, running

YES, NO = 257, 258
QUERY = {
    "query": "which animal barks",
    "documents": ["a cat", "some dog", {"text": "a rather long dog"}],
}


@dataclass
class Judge(FakePath):
    """Says yes the more surely the longer the prompt is."""

    async def stream(self, request: Request) -> AsyncIterator[StreamEvent]:
        self.requests.append(request)
        try:
            await self.gate.wait()
        finally:
            self.closed.append(request.request_id)
        yes, no = -1.0, -len(request.prompt_token_ids) / 100
        top = sorted(((YES, yes), (NO, no)), key=lambda one: -one[1])
        yield StreamEvent(
            0,
            0,
            (top[0][0],),
            logprobs=(TokenLogprobs(top[0][1], tuple(top)),),
            finish_reason=FinishReason.LENGTH,
            usage=Usage(len(request.prompt_token_ids), 1),
        )


@asynccontextmanager
async def judge(name: str = "tiny-reranker", reranker: str = "auto") -> AsyncIterator[HttpDoor]:
    backend, path = byte_backend(), Judge()
    backend.add_tokens(["yes", "no"])
    codec = Tokenizer(backend, eos_ids=(EOS,), special_tokens={}, chat_templates={})
    model = replace(MODEL, name=name, vocabulary=259)
    frontend = make_frontend(path, model, codec=codec)
    config = ServiceConfig(port=0, http_port=0, reranker=reranker)
    async with running(path, GenerationServer(frontend, config), frontend) as door:
        yield door


def shown(door: HttpDoor, request: Request) -> str:
    return door.frontend.prompts.codec.decode(request.prompt_token_ids, skip_special_tokens=False)


def expected(request: Request) -> float:
    return 1 / (1 + math.exp(-len(request.prompt_token_ids) / 100 + 1.0))


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_are_ranked_by_yes_against_no(path: str) -> None:
    async with judge() as door:
        reply = (await door.served(path, QUERY | {"top_n": 2})).fields
        assert [one["index"] for one in reply["results"]] == [2, 1]
        assert reply["results"][0]["document"] == {"text": "a rather long dog"}
        asked = sorted(door.path.requests, key=lambda one: len(one.prompt_token_ids))
        assert reply["results"][0]["relevance_score"] == pytest.approx(expected(asked[2]))
        tokens = sum(len(one.prompt_token_ids) for one in asked)
        assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        assert reply["model"] == "tiny-reranker"
        for request in asked:
            sampling = request.sampling
            assert request.prefill_only and (sampling.max_tokens, sampling.n) == (1, 1)
            assert dict(sampling.logit_bias) == {YES: 100.0, NO: 100.0}
        assert shown(door, asked[2]) == (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the"
            ' Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
            "<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant"
            " passages that answer the query\n<Query>: which animal barks\n<Document>: a rather"
            " long dog<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )


async def test_pairs_are_scored_in_their_order() -> None:
    async with judge() as door:
        for first, second, texts in (
            ("a", ["b", "bbb", "bb"], [("a", "b"), ("a", "bbb"), ("a", "bb")]),
            (["a", "aa"], ["b", "b"], [("a", "b"), ("aa", "b")]),
            ("a", "b", [("a", "b")]),
        ):
            door.path.requests.clear()
            asked = {"text_1": first, "text_2": second, "instruct": "Find it"}
            data = (await door.served("/v1/score", asked)).fields["data"]
            assert [one["index"] for one in data] == list(range(len(texts)))
            by_text = {shown(door, one): expected(one) for one in door.path.requests}
            for one, (query, document) in zip(data, texts, strict=True):
                pair = f"<Instruct>: Find it\n<Query>: {query}\n<Document>: {document}<|im_end|>"
                (wanted,) = [value for text, value in by_text.items() if pair in text]
                assert one["score"] == pytest.approx(wanted)


async def test_a_long_document_is_cut_and_the_end_of_the_prompt_is_kept() -> None:
    async with judge() as door:
        await door.served("/v1/score", {"text_1": "a", "text_2": "long " * 200})
        (request,) = door.path.requests
        assert len(request.prompt_token_ids) == MODEL.context_tokens - 1
        assert shown(door, request).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/rerank", QUERY), ("/v1/score", {"text_1": "a", "text_2": ["b"] * 3})]
)
async def test_a_client_that_goes_away_ends_the_computation_of_its_scores(
    path: str, fields: dict[str, Any]
) -> None:
    async with judge() as door:
        door.path.gate.clear()
        _, writer = await door.connect()
        writer.write(request(path, fields))
        await eventually(lambda: len(door.path.requests) == 3)
        writer.close()
        await eventually(lambda: len(door.path.closed) == 3)


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/rerank", {"query": "a"}, 400, "documents is missing"),
    ("/v1/rerank", {"query": "a", "documents": []}, 400, "documents is empty"),
    ("/v1/rerank", {"query": "a", "documents": [3]}, 400, "documents[0] must be a string"),
    ("/v1/rerank", QUERY | {"top_n": 0}, 400, "top_n must be at least 1"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, 400, "text_2 has 3"),
    ("/v1/score", {"text_1": "a", "text_2": ["c"] * 1025}, 400, "at most 1024"),
    ("/v1/score", {"model": "other", "text_1": "a", "text_2": "b"}, 404, "model must be"),
]


async def test_what_cannot_be_scored_is_refused() -> None:
    async with judge() as door:
        for path, fields, status, words in REFUSED:
            answer = await door.ask(path, fields)
            assert answer.status == status and words in answer.error["message"], answer.body
    async with http_door() as door:
        answer = await door.ask("/v1/rerank", QUERY)
        assert answer.status == 404 and "is not a reranker" in answer.error["message"]
    async with judge("plain", "qwen3") as door:
        assert (await door.ask("/v1/rerank", QUERY)).status == 200
    async with judge(reranker="none") as door:
        assert (await door.ask("/v1/rerank", QUERY)).status == 404

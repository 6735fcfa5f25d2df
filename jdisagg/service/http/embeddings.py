"""/v1/embeddings: the embeddings of texts or token ids, by an embedding model.

Each input is a request whose prompt alone is computed (`Request.pooling`)."""

import asyncio
import base64
import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import msgspec
import numpy as np

from jdisagg.dispatch.frontend import Frontend
from jdisagg.dispatch.prompts import Prompt
from jdisagg.errors import InvalidRequestError, first_error
from jdisagg.prompt.embedding import EmbeddingForm
from jdisagg.service.http.bodies import Embed, PromptOnly
from jdisagg.service.http.errors import HttpRefusal
from jdisagg.service.http.exchange import Exchange
from jdisagg.service.http.fields import Fields
from jdisagg.service.http.generation import IGNORED, check_model
from jdisagg.service.http.requests import ignored_header, listed_prompts

MAX_INPUTS = 2048
AT_ONCE = 64

_encode = msgspec.json.encode


class Embeddings:
    def __init__(self, frontend: Frontend, limit_bytes: int) -> None:
        self._frontend = frontend
        self._limit_bytes = limit_bytes

    async def embeddings(self, exchange: Exchange) -> None:
        fields = Fields.of(await exchange.body(self._limit_bytes))
        exchange.fields = fields.names
        sent = fields.fill(PromptOnly)
        check_model(sent.model, self._frontend)
        form, name = self._frontend.prompts.codec.embedding, self._frontend.model.name
        if form is None:
            raise HttpRefusal(
                f"model {name!r} is not an embedding model: it generates text; use an embedding"
                " model's own server for /v1/embeddings",
                404,
                "not_found",
            )
        asked = fields.fill(Embed)
        if ignored := ignored_header(fields):
            exchange.reply_headers.append((IGNORED, ignored))
        if asked.encoding_format not in ("float", "base64"):
            raise InvalidRequestError(
                f"encoding_format must be float or base64, got {asked.encoding_format[:80]!r}"
            )
        before = form.prompt(asked.input_type if asked.prompt_name is None else asked.prompt_name)
        inputs = listed_prompts("input", asked.input, MAX_INPUTS)
        prompts = [before + one if isinstance(one, str) else one for one in inputs]
        vectors, counts = await self._embedded(form, sent, prompts, asked.dimensions)
        tokens = sum(counts)
        data = [
            {"object": "embedding", "index": at, "embedding": _shown(one, asked.encoding_format)}
            for at, one in enumerate(vectors)
        ]
        shown = {
            "id": f"embd-{secrets.token_hex(16)}",
            "object": "list",
            "created": int(time.time()),
            "model": sent.model or name,
            "data": data,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        await exchange.reply(_encode(shown))

    async def _embedded(
        self,
        form: EmbeddingForm,
        sent: PromptOnly,
        prompts: Sequence[Prompt],
        dimensions: int | None,
    ) -> tuple[list[np.ndarray], list[int]]:
        room = asyncio.Semaphore(AT_ONCE)

        async def one(prompt: Prompt) -> tuple[np.ndarray, int]:
            async with room:
                return await self._embed(form, sent, prompt, dimensions)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(prompt)) for prompt in prompts]
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None
        found = [task.result() for task in tasks]
        return [vector for vector, _ in found], [count for _, count in found]

    async def _embed(
        self, form: EmbeddingForm, sent: PromptOnly, prompt: Prompt, dimensions: int | None
    ) -> tuple[np.ndarray, int]:
        built = await self._frontend.build_request(
            prompt,
            deadline_seconds=sent.deadline_seconds,
            tenant=sent.tenant,
            priority=sent.priority,
            cache_salt=sent.cache_salt,
            model=sent.model,
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
        )
        request = replace(built, pooling=form.pooling, prefill_only=True)
        hidden = None
        async with aclosing(self._frontend.stream(request)) as events:
            async for event in events:
                hidden = event.prompt_logprobs or hidden
        assert hidden is not None, "it comes with the first token"
        tokens = len(request.prompt_token_ids)
        return form.vector(hidden, tokens, dimensions), tokens


def _shown(vector: np.ndarray, encoding: str) -> object:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()

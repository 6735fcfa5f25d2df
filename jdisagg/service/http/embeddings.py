"""/v1/embeddings: the embeddings of texts or token ids, by an embedding model.

Each input is a request whose prompt alone is computed (`Request.pooling`)."""

import base64
import secrets
import time
from contextlib import aclosing
from dataclasses import replace

import msgspec
import numpy as np

from jdisagg.dispatch.frontend import Frontend
from jdisagg.dispatch.prompts import Prompt
from jdisagg.errors import InvalidRequestError
from jdisagg.prompt.embedding import EmbeddingForm
from jdisagg.service.http.bodies import Embed, PromptOnly
from jdisagg.service.http.exchange import Exchange
from jdisagg.service.http.prompt_requests import (
    all_of,
    list_ignored,
    not_served,
    prompt_request,
    read_prompt_only,
    usage_of_prompts,
)
from jdisagg.service.http.requests import listed_prompts

MAX_INPUTS = 2048
AT_ONCE = 64

_encode = msgspec.json.encode


class Embeddings:
    def __init__(self, frontend: Frontend, limit_bytes: int) -> None:
        self._frontend = frontend
        self._limit_bytes = limit_bytes

    async def embeddings(self, exchange: Exchange) -> None:
        fields, sent = await read_prompt_only(exchange, self._limit_bytes, self._frontend)
        form, name = self._frontend.prompts.codec.embedding, self._frontend.model.name
        if form is None:
            raise not_served(
                f"model {name!r} is not an embedding model: it generates text; use an embedding"
                " model's own server for /v1/embeddings"
            )
        asked = fields.fill(Embed)
        list_ignored(exchange, fields)
        if asked.encoding_format not in ("float", "base64"):
            raise InvalidRequestError(
                f"encoding_format must be float or base64, got {asked.encoding_format[:80]!r}"
            )
        before = form.prompt(asked.input_type if asked.prompt_name is None else asked.prompt_name)
        inputs = listed_prompts("input", asked.input, MAX_INPUTS)
        prompts = [before + one if isinstance(one, str) else one for one in inputs]
        calls = [self._embed(form, sent, prompt, asked.dimensions) for prompt in prompts]
        embedded = await all_of(exchange, calls, AT_ONCE)
        data = [
            {"object": "embedding", "index": at, "embedding": _shown(one, asked.encoding_format)}
            for at, (one, _) in enumerate(embedded)
        ]
        shown = {
            "id": f"embd-{secrets.token_hex(16)}",
            "object": "list",
            "created": int(time.time()),
            "model": sent.model or name,
            "data": data,
            "usage": usage_of_prompts(sum(count for _, count in embedded)),
        }
        await exchange.reply(_encode(shown))

    async def _embed(
        self, form: EmbeddingForm, sent: PromptOnly, prompt: Prompt, dimensions: int | None
    ) -> tuple[np.ndarray, int]:
        built = await prompt_request(self._frontend, sent, prompt)
        request = replace(built, pooling=form.pooling)
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

"""/v1/score and /v1/rerank: how well texts match a query, by a causal model that answers yes or no.

A score is the probability of yes, of yes and no alone, as the first token of the answer. Only a
prefill is needed. The query precedes the document, so that its KV is shared by all documents."""

import math
import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from jdisagg.dispatch.frontend import Frontend
from jdisagg.dispatch.prompts import BareText, TokenPrompt
from jdisagg.errors import InvalidRequestError
from jdisagg.request import TokenLogprobs, at_most
from jdisagg.service.http.bodies import PromptOnly, Rerank, Score
from jdisagg.service.http.exchange import Exchange
from jdisagg.service.http.fields import F
from jdisagg.service.http.prompt_requests import (
    all_of,
    list_ignored,
    not_served,
    prompt_request,
    read_prompt_only,
    usage_of_prompts,
)

MAX_PAIRS = 1024
AT_ONCE = 32
# Both answers get this bias, so that they are the two most likely tokens.
_BIAS = 100.0

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class RerankForm:
    """The prompt of one pair: `before`, the pair's text, `after`."""

    before: str
    pair: str
    after: str
    instruction: str
    yes: str = "yes"
    no: str = "no"


# The texts of Qwen3-Reranker's model card, without which its scores mean nothing.
QWEN3 = RerankForm(
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n",
    "<Instruct>: {instruct}\n<Query>: {query}\n<Document>: {document}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "Given a web search query, retrieve relevant passages that answer the query",
)
FORMS = {"qwen3": QWEN3}


class _Scored(NamedTuple):
    score: float
    tokens: int


class Reranker:
    """`form`: a key of `FORMS`, "none", or "auto" for a form by the model's name."""

    def __init__(self, frontend: Frontend, form: str, limit_bytes: int) -> None:
        self._frontend = frontend
        self._form = form
        self._limit_bytes = limit_bytes

    async def rerank(self, exchange: Exchange) -> None:
        sent, form, asked = await self._read(exchange, Rerank)
        documents = _texts(asked.documents, "documents")
        if asked.top_n is not None and asked.top_n < 1:
            raise InvalidRequestError(f"top_n must be at least 1, got {asked.top_n}")
        instruct = asked.instruct or asked.instruction
        pairs = [(asked.query, one) for one in documents]
        scored = await self._scored(exchange, sent, form, pairs, instruct)
        order = sorted(range(len(scored)), key=lambda at: -scored[at].score)
        results = [
            {"index": at, "relevance_score": scored[at].score}
            | ({"document": {"text": documents[at]}} if asked.return_documents else {})
            for at in order[: asked.top_n]
        ]
        name = f"rerank-{secrets.token_hex(16)}"
        await self._reply(exchange, sent, scored, {"id": name, "results": results})

    async def score(self, exchange: Exchange) -> None:
        sent, form, asked = await self._read(exchange, Score)
        first, second = _texts(asked.text_1, "text_1"), _texts(asked.text_2, "text_2")
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidRequestError(
                f"text_1 has {len(first)} texts, and text_2 has {len(second)}; send one, or as many"
            )
        pairs = list(zip(first, second, strict=True))
        instruct = asked.instruct or asked.instruction
        scored = await self._scored(exchange, sent, form, pairs, instruct)
        data = [
            {"index": at, "object": "score", "score": one.score} for at, one in enumerate(scored)
        ]
        name = f"score-{secrets.token_hex(16)}"
        shown = {"id": name, "object": "list", "created": int(time.time()), "data": data}
        await self._reply(exchange, sent, scored, shown)

    async def _read(self, exchange: Exchange, body: type[F]) -> tuple[PromptOnly, RerankForm, F]:
        fields, sent = await read_prompt_only(exchange, self._limit_bytes, self._frontend)
        form, asked = self._found_form(), fields.fill(body)
        list_ignored(exchange, fields)
        return sent, form, asked

    async def _reply(
        self,
        exchange: Exchange,
        sent: PromptOnly,
        scored: Sequence[_Scored],
        shown: dict[str, object],
    ) -> None:
        usage = usage_of_prompts(sum(one.tokens for one in scored))
        named = {"model": sent.model or self._frontend.model.name}
        await exchange.reply(_encode(shown | named | {"usage": usage}))

    def _found_form(self) -> RerankForm:
        name = self._frontend.model.name
        kind = self._form
        if kind == "auto":
            kind = "qwen3" if "rerank" in name.lower() else "none"
        if kind not in FORMS:
            raise not_served(
                f"model {name!r} is not a reranker: it generates text; serve a reranker, or set"
                " service.reranker"
            )
        return FORMS[kind]

    async def _scored(
        self,
        exchange: Exchange,
        sent: PromptOnly,
        form: RerankForm,
        pairs: Sequence[tuple[str, str]],
        instruct: str | None,
    ) -> list[_Scored]:
        at_most("pairs of texts", len(pairs), MAX_PAIRS)
        before, after, yes, no = [
            await self._frontend.tokenize(BareText(text))
            for text in (form.before, form.after, form.yes, form.no)
        ]
        if len(yes) != 1 or len(no) != 1:
            raise InvalidRequestError(
                f"model {self._frontend.model.name!r} has no single tokens for {form.yes!r} and"
                f" {form.no!r}; serve a reranker"
            )
        answers = yes[0], no[0]

        async def one(query: str, document: str) -> _Scored:
            text = form.pair.format(
                instruct=form.instruction if instruct is None else instruct,
                query=query,
                document=document,
            )
            ids = await self._frontend.tokenize(BareText(text))
            most = self._frontend.model.context_tokens - 1 - len(before) - len(after)
            prompt = (*before, *ids[:most], *after)  # the document is cut
            return await self._score(sent, prompt, answers)

        return await all_of(exchange, [one(*pair) for pair in pairs], AT_ONCE)

    async def _score(
        self, sent: PromptOnly, prompt: tuple[int, ...], answers: tuple[int, int]
    ) -> _Scored:
        request = await prompt_request(
            self._frontend,
            sent,
            TokenPrompt(prompt),
            logprobs=len(answers),
            logit_bias=dict.fromkeys(answers, _BIAS),
        )
        found: list[TokenLogprobs] = []
        async with aclosing(self._frontend.stream(request)) as events:
            async for event in events:
                found += event.logprobs
        values = dict(found[0].top)
        yes, no = (values[token_id] for token_id in answers)
        return _Scored(1 / (1 + math.exp(min(no - yes, 700.0))), len(prompt))


def _texts(given: str | list[object], name: str) -> list[str]:
    """Reads a text, or a list of texts or of objects with a `text`."""
    found: list[str] = []
    for at, one in enumerate([given] if isinstance(given, str) else given):
        text = one.get("text") if isinstance(one, dict) else one
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"{name}[{at}] must be a string, or an object with a text, got {one!r:.80}"
            )
        found.append(text)
    if not found:
        raise InvalidRequestError(f"{name} is empty; send at least one text")
    return found

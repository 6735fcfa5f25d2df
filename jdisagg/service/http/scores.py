"""/v1/score and /v1/rerank: how well texts match a query, by a causal model that answers yes or no.

A score is the probability of yes, of yes and no alone, as the first token of the answer. Only a
prefill is needed. The query precedes the document, so that its KV is shared by all documents."""

import asyncio
import math
import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from jdisagg.dispatch.frontend import Frontend
from jdisagg.dispatch.prompts import BareText, TokenPrompt
from jdisagg.errors import InvalidRequestError, first_error
from jdisagg.request import TokenLogprobs, at_most
from jdisagg.service.http.bodies import PromptOnly, Rerank, Score
from jdisagg.service.http.errors import HttpRefusal
from jdisagg.service.http.exchange import Exchange
from jdisagg.service.http.fields import F, Fields
from jdisagg.service.http.generation import IGNORED, check_model
from jdisagg.service.http.requests import ignored_header

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
        fields, sent, asked = await self._read(exchange, Rerank)
        documents = _texts(asked.documents, "documents")
        if asked.top_n is not None and asked.top_n < 1:
            raise InvalidRequestError(f"top_n must be at least 1, got {asked.top_n}")
        instruct = asked.instruct or asked.instruction
        scored = await self._scored(sent, [(asked.query, one) for one in documents], instruct)
        order = sorted(range(len(scored)), key=lambda at: -scored[at].score)
        results = [
            {"index": at, "relevance_score": scored[at].score}
            | ({"document": {"text": documents[at]}} if asked.return_documents else {})
            for at in order[: asked.top_n]
        ]
        name = f"rerank-{secrets.token_hex(16)}"
        await self._reply(exchange, fields, scored, {"id": name, "results": results})

    async def score(self, exchange: Exchange) -> None:
        fields, sent, asked = await self._read(exchange, Score)
        first, second = _texts(asked.text_1, "text_1"), _texts(asked.text_2, "text_2")
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidRequestError(
                f"text_1 has {len(first)} texts, and text_2 has {len(second)}; send one, or as many"
            )
        pairs = list(zip(first, second, strict=True))
        scored = await self._scored(sent, pairs, asked.instruct or asked.instruction)
        data = [
            {"index": at, "object": "score", "score": one.score} for at, one in enumerate(scored)
        ]
        name = f"score-{secrets.token_hex(16)}"
        shown = {"id": name, "object": "list", "created": int(time.time()), "data": data}
        await self._reply(exchange, fields, scored, shown)

    async def _read(self, exchange: Exchange, form: type[F]) -> tuple[Fields, PromptOnly, F]:
        fields = Fields.of(await exchange.body(self._limit_bytes))
        exchange.fields = fields.names
        sent = fields.fill(PromptOnly)
        check_model(sent.model, self._frontend)
        self._found_form()
        asked = fields.fill(form)
        if ignored := ignored_header(fields):
            exchange.reply_headers.append((IGNORED, ignored))
        return fields, sent, asked

    async def _reply(
        self,
        exchange: Exchange,
        fields: Fields,
        scored: Sequence[_Scored],
        shown: dict[str, object],
    ) -> None:
        tokens = sum(one.tokens for one in scored)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        named = {"model": fields.fill(PromptOnly).model or self._frontend.model.name}
        await exchange.reply(_encode(shown | named | {"usage": usage}))

    def _found_form(self) -> RerankForm:
        name = self._frontend.model.name
        kind = self._form
        if kind == "auto":
            kind = "qwen3" if "rerank" in name.lower() else "none"
        if kind not in FORMS:
            raise HttpRefusal(
                f"model {name!r} is not a reranker: it generates text; serve a reranker, or set"
                " service.reranker",
                404,
                "not_found",
            )
        return FORMS[kind]

    async def _scored(
        self, sent: PromptOnly, pairs: Sequence[tuple[str, str]], instruct: str | None
    ) -> list[_Scored]:
        at_most("pairs of texts", len(pairs), MAX_PAIRS)
        form = self._found_form()
        before, after, yes, no = [
            await self._frontend.tokenize(BareText(text))
            for text in (form.before, form.after, form.yes, form.no)
        ]
        if len(yes) != 1 or len(no) != 1:
            raise InvalidRequestError(
                f"model {self._frontend.model.name!r} has no single tokens for {form.yes!r} and"
                f" {form.no!r}; serve a reranker"
            )
        room, answers = asyncio.Semaphore(AT_ONCE), (yes[0], no[0])

        async def one(query: str, document: str) -> _Scored:
            text = form.pair.format(
                instruct=form.instruction if instruct is None else instruct,
                query=query,
                document=document,
            )
            ids = await self._frontend.tokenize(BareText(text))
            most = self._frontend.model.context_tokens - 1 - len(before) - len(after)
            prompt = (*before, *ids[:most], *after)  # the document is cut
            async with room:
                return await self._score(sent, prompt, answers)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(*pair)) for pair in pairs]
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None
        return [task.result() for task in tasks]

    async def _score(
        self, sent: PromptOnly, prompt: tuple[int, ...], answers: tuple[int, int]
    ) -> _Scored:
        request = await self._frontend.build_request(
            TokenPrompt(prompt),
            deadline_seconds=sent.deadline_seconds,
            tenant=sent.tenant,
            priority=sent.priority,
            cache_salt=sent.cache_salt,
            model=sent.model,
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            logprobs=len(answers),
            logit_bias=dict.fromkeys(answers, _BIAS),
        )
        found: list[TokenLogprobs] = []
        async with aclosing(self._frontend.stream(replace(request, prefill_only=True))) as events:
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

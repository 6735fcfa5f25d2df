"""What endpoints have in common whose replies have no text of the model: /v1/embeddings, /v1/score
and /v1/rerank. Each of their inputs is a request whose prompt alone is computed."""

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from typing import Any, TypeVar, Unpack

from jdisagg.dispatch.frontend import Frontend
from jdisagg.dispatch.prompts import Prompt
from jdisagg.errors import first_error
from jdisagg.request import Request, SamplingOptions
from jdisagg.service.http.bodies import PromptOnly
from jdisagg.service.http.errors import HttpRefusal
from jdisagg.service.http.exchange import Exchange
from jdisagg.service.http.fields import Fields
from jdisagg.service.http.generation import IGNORED, check_model, watched
from jdisagg.service.http.requests import ignored_header

T = TypeVar("T")


async def read_prompt_only(
    exchange: Exchange, limit_bytes: int, frontend: Frontend
) -> tuple[Fields, PromptOnly]:
    """Reads the common fields of a body. Raises HttpRefusal if it names another model."""
    fields = Fields.of(await exchange.body(limit_bytes))
    exchange.fields = fields.names
    sent = fields.fill(PromptOnly)
    check_model(sent.model, frontend)
    return fields, sent


def list_ignored(exchange: Exchange, fields: Fields) -> None:
    """Lists the fields that were not read in the reply's header."""
    if ignored := ignored_header(fields):
        exchange.reply_headers.append((IGNORED, ignored))


def not_served(message: str) -> HttpRefusal:
    return HttpRefusal(message, 404, "not_found")


async def prompt_request(
    frontend: Frontend, sent: PromptOnly, prompt: Prompt, **options: Unpack[SamplingOptions]
) -> Request:
    """Builds a request that ends with its first token. Raises the errors of `build_request`."""
    whole: SamplingOptions = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, **options}
    built = await frontend.build_request(
        prompt,
        deadline_seconds=sent.deadline_seconds,
        tenant=sent.tenant,
        priority=sent.priority,
        cache_salt=sent.cache_salt,
        model=sent.model,
        **whole,
    )
    return replace(built, prefill_only=True)


async def all_of(
    exchange: Exchange, calls: Iterable[Coroutine[Any, Any, T]], at_once: int
) -> list[T]:
    """Runs calls, `at_once` at a time, and returns their results. Raises the first error. Cancels
    the calls if the client disconnects."""
    room = asyncio.Semaphore(at_once)

    async def one(call: Coroutine[Any, Any, T]) -> T:
        async with room:
            return await call

    try:
        with watched(exchange):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(call)) for call in calls]
    except BaseExceptionGroup as failed:
        raise first_error(failed) from None
    return [task.result() for task in tasks]


def usage_of_prompts(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}

"""Conversations whose prompts begin alike, with workers that keep their KV."""

import asyncio
import random
from dataclasses import replace

import pytest

from jdisagg.request import Request, SamplingParams
from jdisagg.scheduler.residency import BlockNames
from tests.fakes.cluster import Cluster, Collected, Fleet, toy_request
from tests.fakes.fake_executor import toy_limits
from tests.lanes import first_quick

NAMES = BlockNames(b"secret", "toy", 16)
CONTEXT = 256
SEEDS = pytest.mark.parametrize(("seed",), first_quick([(0,), (1,), (2,)]))


def limits(ranks: int = 1, pages: int = 160, page_size: int = 4, rows: int = 1):
    return toy_limits(
        ranks=ranks,
        page_size=page_size,
        pages_per_rank=pages,
        context_tokens=CONTEXT,
        continuing_rows=rows,
        granule_tokens=4,
        chunk_buckets=(16, 32),
    )


class Talk:
    """Requests whose prompts are beginnings of earlier conversations and something new."""

    def __init__(self, seed: int, tenants: tuple[str, ...] = ("",)) -> None:
        self.random = random.Random(seed)
        self.histories: list[tuple[str, tuple[int, ...]]] = [
            (tenant, self.words(20 + 30 * which)) for tenant in tenants for which in range(3)
        ]
        self.count = 0

    def words(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(89) for _ in range(count))

    def next(self) -> Request:
        self.count += 1
        tenant, history = self.random.choice(self.histories)
        prompt = history + self.words(self.random.choice((0, 1, 5, 17)))
        params = SamplingParams(
            max_tokens=self.random.randint(1, 40),
            temperature=self.random.choice((0.0, 0.9)),
            seed=self.random.randrange(1000),
            n=self.random.choice((1, 1, 1, 3)),
            repetition_penalty=self.random.choice((1.0, 1.0, 1.3)),
            logprobs=self.random.choice((None, None, 0)),
            prompt_logprobs=None if self.count % 4 else 1,
        )
        stop_ids = self.random.choice(((), (), (3, 5, 8, 13, 21, 34, 55)))
        return Request(f"r{self.count}", prompt, params, stop_ids, tenant=tenant)

    def heard(self, request: Request, collected: Collected) -> None:
        for tokens in collected.tokens.values():
            history = request.prompt_token_ids + tuple(tokens)
            if len(history) < CONTEXT - 60:
                self.histories.append((request.tenant, history))
        self.histories = self.histories[-12:]


async def converse(
    fleet: Fleet, talk: Talk, requests: int, at_once: int = 4, cancels: float = 0.0
) -> None:
    """Random conversations; those that are not cancelled are held against the oracle."""
    left = requests

    async def user() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            request = talk.next()
            waiting = asyncio.ensure_future(fleet.collect(request))
            if talk.random.random() < cancels:
                await asyncio.sleep(talk.random.random() * 0.3)
                waiting.cancel()
            try:
                collected = await waiting
            except asyncio.CancelledError:
                continue
            fleet.check(request, collected)
            talk.heard(request, collected)

    await asyncio.gather(*(user() for _ in range(at_once)))


async def storm(
    cluster: Cluster, talk: Talk, requests: int, at_once: int, cancels: float = 0.0
) -> None:
    """Random conversations, and then nothing is left."""
    await converse(cluster, talk, requests, at_once, cancels)
    await cluster.check_quiet()


def prompt(tokens: int, tail: int = 0) -> tuple[int, ...]:
    return tuple(at % 89 for at in range(tokens)) + (88,) * tail


def asked(number: int, token_ids: tuple[int, ...], max_tokens: int = 4, **more: object) -> Request:
    request = replace(toy_request(number, max_tokens=max_tokens), prompt_token_ids=token_ids)
    return replace(request, **more)


async def cached_of(cluster: Cluster, request: Request) -> int:
    return (await cluster.ask(request)).cached_tokens

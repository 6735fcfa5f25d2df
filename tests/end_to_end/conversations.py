"""Conversations whose prompts begin alike, and means to push what is kept out of a tier."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from jdisagg.config import EngineConfig, Mode, PrefixConfig
from jdisagg.prompt.hints import Hints
from jdisagg.request import Request
from tests import time_scale
from tests.end_to_end.clusters import Running, running
from tests.fakes.cluster import Collected
from tests.shapes import config

WORDS = ("once upon a time there was a little dog who lived in the forest").split()  # noqa: SIM905


def with_reuse(engine: EngineConfig, grain: int = 16, grid: int | None = None) -> EngineConfig:
    return replace(engine, prefix=PrefixConfig(True, grain, grid))


class Conversations:
    """A few beginnings; every turn goes on from the answer of an earlier one, or branches off."""

    BEGINNINGS = (20, 90, 170)  # tokens

    def __init__(self, run: Running, seed: int) -> None:
        self._run = run
        self._random = random.Random(seed)
        self._histories = [self.words(length) for length in self.BEGINNINGS]
        self._count = 0

    def words(self, tokens: int) -> tuple[int, ...]:
        text = " ".join(self._random.choice(WORDS) for _ in range(tokens))
        return tuple((self._run.tokenizer.encode(text) * 2)[:tokens])

    def wave(self, requests: int) -> list[Request]:
        return [self._next() for _ in range(requests)]

    def _next(self) -> Request:
        rng = self._random
        self._count += 1
        ids = rng.choice(self._histories) + self.words(rng.choice((0, 3, 16, 40)))
        options: dict[str, object] = {"max_tokens": rng.choice((3, 18, 35)), "ignore_eos": True}
        if self._count % 2:
            options |= {"temperature": 0.8, "seed": rng.getrandbits(40), "top_p": 0.9}
        if self._count % 3 == 0:
            options |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
        if self._count % 4 == 1:
            options |= {"n": 2}
        if self._count % 5 == 2:
            options |= {"stop": ("the", ". "), "logprobs": 2}
        return self._run.request(ids[-380:], f"r{self._count}", **options)

    def heard(self, requests: Sequence[Request], done: Sequence[Collected]) -> None:
        for request, one in zip(requests, done, strict=True):
            for tokens in one.tokens.values():
                history = request.prompt_token_ids + tuple(tokens)
                if len(history) < 330:
                    self._histories.append(history)
        self._histories = self._histories[:3] + self._histories[3:][-6:]


def decode_forgets(run: Running) -> None:
    """What the decode worker keeps is known no longer."""
    for worker in run.cluster._workers:
        if worker.name.startswith("decode"):
            worker._kept.clear()


async def push_out(run: Running, tokens: int = 500) -> None:
    """Takes all pages of the prefill mesh for a prompt that nobody asks again, on each rank."""
    decode_forgets(run)
    ranks = range(run.cluster.config.prefill.layout.dp)
    salt = random.getrandbits(30)
    one = [run.request((3 + rank,) * tokens, f"{salt}.{rank}", max_tokens=1) for rank in ranks]
    await run.complete_all(one)


async def converse(
    engine: EngineConfig,
    waves: int = 4,
    requests: int = 4,
    pushed_out: bool = False,
    hints: tuple[Hints | None, ...] = (None,),
) -> tuple[list[object], Running, int]:
    """The streams, and how many tokens of prompts were not computed. `pushed_out`: after each wave
    nothing is left in pages. `hints`: those of the requests, in turn."""
    async with running(engine) as run:
        talk, streams, cached = Conversations(run, seed=11), [], 0
        for _ in range(waves):
            asked = talk.wave(requests)
            asked = [replace(one, hints=hints[at % len(hints)]) for at, one in enumerate(asked)]
            done = await run.complete_all(asked)
            talk.heard(asked, done)
            if pushed_out:
                await push_out(run)
            streams += [(one.tokens, one.text, one.finish) for one in done]
            for one in done:
                assert one.usage is not None
                cached += one.usage.cached_tokens
    return streams, run, cached


async def one_after_the_other(
    run: Running, talk: Conversations, lengths: tuple[int, int]
) -> tuple[list[object], int]:
    """A conversation of four turns that begins and goes on with so many words: tokens and
    log-probabilities, and the number of cached tokens."""
    said, cached, history = [], 0, talk.words(lengths[0])
    for turn in range(4):
        request = run.request(history, f"r{turn}", max_tokens=6, ignore_eos=True, logprobs=3)
        done = await run.complete(request)
        assert done.usage is not None
        said.append((done.tokens, done.logprobs))
        cached += done.usage.cached_tokens
        history += (*done.tokens[0], *talk.words(lengths[1]))
    return said, cached


_REFERENCE: list[object] = []


async def reference() -> list[object]:
    if not _REFERENCE:
        streams, _, cached = await converse(config(Mode.UNIFIED))
        assert cached == 0
        _REFERENCE.extend(streams)
    return _REFERENCE


async def on_disk_alone(run: Running, tokens: int = 500) -> None:
    """What was known is, where it was used twice, on disk and nowhere else."""
    await push_out(run, tokens)
    worker = run.cluster._workers[0]
    async with asyncio.timeout(time_scale.seconds(60)):
        while not worker._sources.quiet:
            await asyncio.sleep(0.01)
    tier = worker._host
    tier._drop(tier.blocks, tier.blocks.clear(), "room")

"""Measures serving over gRPC on one device: the start of `jdisagg serve` in unified mode, 1, 20 and
128 streams, a long prompt and its cache hit, a start after SIGKILL with the programs on disk, and a
cluster of one prefill and one decode worker. The greedy texts after the restart and of the cluster
must equal those of the first server."""

import asyncio
import contextlib
import os
import signal
import statistics
import time

from benchmarks.clusters import cluster, pid_of, ready, server
from benchmarks.device_day.day import Day, Figures
from jdisagg.client import AsyncClient

PROMPTS = ("Once upon a time", "The little dog", "One day a girl named", "In the garden")
TOKENS, SMALL_TOKENS = 128, 16
LONG_PROMPT_TOKENS = 400  # the shipped model has a context of 512


def run(day: Day) -> None:
    counts = (1, 4) if day.small else (1, 20, 128)
    slots = f"--slots_per_rank={max(counts)}"
    texts: list[str] = []
    with contextlib.ExitStack() as first_server:
        targets: list[str] = []

        def start() -> Figures:
            began = time.perf_counter()
            targets.append(first_server.enter_context(server("--mode=unified", slots)))
            texts.extend(asyncio.run(answers_of(targets[0])))
            return {"first answers after s": time.perf_counter() - began}

        day.row("start", start)
        if targets:
            day.row("streams", lambda: asyncio.run(under_load(day, targets[0], counts)))
            day.row("long prompt", lambda: asyncio.run(long_prompt(targets[0])))
            os.kill(pid_of(targets[0]), signal.SIGKILL)
    if texts:
        day.row("restart after a kill", lambda: restart(texts, slots))
    day.row("split on one device", lambda: split(day, texts), shares=True)


def restart(texts: list[str], slots: str) -> Figures:
    began = time.perf_counter()
    with server("--mode=unified", slots) as target:
        check_equal(asyncio.run(answers_of(target)), texts)
        return {"first answers after s": time.perf_counter() - began}


async def answers_of(target: str) -> list[str]:
    async with ready(target) as client:
        return await answers(client)


async def long_prompt(target: str) -> Figures:
    """Measures the time to the first token of a long prompt, computed and then from the cache."""
    async with ready(target) as client:
        prompt = (await client.tokenize(f"{PROMPTS[0]} " * LONG_PROMPT_TOKENS))[:LONG_PROMPT_TOKENS]
        seconds = [await first_token_seconds(client, prompt) for _ in range(3)]
    return {"computed ms": 1e3 * seconds[0], "from the cache ms": 1e3 * min(seconds[1:])}


async def first_token_seconds(client: AsyncClient, prompt: tuple[int, ...]) -> float:
    began = time.perf_counter()
    async for _ in client.generate(token_ids=prompt, max_tokens=1, temperature=0.0):
        return time.perf_counter() - began
    raise AssertionError("a stream without a token")


async def under_load(day: Day, target: str, counts: tuple[int, ...]) -> Figures:
    tokens, figures = SMALL_TOKENS if day.small else TOKENS, {}
    async with ready(target) as client:
        for count in counts:
            started = time.perf_counter()
            gaps = await asyncio.gather(*[stream(client, n, tokens) for n in range(count)])
            seconds = time.perf_counter() - started
            every = sorted(gap for one in gaps for gap in one)
            figures[f"{count} streams"] = {
                "tokens/s": count * tokens / seconds,
                "TPOT p50 ms": 1e3 * statistics.median(every),
                "gap p99 ms": 1e3 * every[int(0.99 * (len(every) - 1))],
            }
    return figures


async def stream(client: AsyncClient, number: int, tokens: int) -> list[float]:
    """Returns the seconds between the events of one stream, with one token per event."""
    times: list[float] = []
    async for event in client.generate(
        PROMPTS[number % len(PROMPTS)], max_tokens=tokens, seed=number, ignore_eos=True
    ):
        times += [time.perf_counter()] * len(event.token_ids)
    return [after - before for before, after in zip(times, times[1:], strict=False)]


async def answers(client: AsyncClient) -> list[str]:
    """Returns greedy answers."""
    return [
        (await client.complete(prompt, max_tokens=SMALL_TOKENS, temperature=0.0)).text
        for prompt in PROMPTS
    ]


def split(day: Day, texts: list[str]) -> Figures:
    with cluster(*split_flags(day.small)) as target:
        check_equal(asyncio.run(answers_of(target)), texts)
    return {"greedy texts equal": len(texts)}


def check_equal(found: list[str], texts: list[str]) -> None:
    if found != texts:
        raise AssertionError(f"texts {found}, and of the first server {texts}")


def split_flags(small: bool) -> tuple[str, ...]:
    """Returns the flags of `jdisagg cluster` for two workers, which share the GPU if there is only
    one."""
    layouts = ("--prefill=tp=1", "--decode=tp=1")
    shared = () if small else ("--gpus=0,0",)
    return ("--prefill_workers=1", "--decode_workers=1", *layouts, *shared)

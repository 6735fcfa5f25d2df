"""Measures serving over gRPC on one device: `jdisagg serve` in unified mode with 1, 32 and 128
streams, and a cluster of one prefill and one decode worker. The cluster's greedy tokens must equal
those of the unified mode."""

import asyncio
import statistics
import time

from benchmarks.clusters import cluster, ready, server
from benchmarks.device_day.day import Day, Figures
from jdisagg.client import AsyncClient

PROMPTS = ("Once upon a time", "The little dog", "One day a girl named", "In the garden")
TOKENS, SMALL_TOKENS = 128, 16


def run(day: Day) -> None:
    counts = (1, 4) if day.small else (1, 32, 128)
    texts: dict[str, list[str]] = {}
    day.row("unified", lambda: unified(day, counts, texts))
    day.row("split on one device", lambda: split(day, texts), shares=True)


def unified(day: Day, counts: tuple[int, ...], texts: dict[str, list[str]]) -> Figures:
    slots = f"--slots_per_rank={max(counts)}"
    with server("--mode=unified", slots) as target:
        return asyncio.run(under_load(day, target, counts, texts))


async def under_load(
    day: Day, target: str, counts: tuple[int, ...], texts: dict[str, list[str]]
) -> Figures:
    tokens, figures = SMALL_TOKENS if day.small else TOKENS, {}
    async with ready(target) as client:
        texts["unified"] = await answers(client)
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


def split(day: Day, texts: dict[str, list[str]]) -> Figures:
    with cluster(*split_flags(day.small)) as target:

        async def ask() -> list[str]:
            async with ready(target) as client:
                return await answers(client)

        found = asyncio.run(ask())
    if found != texts.get("unified"):
        raise AssertionError(f"split: {found}, and on one mesh {texts.get('unified')}")
    return {"greedy texts equal": len(found)}


def split_flags(small: bool) -> tuple[str, ...]:
    """Returns the flags of `jdisagg cluster` for two workers, which share the GPU if there is only
    one."""
    layouts = ("--prefill=tp=1", "--decode=tp=1")
    shared = () if small else ("--gpus=0,0",)
    return ("--prefill_workers=1", "--decode_workers=1", *layouts, *shared)

"""What does a request of high priority wait for on a full server? Times to first token of the same
requests on an idle server, beside long streams of low priority that fill all slots, and beside
these without a priority.

    python -m benchmarks.priority                        # a simulated fleet, seconds
    python -m benchmarks.priority --live                 # a server of the shipped model
    python -m benchmarks.priority --live --target=HOST:PORT

The simulated fleet runs the real router, workers and schedulers in virtual time. Live, the three
cases follow each other in every round, and each low stream is compared with its undisturbed one,
token for token. On CPUs prefill and decode share the cores, so that a busy server is slower than an
idle one whatever the order of its requests is."""

import asyncio
import contextlib
import random
import statistics
import time
from dataclasses import replace

from absl import app, flags

from benchmarks.clusters import ready, server
from benchmarks.measure import save
from jdisagg.client import AsyncClient
from jdisagg.config import InstanceConfig, Mode, PrefixConfig
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import accelerator
from jdisagg.simulator.fleet import INSTANCE, Fleet, Pool
from jdisagg.simulator.run import Result, simulate
from jdisagg.simulator.workloads import Arrival

_LIVE = flags.DEFINE_boolean("live", False, "Whether to measure a server.")
_TARGET = flags.DEFINE_string("target", "", "gRPC address of a server; '' starts one.")
_SLOTS = flags.DEFINE_integer("slots", 8, "Slots of the server that is started.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Live rounds of the three cases.")
_HIGHS = flags.DEFINE_integer("highs", 40, "Requests of high priority, of a live case.")
_GAP = flags.DEFINE_float("gap_seconds", 0.25, "Mean seconds between them, live.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

HIGH, LOW = 10, 0
CASES = ("idle", "storm", "no priority")
LOW_TOKENS, HIGH_TOKENS = 400, 4


def figures(seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile, in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50_ms": 1e3 * statistics.median(seconds), "p99_ms": 1e3 * cuts[98]}


def told(what: str, ttfts: dict[str, list[float]], more: dict[str, object]) -> dict[str, object]:
    found: dict[str, object] = {case: figures(seconds) for case, seconds in ttfts.items()}
    p99 = {case: figures(seconds)["p99_ms"] for case, seconds in ttfts.items()}
    ratios = {case: p99[case] / p99["idle"] for case in CASES[1:]}
    for case in CASES:
        row = figures(ttfts[case])
        print(
            f"{what:20} {case:12} p50 {row['p50_ms']:9.2f} ms  p99 {row['p99_ms']:9.2f} ms", end=""
        )
        print(f"  {ratios[case]:8.2f} x idle" if case in ratios else "")
    print(f"{what:20} {more}")
    return found | {"p99_over_idle": ratios} | more


# ---- simulated


def simulated(mode: Mode) -> dict[str, object]:
    """Llama 3 8B on four H100s; twice as many low streams as there are slots."""
    instance: InstanceConfig = replace(INSTANCE, slots_per_rank=64, chunk_tokens=2048)
    pool = Pool(2 if mode is Mode.DISAGGREGATED else 4, accelerator("h100"), instance)
    prefill = pool if mode is Mode.DISAGGREGATED else None
    prefix = PrefixConfig(host_gib=64.0)
    fleet = Fleet(geometry("llama-3-8b"), pool, prefill, mode, prefix=prefix)
    draw, at, storm = random.Random(5), 20.0, []
    for _ in range(1000):
        at += draw.expovariate(20.0)
        storm.append(Arrival(at, 500, 50, tenant="high"))
    slots = pool.count * 64
    tokens = [int(draw.expovariate(1 / 3000)) + 500 for _ in range(2 * slots)]
    lows = [Arrival(0.02 * at, 500, more, tenant="low") for at, more in enumerate(tokens)]

    def run(*arrivals: Arrival) -> Result:
        return simulate(fleet, sorted(arrivals, key=lambda one: one.at_seconds))

    high = [replace(one, priority=HIGH) for one in storm]
    results = dict(zip(CASES, (run(*high), run(*lows, *high), run(*lows, *storm)), strict=True))
    ttfts = {
        case: [one.ttft or 1e9 for one in result.outcomes if one.tenant == "high"]
        for case, result in results.items()
    }
    ended = [one for one in results["storm"].outcomes if one.end == "finished"]
    counters = results["storm"].counters
    names = ("sequences_yielded", "spills_restored", "spills_missed", "preemptions")
    counts: dict[str, object] = {name: counters.get(name, 0) for name in names}
    return told(f"simulated {mode.value}", ttfts, {"finished": len(ended), **counts})


# ---- live


async def first_token(client: AsyncClient, number: int, priority: int) -> float:
    began, first = time.perf_counter(), None
    async for event in client.generate(
        token_ids=[3 + number % 50] * 48,
        max_tokens=HIGH_TOKENS,
        temperature=0.0,
        ignore_eos=True,
        priority=priority,
    ):
        if first is None and event.token_ids:
            first = time.perf_counter() - began
    assert first is not None
    return first


async def highs(client: AsyncClient, priority: int, draw: random.Random) -> list[float]:
    tasks = []
    for number in range(_HIGHS.value):
        tasks.append(asyncio.create_task(first_token(client, number, priority)))
        await asyncio.sleep(draw.expovariate(1 / _GAP.value))
    return await asyncio.gather(*tasks)


async def low(client: AsyncClient, number: int) -> tuple[list[int], int]:
    """The tokens of a low stream, and how often it was set aside."""
    done = await client.complete(
        token_ids=[60 + number] * 16,
        max_tokens=LOW_TOKENS,
        temperature=0.8,
        seed=number,
        ignore_eos=True,
        priority=LOW,
    )
    assert done.timings is not None
    return list(done.choices[0].token_ids), done.timings.preemptions


async def lows(client: AsyncClient, count: int, aside: list[int], wanted: dict[int, list[int]]):
    """Keeps `count` low streams running, until cancelled, and checks each that ends."""

    async def one(at: int) -> None:
        while True:
            tokens, preemptions = await low(client, at)
            assert wanted.setdefault(at, tokens) == tokens, f"low stream {at} differs"
            aside.append(preemptions)

    await asyncio.gather(*map(one, range(count)))


async def measured(target: str) -> dict[str, object]:
    ttfts: dict[str, list[float]] = {case: [] for case in CASES}
    aside: dict[str, list[int]] = {case: [] for case in CASES}
    count, draw = 2 * _SLOTS.value, random.Random(7)
    async with ready(target) as client:
        wanted = {at: (await low(client, at))[0] for at in range(count)}
        for turn in range(-1, _ROUNDS.value):  # the first round warms up
            for case in CASES:
                busy = asyncio.create_task(lows(client, count, aside[case], wanted))
                if case == "idle":
                    busy.cancel()
                else:
                    await asyncio.sleep(2.0)
                found = await highs(client, LOW if case == "no priority" else HIGH, draw)
                busy.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await busy
                ttfts[case] += found if turn >= 0 else []
    checked = {case: len(aside[case]) for case in CASES[1:]}
    counts = {case: sum(aside[case]) for case in CASES[1:]}
    return told("live", ttfts, {"low_streams_compared": checked, "set_aside": counts})


def main(_: list[str]) -> None:
    found: dict[str, object]
    if not _LIVE.value:
        found = {mode.value: simulated(mode) for mode in Mode}
    elif _TARGET.value:
        found = {"live": asyncio.run(measured(_TARGET.value))}
    else:
        arguments = ("--prefill=tp=1", "--decode=tp=1", f"--slots_per_rank={_SLOTS.value}")
        with server(*arguments) as target:
            found = {"live": asyncio.run(measured(target))}
    save(_NAME.value, found) if _NAME.value else None


if __name__ == "__main__":
    app.run(main)

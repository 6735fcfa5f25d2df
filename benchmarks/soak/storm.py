"""A storm of aborts: half of the requests are cancelled at random moments, while the only prefill
worker and one of two decode workers are killed.

    python -m benchmarks.soak.storm --requests=800 --json=benchmarks/results/abort_storm.json

Every kept stream must have the tokens of an undisturbed run, and all pages must be free again.
Exits with 1 otherwise."""

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import machine
from benchmarks.soak.cluster import ChaosCluster, Shape
from benchmarks.soak.load import Kind, Stream, known_kinds
from benchmarks.soak.scenarios import BACK_SECONDS, QUIET_SECONDS
from jdisagg.client import AsyncClient
from jdisagg.executor.program_cache import use_compilation_cache

DEADLINE_SECONDS = 900.0
ABORT_SECONDS = 2.0  # an abort comes within this time after its request
VICTIMS = ("prefill-0", "decode-0")


async def storm(
    cluster: ChaosCluster, kinds: list[Kind], asked: argparse.Namespace
) -> dict[str, object]:
    rng = random.Random(asked.seed)
    streams = [Stream(rng.choice(kinds)) for _ in range(asked.requests)]
    aborted = set(rng.sample(range(asked.requests), asked.requests // 2))
    places = asyncio.Semaphore(asked.at_once)
    killed_at = 0.0

    async def run(number: int, client: AsyncClient) -> None:
        async with places:
            running = asyncio.create_task(streams[number].run(client, DEADLINE_SECONDS))
            if number in aborted:
                await asyncio.wait((running,), timeout=rng.uniform(0.0, ABORT_SECONDS))
                running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def kill() -> None:
        nonlocal killed_at
        while sum(stream.asked_at is not None for stream in streams) < asked.requests // 3:
            await asyncio.sleep(0.01)
        killed_at = time.monotonic()
        for name in VICTIMS:
            cluster.forget_start(name)
            cluster.signal(name, signal.SIGKILL)

    began = time.monotonic()
    async with AsyncClient(cluster.address) as client:
        await asyncio.gather(kill(), *(run(number, client) for number in range(len(streams))))
    seconds = time.monotonic() - began
    await cluster.until_live(cluster.workers, BACK_SECONDS)
    quiet_seconds = await cluster.until_quiet(QUIET_SECONDS)
    kept = [stream for number, stream in enumerate(streams) if number not in aborted]
    pauses = [pause for one in kept if (pause := one.pause_after(killed_at)) is not None]
    return {
        "requests": len(streams),
        "aborted_before_their_end": sum(streams[one].ended_at is None for one in aborted),
        "kept": len(kept),
        "kept_equal": sum(not stream.wrong for stream in kept),
        "wrong": [stream.wrong for stream in kept if stream.wrong][:10],
        "seconds": round(seconds, 1),
        "killed": VICTIMS,
        "streams_interrupted": len(pauses),
        "pause_median_s": round(statistics.median(pauses), 2) if pauses else None,
        "pause_max_s": round(max(pauses), 2) if pauses else None,
        "all_pages_free_after_s": round(quiet_seconds, 2),
    }


async def run(asked: argparse.Namespace, folder: Path) -> dict[str, object]:
    programs = asked.cache or str(folder / "programs")
    use_compilation_cache(programs)
    kinds = await known_kinds(20, seed=asked.seed)
    shape = Shape(1, 2, seed=asked.seed, warm_up=not asked.cold)
    cluster = ChaosCluster(shape, folder, programs)
    try:
        await cluster.start()
        return await storm(cluster, kinds, asked)
    finally:
        await cluster.stop()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak.storm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--at_once", type=int, default=64, help="requests that run at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cold", action="store_true", help="workers compile as they serve")
    parser.add_argument("--cache", default="", help="folder of compiled programs")
    parser.add_argument("--json", default="", help="file for the figures")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jdisagg-storm-") as folder:
        figures = {"machine": machine(), **asyncio.run(run(asked, Path(folder)))}
    print(json.dumps(figures, indent=1))
    if asked.json:
        Path(asked.json).write_text(json.dumps(figures, indent=1) + "\n")
    return int(figures["kept"] != figures["kept_equal"])


if __name__ == "__main__":
    sys.exit(main())

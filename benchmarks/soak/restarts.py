"""How long a worker that was killed is away: until its new process serves, until the router counts
it, until a stream went through it.

    python -m benchmarks.soak.restarts --rounds=3 python -m benchmarks.soak.restarts --rounds=2
    --processes=2 --prefill=tp=2 --decode=dp=2

One worker of each role, so that a stream must go through the one that was killed; nothing else
runs. Seconds from `kill -9`, the supervisor's pause included. Programs are in the cache: the first
start of all fills it."""

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.soak.cluster import PAUSE_SECONDS, ChaosCluster, Shape
from jdisagg.client import AsyncClient

AWAY_SECONDS = 120.0
PROMPT = list(range(40))


async def restart(cluster: ChaosCluster, name: str) -> dict[str, float]:
    """Kills all processes of one worker. Returns the seconds until each step of its recovery."""
    await cluster.until_warm(cluster.workers, AWAY_SECONDS)
    cluster.forget_start(name)
    at = time.monotonic()
    assert cluster.signal(name, signal.SIGKILL), f"{name} does not run"
    async with AsyncClient(cluster.address) as client:
        await cluster.until_live([name], AWAY_SECONDS)
        live = time.monotonic() - at
        await client.complete(
            token_ids=PROMPT, max_tokens=8, ignore_eos=True, deadline_seconds=AWAY_SECONDS
        )
        usable = time.monotonic() - at
    return {
        "pause": PAUSE_SECONDS,
        "serves": cluster.served_at[name] - at,
        "live": live,
        "usable": usable,
    }


async def run(asked: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    shape = Shape(1, 1, asked.prefill_layout, asked.decode_layout, asked.processes)
    cluster = ChaosCluster(shape, folder, asked.cache or str(folder / "programs"))
    times: dict[str, dict[str, list[float]]] = {}
    try:
        await cluster.start()
        for _ in range(asked.rounds):
            for name in cluster.workers:
                for step, seconds in (await restart(cluster, name)).items():
                    times.setdefault(name, {}).setdefault(step, []).append(round(seconds, 2))
    finally:
        await cluster.stop()
    return times


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak.restarts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="of each instance")
    parser.add_argument("--prefill_layout", default="tp=1")
    parser.add_argument("--decode_layout", default="tp=1")
    parser.add_argument(
        "--cache", default="", help="folder of compiled programs; a fresh one by default"
    )
    parser.add_argument("--json", default="", help="file for the times")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jdisagg-restarts-") as folder:
        times = asyncio.run(run(asked, Path(folder)))
    for name, steps in times.items():
        print(
            name,
            ", ".join(
                f"{step} {statistics.median(seconds):.2f} s (max {max(seconds):.2f})"
                for step, seconds in steps.items()
            ),
        )
    if asked.json:
        Path(asked.json).write_text(json.dumps(times, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

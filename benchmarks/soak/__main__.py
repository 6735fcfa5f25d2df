"""Soak test: runs random fault scenarios from a seed on a cluster of processes under load, checks each,
and prints a table of recovery times.

    python -m benchmarks.soak --minutes=10 --seed=1
    python -m benchmarks.soak --minutes=10 --seed=1 --rate=0.05              # also, every worker's channel has faults
    python -m benchmarks.soak --minutes=10 --processes=2 --prefill=tp=2 --decode=dp=2
    python -m benchmarks.soak --only="SIGSTOP prefill" --times=5             # only these, in order, five times

Exits with 1 if a guarantee was broken in any scenario."""  # noqa: E501

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.soak.cluster import ChaosCluster, Shape
from benchmarks.soak.load import known_kinds
from benchmarks.soak.report import summary, table
from benchmarks.soak.scenarios import Harness, Outcome, all_scenarios
from jdisagg.executor.program_cache import use_compilation_cache


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--streams", type=int, default=50, help="of each scenario")
    parser.add_argument(
        "--rate", type=float, default=0.0, help="of faults in the workers' channels"
    )
    parser.add_argument("--processes", type=int, default=1, help="of each instance")
    parser.add_argument("--prefill_layout", default="tp=1")
    parser.add_argument("--decode_layout", default="tp=1")
    parser.add_argument(
        "--only",
        default="",
        help="scenarios with one of these texts in their name (a,b,c), in order",
    )
    parser.add_argument("--times", type=int, default=1, help="how often each of --only")
    parser.add_argument(
        "--cold", action="store_true", help="workers serve at once, and compile as they go"
    )
    parser.add_argument(
        "--cache", default="", help="folder of compiled programs; a fresh one by default"
    )
    parser.add_argument("--json", default="", help="file for the outcomes")
    asked = parser.parse_args()
    shape = Shape(
        prefill_layout=asked.prefill_layout,
        decode_layout=asked.decode_layout,
        processes=asked.processes,
        rate=asked.rate,
        seed=asked.seed,
        warm_up=not asked.cold,
    )
    with tempfile.TemporaryDirectory(prefix="jdisagg-chaos-") as folder:
        outcomes = asyncio.run(run(shape, asked, Path(folder)))
    print(table(outcomes))
    if asked.json:
        said = {"total": summary(outcomes), "scenarios": [outcome.row for outcome in outcomes]}
        Path(asked.json).write_text(json.dumps(said, indent=1) + "\n")
    return int(any(outcome.faults for outcome in outcomes))


async def run(shape: Shape, asked: argparse.Namespace, folder: Path) -> list[Outcome]:
    programs = asked.cache or str(folder / "programs")
    use_compilation_cache(programs)
    kinds = await known_kinds(20, seed=asked.seed)
    cluster = ChaosCluster(shape, folder, programs)
    outcomes: list[Outcome] = []
    try:
        await cluster.start()
        harness = Harness(cluster, kinds, asked.streams, asked.seed)
        rng, until = random.Random(asked.seed), time.monotonic() + 60 * asked.minutes
        scenarios = list(all_scenarios(shape.processes))
        texts = asked.only.split(",")
        named = [scenario for scenario in scenarios if any(text in scenario.name for text in texts)]
        chosen = asked.times * named if asked.only else None
        while time.monotonic() < until and chosen != []:
            scenario = rng.choice(scenarios) if chosen is None else chosen.pop(0)
            began = time.monotonic()
            outcomes.append(await harness.run(scenario))
            seconds = time.monotonic() - began
            print(
                f"{scenario.name}: {'; '.join(outcomes[-1].faults) or 'right'} ({seconds:.1f} s)",
                file=sys.stderr,
                flush=True,
            )
        if cluster.desk.counts:
            print(f"faults in the channels: {cluster.desk.counts}", file=sys.stderr)
    finally:
        await cluster.stop()
        if any(outcome.faults for outcome in outcomes):
            kept = Path(tempfile.gettempdir()) / f"jdisagg-chaos-{asked.seed}.log"
            kept.write_bytes(cluster.log.read_bytes())
            print(f"what the processes said: {kept}", file=sys.stderr)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())

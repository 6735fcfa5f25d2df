"""How long does a worker take to change its role under load, and how long do streams pause?

    python -m benchmarks.role_switch --rounds=2 --concurrent=6 --name=role_switch
    python -m benchmarks.role_switch --rounds=2 --prefill=tp=2 --decode=dp=2

A cluster of real processes (`jdisagg cluster`, 2 + 2, the shipped model, programs compiled) serves
streams all the time. A prefill worker changes to decode and back, and a decode worker to prefill
and back, in several rounds. All tokens are compared with expected tokens. With --ahead, programs of
both roles are compiled at the start. Otherwise they are compiled in the first round, unless the
folder of --cache has them.

- seconds: from the request to the router until it places requests on the worker in its new role,
  with the parts that the worker reports.
- longest pause: longest gap between two deliveries of any stream, from a second before the change
  to half a second after it, and the median of the streams' longest gaps, beside the longest and
  the median gap under the same load without a change."""

import asyncio
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path

import psutil
from absl import app, flags

from benchmarks.clusters import cluster, ready
from benchmarks.measure import save
from benchmarks.soak.load import Kind, known_kinds
from jdisagg.messages.roles import SwitchState
from jdisagg.messages.worker_status import WorkerRole
from tests.end_to_end.role_switch import Change, Load, change, load

_ROUNDS = flags.DEFINE_integer("rounds", 3, "Of all four changes.")
_CONCURRENT = flags.DEFINE_integer("concurrent", 6, "Streams at any time.")
_CALM = flags.DEFINE_float(
    "calm_seconds", 5.0, "How long the load runs before the first change, for comparison."
)
_AHEAD = flags.DEFINE_bool("ahead", False, "Compile programs of both roles at the start.")
_PREFILL = flags.DEFINE_string("prefill", "tp=1", "Layout of prefill workers.")
_DECODE = flags.DEFINE_string("decode", "tp=1", "Layout of decode workers.")
_CACHE = flags.DEFINE_string("cache", "", "Folder of compiled programs; by default an empty one.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

STEPS = (
    ("prefill-1", WorkerRole.DECODE),
    ("prefill-1", WorkerRole.PREFILL),
    ("decode-1", WorkerRole.PREFILL),
    ("decode-1", WorkerRole.DECODE),
)
PARTS = ("drain_seconds", "build_seconds", "warm_up_seconds", "total_seconds")


def gaps(streams: Load, begin: float, end: float) -> list[list[float]]:
    """Returns the gaps of each stream that has any in this time."""
    found = [
        [
            later - earlier
            for earlier, later in itertools.pairwise(one.times)
            if earlier >= begin and later <= end
        ]
        for one in streams.streams
    ]
    return [one for one in found if one]


def resident_bytes() -> dict[str, int]:
    """Returns the resident memory of each worker of our cluster."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        name = next(
            (flag.partition("=")[2] for flag in child.cmdline() if flag.startswith("--name=")), ""
        )
        if name and "launch.worker" in child.cmdline():
            found[name] = child.memory_info().rss
    return found


def row(
    round_: int, step: tuple[str, WorkerRole], made: Change, streams: Load
) -> dict[str, object]:
    longest = map(max, gaps(streams, made.asked_at - 1.0, made.done_at + 0.5))
    assert made.report.state is SwitchState.DONE, made.report.reason
    parts = {name: round(getattr(made.report, name), 3) for name in PARTS}
    seconds = {
        "seconds": round(made.done_at - made.asked_at, 3),
        **parts,
        "longest_pause_seconds": round(made.longest_pause, 3),
        "median_longest_pause_seconds": round(statistics.median(longest), 3),
    }
    return {
        "round": round_,
        "worker": step[0],
        "role": step[1].value,
        "layout": str(made.report.layout),
        **seconds,
    }


async def measure(target: str, kinds: list[Kind]) -> dict[str, object]:
    rows: list[dict[str, object]] = []
    memory: list[dict[str, int]] = []
    async with ready(target), load(target, kinds, _CONCURRENT.value) as streams:
        await streams.until_under_way(_CONCURRENT.value)
        began = time.monotonic()
        await asyncio.sleep(_CALM.value)
        calm = [gap for one in gaps(streams, began, time.monotonic()) for gap in one]
        for round_ in range(1, _ROUNDS.value + 1):
            memory.append(resident_bytes())
            for step in STEPS:
                made = await change(target, streams, *step)
                rows.append(row(round_, step, made, streams))
                print(rows[-1], flush=True)
        memory.append(resident_bytes())
    assert not streams.wrong, streams.wrong
    seconds = {
        which: {
            role: round(
                statistics.median(
                    float(str(one["seconds"]))
                    for one in rows
                    if one["role"] == role and chosen(int(str(one["round"])))
                ),
                3,
            )
            for role in ("prefill", "decode")
        }
        for which, chosen in (
            ("first", lambda number: number == 1),
            ("later", lambda number: number > 1),
        )
        if any(chosen(int(str(one["round"]))) for one in rows)
    }
    return {
        "streams": len(streams.streams),
        "streams_broken_or_wrong": len(streams.wrong),
        "median_seconds_to_become": seconds,
        "longest_pause_without_a_change_seconds": round(max(calm), 3),
        "median_pause_without_a_change_seconds": round(statistics.median(calm), 4),
        "changes": rows,
        "resident_megabytes_before_each_round_and_at_the_end": [
            {name: size >> 20 for name, size in one.items()} for one in memory
        ],
    }


def main(_: list[str]) -> None:
    os.chdir(Path(__file__).resolve().parents[1])
    kinds = asyncio.run(known_kinds(9, tokens=(60, 150, 300)))
    with tempfile.TemporaryDirectory() as empty:
        settings = (
            f"--compilation_cache={_CACHE.value or empty}",
            "--set=model.context_tokens=512",
            "--drain_seconds=20",
            f"--prefill={_PREFILL.value}",
            f"--decode={_DECODE.value}",
        )
        if _AHEAD.value:  # the controller sees no reason to change a role
            slow = ("ttft_seconds", "tpot_seconds")
            settings += ("--elastic", *(f"--set=elastic.slo.{name}=1000" for name in slow))
        sizes = ("--chunk_tokens=64", "--page_size=16", "--slots_per_rank=4")
        with cluster("--prefill_workers=2", "--decode_workers=2", *sizes, *settings) as target:
            figures = asyncio.run(measure(target, kinds))
    print({key: value for key, value in figures.items() if key != "changes"})
    if _NAME.value:
        print(save(_NAME.value, figures))


if __name__ == "__main__":
    app.run(main)

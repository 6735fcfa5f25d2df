"""Does `jdisagg cluster --elastic` follow a changing load, how soon, and how long do streams pause?

    python -m benchmarks.elastic_live --name=elastic_live

A cluster of real processes (2 + 2, the shipped model, warm) serves a closed loop of clients: first
long prompts with short answers, then short prompts with long answers. The router's controller
detects missed TTFT or full slots and changes the role of a worker. All tokens are compared with
expected tokens. If processes share few cores, an additional worker adds no computing power. The
figures therefore show whether and how soon the ratio of roles follows, and not the gain
(docs/elastic.md has a simulated gain).

- decided: seconds from the change of load until a worker starts to change its role; patience and
  window are settings in the results.
- changed: seconds from there until the router places requests on the worker in its new role.
- TTFT of requests sent before the role change began, and after it ended."""

import asyncio
import os
import statistics
import tempfile
from pathlib import Path

from absl import app, flags

from benchmarks.clusters import cluster, ready
from benchmarks.measure import save
from benchmarks.soak.load import Kind, known_kinds
from jdisagg.service.internal.role_services import cluster_roles
from tests.end_to_end.role_switch import Shift, shifted

_CONCURRENT = flags.DEFINE_integer("concurrent", 16, "Streams at any time.")
_TTFT = flags.DEFINE_float("ttft", 0.15, "Objective of the first token, in seconds.")
_AFTER = flags.DEFINE_float("after_seconds", 10.0, "How long each load goes on after the change.")
_CACHE = flags.DEFINE_string("cache", "", "Folder of compiled programs; by default an empty one.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

SETTINGS = {
    "window_seconds": 20,
    "patience_seconds": 5,
    "cooldown_seconds": 10,
    "switch_seconds": 10,
    "slo.tpot_seconds": 2,
}
MOST_SECONDS = 240.0


def row(shift: Shift) -> dict[str, object]:
    last = max(one.asked_at for one in shift.streams if one.asked_at is not None) - shift.began_at
    times = {
        "before": shift.first_tokens(0.0, shift.left_seconds),
        "while_changing": shift.first_tokens(shift.left_seconds, shift.served_seconds),
        "after": shift.first_tokens(shift.served_seconds, last + 1.0),
    }
    return {
        "decided_after_seconds": round(shift.left_seconds, 2),
        "changed_within_seconds": round(shift.served_seconds - shift.left_seconds, 2),
        "median_ttft_seconds": {
            name: round(statistics.median(values), 3) for name, values in times.items() if values
        },
        "longest_pause_seconds": round(shift.longest_pause, 2),
        "streams": len(shift.streams),
    }


async def measure(target: str, prompts: list[Kind], answers: list[Kind]) -> dict[str, object]:
    figures: dict[str, object] = {
        "settings": {**SETTINGS, "slo.ttft_seconds": _TTFT.value},
        "concurrent": _CONCURRENT.value,
    }
    async with ready(target), cluster_roles(target) as roles:
        for name, kinds, prefill in (("long_prompts", prompts, 3), ("long_answers", answers, 2)):
            shift = await shifted(
                target,
                kinds,
                _CONCURRENT.value,
                prefill,
                most_seconds=MOST_SECONDS,
                after_seconds=_AFTER.value,
            )
            figures[name] = {**row(shift), "controller_afterwards": (await roles.advice()).decision}
            print(name, figures[name], flush=True)
    return {**figures, "streams_broken_or_wrong": 0}  # else `shifted` would have raised


def main(_: list[str]) -> None:
    os.chdir(Path(__file__).resolve().parents[1])
    prompts = asyncio.run(known_kinds(4, tokens=(3,), prompts=(400, 450)))
    answers = asyncio.run(known_kinds(4, tokens=(300, 400), prompts=(8, 12)))
    with tempfile.TemporaryDirectory() as empty:
        settings = [
            f"--set=elastic.{name}={value}"
            for name, value in {**SETTINGS, "slo.ttft_seconds": _TTFT.value}.items()
        ]
        sizes = (
            "--chunk_tokens=64",
            "--page_size=16",
            "--slots_per_rank=4",
            "--set=model.context_tokens=512",
            "--drain_seconds=20",
        )
        flags_ = (
            "--prefill_workers=2",
            "--decode_workers=2",
            "--elastic",
            *sizes,
            *settings,
            f"--compilation_cache={_CACHE.value or empty}",
        )
        with cluster(*flags_) as target:
            figures = asyncio.run(measure(target, prompts, answers))
    if _NAME.value:
        print(save(_NAME.value, figures))


if __name__ == "__main__":
    app.run(main)

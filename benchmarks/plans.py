"""Is `jdisagg plan` quick, readable and right? Plans five sites as users would. For two dense sites
and a mixture of experts, every candidate is simulated afterwards.

    python -m benchmarks.plans [--sites=llama-3-8b on 4 l40s,...] [--name=plans]

Reports for each site: seconds until the first answer and until the table, processor seconds, width
of the widest line, and the best candidate. With `every`: the number of simulated candidates, and
those that exceed the best rate by at least 5 % (none, if the search misses nothing). Each is
simulated at 1.05 times the best rate, so that most runs end soon. Loads no model."""

import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from absl import app, flags

from benchmarks.measure import RESULTS, save
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import accelerator
from jdisagg.simulator.planning.bounds import Goal
from jdisagg.simulator.planning.candidates import Site
from jdisagg.simulator.planning.fleet import FleetMaker
from jdisagg.simulator.planning.measure import TOLERANCE
from jdisagg.simulator.planning.planner import Planner, Search
from jdisagg.simulator.workloads import Arrival, poisson, within_context
from launch.plan_inputs import mixture
from launch.processes import on_cores, usable_cores

MARGIN = 1.05


@dataclass(frozen=True)
class Case:
    """One site to plan. `every`: whether all candidates are simulated too."""

    model: str
    hardware: str
    accelerators: int
    mixture: tuple[str, ...]
    ttft: float
    tpot: float
    weights: str = ""
    every: bool = False

    @property
    def name(self) -> str:
        return f"{self.model} on {self.accelerators} {self.hardware}"

    @property
    def flags(self) -> list[str]:
        return [
            f"--model={self.model}",
            f"--hardware={self.hardware}",
            f"--accelerators={self.accelerators}",
            f"--mixture={','.join(self.mixture)}",
            f"--ttft={self.ttft}",
            f"--tpot={self.tpot}",
            *([f"--weights={self.weights}"] if self.weights else []),
        ]


CHAT = ("0.8:1000/200", "0.2:8000/300")
CASES = (
    Case("llama-3.1-8b", "l40s", 4, ("1:1000/200",), 1.0, 0.05, every=True),
    Case("llama-3.1-70b", "h100", 16, CHAT, 1.0, 0.05, every=True),
    Case("gpt-oss-120b", "h100", 8, CHAT, 1.0, 0.05, every=True),
    Case("qwen3-235b-a22b", "gb200-nvl72", 32, CHAT, 1.0, 0.05),
    Case("deepseek-v3", "h200", 32, CHAT, 2.0, 0.05, weights="fp8"),
)
_SITES = flags.DEFINE_list("sites", None, "Names of cases, as printed. Default: all.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")


def planned(case: Case) -> dict[str, object]:
    """Returns the figures of `jdisagg plan`, run in a separate process."""
    before, began = _children_seconds(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        done = subprocess.run(
            [sys.executable, "-m", "launch.plan", *case.flags, f"--json={path}"],
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - began
        if done.returncode:
            raise SystemExit(f"{case.name}: launch.plan failed: {done.stdout}{done.stderr}")
        plan = json.loads(path.read_text())
    first = re.search(r"^ *([\d.]+) s  ", done.stderr, re.MULTILINE)
    assert first is not None, f"no answer in {done.stderr!r}"
    best = plan["findings"][0]
    table = done.stdout.partition(plan["verdict"])[0]
    figures: dict[str, object] = {
        "first_answer_seconds": float(first[1]),
        "seconds": round(seconds, 1),
        "processor_seconds": round(_children_seconds() - before, 1),
        "table_columns": max(map(len, table.splitlines())),
        "considered": plan["considered"],
        "simulated": sum(item["simulated"] for item in plan["findings"]),
        "wins": {
            key: best[key]
            for key in (
                "mode",
                "decode_layout",
                "decode_instances",
                "prefill_layout",
                "prefill_instances",
                "chunk_tokens",
                "per_accelerator",
                "requests_per_second",
            )
        },
        "verdict": plan["verdict"],
    }
    return figures


def every_candidate(case: Case, rate: float) -> dict[str, object]:
    """Simulates all candidates at MARGIN times `rate`, in requests per second of the whole site."""
    model, site = (geometry(case.model), Site(accelerator(case.hardware), case.accelerators))
    maker = FleetMaker(model, site)
    goal = Goal(case.ttft, case.tpot)
    planner = Planner(model, site, goal, maker.runners, Search(), spread=on_cores(usable_cores()))
    before, began = _children_seconds(), time.monotonic()
    beating, tried = planner.beating(_workload(case), MARGIN * rate / (1 + TOLERANCE))
    return {
        "tried": tried,
        "seconds": round(time.monotonic() - began, 1),
        "processor_seconds": round(_children_seconds() - before, 1),
        "carry_5_percent_more": [
            {
                "mode": item.candidate.mode.value,
                "name": item.candidate.name,
                "of_the_winner": round(item.rate / rate, 3),
            }
            for item in beating
        ],
    }


def _workload(case: Case) -> list[Arrival]:
    return within_context(
        poisson(1.0, 4000, mixture(case.mixture), 0), geometry(case.model).context_tokens
    )


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(_: list[str]) -> None:
    wanted = _SITES.value
    cases = [case for case in CASES if wanted is None or case.name in wanted]
    path = RESULTS / f"{_NAME.value}.json"
    kept: dict[str, object] = {}
    if _NAME.value and wanted is not None and path.exists():
        kept = json.loads(path.read_text())
        kept.pop("machine")
    for case in cases:
        figures = planned(case)
        if case.every:
            wins = figures["wins"]
            assert isinstance(wins, dict)
            figures["every"] = every_candidate(case, wins["requests_per_second"])
        print(json.dumps({case.name: figures}), flush=True)
        kept[case.name] = figures
    if _NAME.value:
        save(_NAME.value, kept)


if __name__ == "__main__":
    app.run(main)

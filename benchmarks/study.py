"""Does disaggregation pay? Goodput of unified, chunked and disaggregated serving of the same
models, hardware, workloads and engine.

    python -m benchmarks.study                     # all cases; continues where it stopped,
        results/study.json
    python -m benchmarks.study --seconds=80        # stops after this time
    python -m benchmarks.study --only=azure-code   # cases whose name contains this text
    python -m benchmarks.study_report              # results/study.md and its plots

Each candidate (`study_cases`) is simulated at increasing rates until less than three quarters of
its requests meet any of the limits. Each run is evaluated under all limits at once. Arrivals are
Poisson, with the same random numbers at every rate and for every candidate. Requests that arrive
while the empty cluster fills are not counted. Uses one process and one core; some hundred thousand
simulated requests in total."""

import json
import platform
import sys
import time
from datetime import date
from pathlib import Path

from absl import app, flags
from rich.console import Console
from rich.progress import Progress

from benchmarks.commits import commit, subject
from benchmarks.study_cases import CASES
from benchmarks.study_runs import steps_of

RESULTS = Path(__file__).parent / "results" / "study.json"
_SECONDS = flags.DEFINE_float("seconds", None, "Stop after about so long; the next call goes on.")
_ONLY = flags.DEFINE_string("only", "", "Only cases whose name holds this.")
_RESULTS = flags.DEFINE_string("results", str(RESULTS), "Where results are kept.")


def main(_: list[str]) -> None:
    path = Path(_RESULTS.value)
    results = json.loads(path.read_text()) if path.exists() else {"cases": {}}
    results["made"] = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "commit": commit(),
        "command": " ".join(sys.argv),
        "commits": {**results.get("made", {}).get("commits", {}), commit(): subject(commit())},
    }
    began = time.monotonic()
    cases = [case for case in CASES if _ONLY.value in case.name]
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("study", total=len(cases))
        for case in cases:
            bar.update(task, description=case.name)
            known = results["cases"].setdefault(case.name, {})
            known["limits"] = {
                limits.name: [limits.ttft, limits.tpot, limits.longest_gap]
                for limits in case.workload.limits
            }
            known["accelerators"], known["requests_in_slice"] = (
                case.setting.accelerators,
                len(case.arrivals),
            )
            for run in steps_of(case, known):
                path.write_text(json.dumps(results, indent=1) + "\n")
                if not sys.stderr.isatty():
                    print(
                        f"{case.name}: {run['per_accelerator']:.3f} an accelerator,"
                        f" {run['attainment']}",
                        flush=True,
                    )
                if _SECONDS.value is not None and time.monotonic() - began > _SECONDS.value:
                    return
            bar.advance(task)
    print("complete")


if __name__ == "__main__":
    app.run(main)

"""Do the claims of three papers about reuse of KV hold in the simulator, and what explains the
differences?

    python -m benchmarks.reuse_papers [ppd] [dualpath] [agentic] [--small] [--name=reuse_papers]

PPD (arXiv 2603.13358): later turns are computed on the decode worker that holds the history.
DualPath (2602.21548): KV is also loaded through decode workers if the prefill workers' storage is
the bottleneck. agentic-kvc (gahow/agentic-kvc): for agents, one pool is better than separate
prefill and decode. Each is a list of runs of the live code in virtual time that differ in one
property; `reuse_papers_runs.CASES` has the runs and the papers' claims. `--small`: fewer requests,
to test the script. With a name, the results of the cases replace those in results/, and the page is
written again (`reuse_papers_page.py`)."""

import json
import time
from dataclasses import replace

from absl import app, flags

from benchmarks.measure import RESULTS, machine
from benchmarks.reuse_papers_page import page
from benchmarks.reuse_papers_runs import CASES, Case, figures_of

_SMALL = flags.DEFINE_boolean("small", False, "A tenth of the requests.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")


def made(case: Case) -> dict[str, object]:
    """Runs the cases' runs. If throughput is counted, rates increase until one misses the limit."""
    rows: dict[str, object] = {}
    for run in case.runs():
        points: list[dict[str, object]] = []
        if _SMALL.value:
            run = replace(run, talk=replace(run.talk, requests=run.talk.requests // 10))
        for rate in run.rates:
            began = time.process_time()
            points.append(figures_of(run, rate))
            spent = time.process_time() - began
            print(f"{run.name}: {points[-1]} ({spent:.0f} s)", flush=True)
            if case.limit is not None and not within(points[-1], case.limit):
                break
        rows[run.name] = {"differs": run.differs, "points": points}
    return {"claim": case.claim, "setting": case.setting, "limit": case.limit, "runs": rows}


def within(point: dict[str, object], limit: float) -> bool:
    ttft = point["ttft_seconds"]
    assert isinstance(ttft, dict)
    return ttft["p90"] <= limit


def main(argv: list[str]) -> None:
    wanted = argv[1:] or list(CASES)
    path = RESULTS / f"{_NAME.value}.json"
    figures = json.loads(path.read_text()) if _NAME.value and path.exists() else {"cases": {}}
    for name in wanted:
        print(name, flush=True)
        figures["cases"][name] = {"machine": machine(), **made(CASES[name])}
    if _NAME.value:
        path.write_text(json.dumps(figures, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(figures))


if __name__ == "__main__":
    app.run(main)

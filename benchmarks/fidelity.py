"""How near does the simulator come to measured runs of other engines: fitted runs and held-out
runs?

    python -m benchmarks.fidelity [--only=distserve,vllm] [--fit] --name=fidelity
    python -m benchmarks.fidelity --table      # for results/fidelity.md, which is written by hand

`measured_runs.py` defines the split. The constants of each engine are fitted to its run at the
lowest rate on one layout. Higher rates, and decode with two pipeline stages, are predicted. vLLM
0.19's two runs are fitted to their first 100 requests, and the other 200 are predicted. Without
--fit, constants are read from the results file; with --fit, the search for vLLM 0.19's constants
starts there. Each prediction is compared with a constant one: the figures of the fitted part. The
engines are fleets (engines.py) with the live request path, workers and schedulers in virtual
time."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace

from absl import app, flags

from benchmarks.engines import SimulatedEngine, starts
from benchmarks.measure import RESULTS, save
from benchmarks.measured_runs import (
    FITTED_REQUESTS,
    FITTED_RUNS,
    TPOT_SLO,
    TTFT_SLO,
    MeasuredRun,
    distserve_runs,
    summary,
    vllm_runs,
)
from benchmarks.run_fitting import (
    from_lone_steps,
    from_replay,
    from_report,
    kv_tokens_seen,
    report_constants,
)

_ONLY = flags.DEFINE_list(
    "only",
    [],
    "Engines to run (distserve, vllm, chunked); empty is all. Others keep their results.",
)
_FIT = flags.DEFINE_bool(
    "fit", False, "Fit the constants again; else those in the results file are used."
)
_TABLE = flags.DEFINE_bool("table", False, "Print the table of the results file; run nothing.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

# Title of runs with two stages whose batches take turns as on live decode workers.
LIVE_TURNS = "live turns, "
PREFIXES = ("distserve-c21d11", "distserve-c21d12", LIVE_TURNS + "distserve-c21d12", "vllm-")
SHORT_OF_MEMORY = "RTX4090/Llama-3.1-8B"  # its first requests fill it
COLUMNS = (
    *("ttft_mean_ms", "ttft_p50_ms", "ttft_p90_ms"),
    *("tpot_mean_ms", "tpot_p50_ms", "tpot_p90_ms", "tpot_p99_ms"),
)
Figures = dict[str, object]


def compared(
    measured: Mapping[str, float], ours: Mapping[str, float], constant: Mapping[str, float]
) -> Figures:
    """Returns the errors: in points for attainment, in percent for the rest."""

    def errors(predicted: Mapping[str, float]) -> dict[str, float]:
        points = {
            "attainment_points": predicted["attainment_percent"] - measured["attainment_percent"]
        }
        shares = {
            name: 100 * (predicted[name] / value - 1)
            for name, value in measured.items()
            if name != "attainment_percent"
        }
        return {name: round(value, 2) for name, value in (points | shares).items()}

    return {
        "measured": measured,
        "predicted": ours,
        "errors": errors(ours),
        "constant_predictor_errors": errors(constant),
    }


def run_lone(
    kind: str, engine: SimulatedEngine, runs: Mapping[str, MeasuredRun]
) -> dict[str, Figures]:
    """Runs all measured runs of an engine of DistServe's paper."""
    fitted = runs[FITTED_RUNS[kind]]
    constant = summary(fitted.ttft, fitted.tpot)
    found: dict[str, Figures] = {}
    for name, run in runs.items():
        if name.split("-")[0] != kind:
            continue
        stages = 2 if "c21d12" in name else 1
        for live_turns in (False, True)[:stages]:
            ttft, tpot = replace(engine, stages=stages, live_turns=live_turns).run(run.arrivals)
            title = LIVE_TURNS * live_turns + name
            found[title] = {
                "held_out": name != fitted.name,
                **compared(summary(run.ttft, run.tpot), summary(ttft, tpot), constant),
            }
            _tell(title, found[title])
    return found


def run_crowded(name: str, engine: SimulatedEngine, run: MeasuredRun) -> dict[str, Figures]:
    """Runs the two parts of a vLLM 0.19 run."""
    ttft, tpot = engine.run(run.arrivals)
    parts = {
        "first 100, fitted": slice(0, FITTED_REQUESTS),
        "other 200, held out": slice(FITTED_REQUESTS, None),
    }
    constant = summary(run.ttft[:FITTED_REQUESTS], run.tpot[:FITTED_REQUESTS])
    found: dict[str, Figures] = {}
    for part, rows in parts.items():
        measured = summary(run.ttft[rows], run.tpot[rows])
        found[f"{name}, {part}"] = {
            "held_out": "held" in part,
            **compared(measured, summary(ttft[rows], tpot[rows]), constant),
        }
        _tell(f"{name}, {part}", found[f"{name}, {part}"])
    return found


def attainment_rmse(results: Mapping[str, Figures], prefix: str) -> dict[str, float]:
    """Returns the root mean square error of attainment over held-out runs, for our prediction and
    for the constant one."""
    chosen = [
        figures
        for name, figures in results.items()
        if name.startswith(prefix) and figures["held_out"]
    ]

    def rmse(which: str) -> float:
        points = [figures[which]["attainment_points"] for figures in chosen]  # type: ignore[index]
        return round(math.sqrt(sum(point**2 for point in points) / len(points)), 2)

    return {
        "runs": len(chosen),
        "ours": rmse("errors"),
        "constant_predictor": rmse("constant_predictor_errors"),
    }


def _tell(name: str, figures: Figures) -> None:
    errors = figures["errors"]
    assert isinstance(errors, dict)
    kept = (
        "attainment_points",
        "ttft_p50_ms",
        "ttft_p90_ms",
        "tpot_p50_ms",
        "tpot_p90_ms",
        "ttft_mean_ms",
        "tpot_mean_ms",
    )
    print(
        f"{name:62}" + " ".join(f"{key.removesuffix('_ms')} {errors[key]:+.1f}" for key in kept),
        flush=True,
    )


def table(found: Mapping[str, Mapping[str, Figures]]) -> list[str]:
    """Returns the rows of the results as Markdown: measured, predicted, and both errors."""
    columns = ("attainment", *(name.removesuffix("_ms").replace("_", " ") for name in COLUMNS))
    rows = [("run", "", *columns), ("---",) * (2 + len(columns))]
    for name, figures in found["runs"].items():
        title = f"{name} ({'held out' if figures['held_out'] else 'fitted'})"
        for kind in ("measured", "predicted", "errors", "constant_predictor_errors"):
            values: Mapping[str, float] = figures[kind]  # type: ignore[assignment]
            first = values.get("attainment_percent", values.get("attainment_points", 0.0))
            sign = "+" if "errors" in kind else ""
            cells = (f"{value:{sign}.1f}" for value in (first, *map(values.__getitem__, COLUMNS)))
            rows.append((title if kind == "measured" else "", kind.replace("_", " "), *cells))
    return ["| " + " | ".join(row) + " |" for row in rows]


def _prepared(
    name: str, engine: SimulatedEngine, run: MeasuredRun, known: Mapping[str, Mapping[str, float]]
) -> SimulatedEngine:
    if name == SHORT_OF_MEMORY:
        engine = replace(engine, kv_tokens=kv_tokens_seen(run, FITTED_REQUESTS))
    if not _FIT.value and name in known:
        return from_report(engine, dict(known[name]))
    if engine.kind != "chunked":
        return from_lone_steps(engine, run)
    start = from_report(engine, dict(known[name])) if name in known else None
    return from_replay(engine, run, FITTED_REQUESTS, start=start)


def main(argv: list[str]) -> None:
    del argv
    path = RESULTS / f"{_NAME.value or 'fidelity'}.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    if _TABLE.value:
        print(*table(old), sep="\n")
        return
    constants, results = dict(old.get("constants", {})), dict(old.get("runs", {}))
    lone, crowded = distserve_runs(), vllm_runs()
    for name, engine in starts().items():
        if _ONLY.value and not {name, engine.kind} & set(_ONLY.value):
            continue
        run = crowded[name] if name in crowded else lone[FITTED_RUNS[name]]
        engine = _prepared(name, engine, run, constants)
        constants[name] = report_constants(engine)
        # What is told of is what the constants give as they are written.
        engine = from_report(engine, constants[name])
        print(name, constants[name], flush=True)
        results |= (
            run_crowded(name, engine, run) if name in crowded else run_lone(name, engine, lone)
        )
    rmse = {
        prefix: attainment_rmse(results, prefix) for prefix in PREFIXES if _has(results, prefix)
    }
    print(rmse)
    if _NAME.value:
        print(
            save(
                _NAME.value,
                {
                    "slo": {"ttft_ms": 1e3 * TTFT_SLO, "tpot_ms": 1e3 * TPOT_SLO},
                    "fitted_to": FITTED_RUNS,
                    "constants": constants,
                    "attainment_rmse_points": rmse,
                    "runs": results,
                },
            )
        )


def _has(results: Mapping[str, Figures], prefix: str) -> bool:
    return any(name.startswith(prefix) and figures["held_out"] for name, figures in results.items())


if __name__ == "__main__":
    app.run(main)

"""Simulates one run of the study, and determines which runs a curve still needs. Uses no flags and
no files, so that notebooks and tests can use it."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from benchmarks.commits import commit
from benchmarks.study_cases import Limits, StudyCase
from jdisagg.config import Mode
from jdisagg.layout.axes import Layout
from jdisagg.simulator.planning.bounds import Demand
from jdisagg.simulator.planning.candidates import Candidate
from jdisagg.simulator.planning.trials import TOLERANCE, requests_at, settled
from jdisagg.simulator.report import RequestOutcome, SloLimits, attainment, summarise

# Rungs of the highest rate that arithmetic allows any candidate. Of a curve those are run between
# which its attainment crosses, under each of the limits.
LADDER = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 1.15, 1.4, 1.75)
ENOUGH = 0.9
# limits on the first token that arrivals go on for, as in the planner's trials
OUTLASTS = round(1 / TOLERANCE)


def measured(
    case: StudyCase, candidate: Candidate, rate: float, requests: int | None = None
) -> dict[str, object]:
    """Simulates one run. Returns the fractions of requests that meet each of the limits, and
    percentiles in seconds. `requests`: number of requests, instead of the usual number."""
    steps = Demand.of(case.arrivals).steps_mean
    tightest = min(case.workload.limits, key=lambda limits: limits.tpot)
    filling = min(limits.ttft for limits in case.workload.limits) + steps * tightest.tpot
    # Arrivals that end before a queue has grown to the limit would call an overload carried.
    seconds = max(3 * filling, OUTLASTS * max(limits.ttft for limits in case.workload.limits))
    count = requests or int(
        np.clip(rate * seconds, min(500, case.setting.requests), case.setting.requests)
    )
    began = time.process_time()
    run = case.maker.run(
        candidate, requests_at(case.arrivals, rate, count, "poisson", seed=0), gaps=True
    )
    judged = settled(run.outcomes, filling)
    report = summarise(judged)
    return {
        "rate": rate,
        "per_accelerator": rate / case.setting.accelerators,
        "requests": count,
        "judged": len(judged),
        "cpu_seconds": round(time.process_time() - began, 3),
        "attainment": {
            limits.name: round(attainment(judged, limits.slo), 4) for limits in case.workload.limits
        },
        "missed": {limits.name: _missed(judged, limits) for limits in case.workload.limits},
        "ttft": [report.ttft.p50, report.ttft.p90, report.ttft.p99],
        "tpot": [report.tpot.p50, report.tpot.p90, report.tpot.p99],
        "tbt": [report.tbt.p50, report.tbt.p90, report.tbt.p99],
        "slowest_tenth": [
            report.slowest_tenth.p50,
            report.slowest_tenth.p90,
            report.slowest_tenth.p99,
        ],
        "handoff_gap": [report.handoff_gap.p50, report.handoff_gap.p90, report.handoff_gap.p99],
        "utilisation": dict(summarise(run.outcomes, None, run.usage).utilisation),
    }


def _missed(judged: Sequence[RequestOutcome], limits: Limits) -> dict[str, float]:
    alone = {
        "ttft": SloLimits(limits.ttft),
        "tpot": SloLimits(None, limits.tpot),
        "gap": SloLimits(None, None, limits.longest_gap),
    }
    return {name: round(1 - attainment(judged, slo), 4) for name, slo in alone.items()}


def fields_of(candidate: Candidate) -> dict[str, object]:
    return {
        "mode": candidate.mode.value,
        "name": candidate.name,
        "devices": candidate.devices,
        "chunk_tokens": candidate.chunk_tokens,
        "prefill_devices": candidate.prefill_instances * candidate.prefill.devices
        if candidate.prefill
        else 0,
        "decode_devices": candidate.decode_instances * candidate.decode.devices,
    }


def as_text(candidate: Candidate) -> str:
    parts = (
        candidate.mode.value,
        candidate.decode,
        candidate.decode_instances,
        candidate.chunk_tokens,
    )
    return " ".join(map(str, (*parts, candidate.prefill or "-", candidate.prefill_instances)))


def from_text(text: str) -> Candidate:
    mode, decode, instances, chunk, prefill, count = text.split()
    first = None if prefill == "-" else Layout.parse(prefill)
    return Candidate(
        Mode(mode), Layout.parse(decode), int(instances), int(chunk), first, int(count)
    )


def steps_of(case: StudyCase, known: dict[str, object]) -> Iterator[dict[str, object]]:
    """Yields the runs of a case that `known` lacks, and adds each to `known`."""
    curves: dict[str, dict[str, object]] = known.setdefault("curves", {})  # type: ignore[assignment]
    # Stepping all candidates takes a while: kept with the results.
    if "estimates" not in known:
        known["estimates"] = {as_text(item): rates for item, rates in case.candidates.items()}
        texts: list[str] = known.get("candidates", [])  # type: ignore[assignment]
        known["candidates"] = list(dict.fromkeys([*texts, *known["estimates"]]))  # type: ignore[misc]
        known.setdefault(
            "allowed", max(item.get("usual", 0.0) for item in case.candidates.values())
        )
    allowed: float = known["allowed"]  # type: ignore[assignment]
    estimates: dict[str, dict[str, float]] = known["estimates"]  # type: ignore[assignment]
    for text, rates in estimates.items():
        candidate = from_text(text)
        key = f"{candidate.mode.value}: {candidate.name}"
        curve = curves.setdefault(key, {**fields_of(candidate), "commit": commit(), "runs": []})
        runs: list[dict[str, object]] = curve["runs"]  # type: ignore[assignment]
        for limits in case.workload.limits:
            name, guess = limits.name, rates.get(limits.name, max(rates.values())) / allowed
            while (part := next_rung(runs, name, guess)) is not None:
                runs.append({"part": part, **measured(case, candidate, part * allowed)})
                runs.sort(key=lambda run: run["part"])  # type: ignore[arg-type,return-value]
                yield next(run for run in runs if run["part"] == part)


def next_rung(runs: Sequence[Mapping[str, object]], limits: str, estimate: float) -> float | None:
    """Returns the rate of LADDER that a curve still needs to show where attainment under `limits`
    falls below the goal, or None. The first rate is the one at or below `estimate`."""
    kept = [run["part"] for run in runs if run["attainment"][limits] >= ENOUGH]  # type: ignore[index]
    missed = [run["part"] for run in runs if run["part"] not in kept]
    if not runs:
        return max((part for part in LADDER if part <= estimate), default=LADDER[0])
    low, high = max(kept, default=0.0), min(missed, default=math.inf)  # type: ignore[type-var]
    between = [part for part in LADDER if low < part < high]
    if not between:
        return None
    if not missed:
        return between[0]
    return between[-1] if not kept else between[len(between) // 2]

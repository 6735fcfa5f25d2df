"""The study's committed figures are what the code gives, checked on a few of the shortest runs and
on the candidates of the cheapest case."""

import json
from pathlib import Path

import pytest

from benchmarks.commits import subject
from benchmarks.study_cases import CASES, StudyCase
from benchmarks.study_runs import as_text, from_text, measured
from jdisagg.config import Mode

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "study.json"
STUDY = json.loads(RESULTS.read_text())
CODE = next(case for case in CASES if case.name == "llama-3-70b on 16 h100 / azure-code")


def shortest_run(case: StudyCase, mode: str) -> tuple[str, dict[str, object]]:
    """Returns (candidate as text, run) with the fewest requests and the lowest rate of a mode."""
    known = STUDY["cases"][case.name]
    runs = [
        (run["requests"], run["rate"], text, run)
        for text in known["candidates"]
        if (candidate := from_text(text)).mode.value == mode
        for run in known["curves"][f"{mode}: {candidate.name}"]["runs"]
    ]
    _, _, text, run = min(runs, key=lambda item: item[:3])
    return text, run


@pytest.mark.parametrize("mode", ["chunked", "disaggregated"])
def test_a_committed_run_made_again_gives_the_committed_figures(mode: str) -> None:
    text, run = shortest_run(CODE, mode)
    again = measured(CODE, from_text(text), run["rate"], run["requests"])  # type: ignore[arg-type]
    assert again["judged"] == run["judged"]
    assert again["attainment"] == pytest.approx(run["attainment"], abs=0.005)
    for name in ("ttft", "tpot", "slowest_tenth", "handoff_gap"):
        assert again[name] == pytest.approx(run[name], rel=0.01), name


def test_the_best_of_each_mode_is_among_the_committed_candidates() -> None:
    """The committed candidates are those of earlier searches, which ranked by closed formulas."""
    committed = set(STUDY["cases"][CODE.name]["candidates"])
    for mode in Mode:
        rates = {
            as_text(one): max(by.values())
            for one, by in CODE.candidates.items()
            if one.mode is mode
        }
        assert max(rates, key=rates.__getitem__) in committed, (mode, rates)


def test_every_curve_names_a_commit_that_can_be_found_again() -> None:
    """By its id, or where the history was written anew by its day and subject."""
    listed = STUDY["made"]["commits"]
    for case in STUDY["cases"].values():
        for curve in case["curves"].values():
            assert len(listed[curve["commit"]]) > len("2026-11-23 "), curve["name"]
    for name, said in listed.items():
        assert subject(name) in ("", said)

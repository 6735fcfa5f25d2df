"""Runs at stated rates: the committed table equals the code's output, and the loop agrees with
closed forms (benchmarks/blis_points.py, benchmarks/open_loop.py)."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.blis_points import (
    PROFILES,
    RESULTS,
    foretold,
    kept_runs,
    page,
    recorded_runs,
    shown,
)
from benchmarks.closed_loop import Batching
from benchmarks.open_loop import Arrivals, one_pool_at
from jdisagg.costs.catalog import geometry
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.hardware import accelerator
from jdisagg.costs.kernels import Kernels

MODEL = CostModel(geometry("llama-3.1-8b"), accelerator("h100"))
FIGURES = json.loads((RESULTS / "blis_runs.json").read_text())


def test_the_committed_page_is_what_the_code_gives() -> None:
    assert (RESULTS / "blis_runs.md").read_text() == page(FIGURES)
    runs = kept_runs()
    assert {run.name for run in runs} == set(FIGURES["runs"])
    quick = [run for run in runs if run.counted and run.profile == "roleplay"]
    for run in quick[:2]:
        assert shown(foretold(run)) == pytest.approx(FIGURES["runs"][run.name], rel=1e-2, abs=0.2)


def test_requests_that_never_meet_take_as_long_as_alone() -> None:
    arrivals = Arrivals(1e-3, 20_000, 1000, 50)
    times = one_pool_at(MODEL, arrivals, Batching("mixed", 8192, 10**6))
    assert times.ttft == pytest.approx(MODEL.prefill([(1000, 0)]).seconds, rel=1e-9)
    steps = [MODEL.decode([1001 + step]).seconds for step in range(49)]
    assert times.tpot == pytest.approx(sum(steps) / 49, rel=1e-6)


def test_of_a_known_prompt_the_rest_alone_is_computed() -> None:
    arrivals = Arrivals(1e-3, 20_000, 1000, 50, cached=992)
    times = one_pool_at(MODEL, arrivals, Batching("mixed", 8192, 10**6))
    assert times.ttft == pytest.approx(MODEL.prefill([(8, 992)]).seconds, rel=1e-9)


def test_beyond_what_can_be_under_way_at_once_requests_wait() -> None:
    arrivals = Arrivals(20.0, 20.0, 100, 100)
    free = one_pool_at(MODEL, arrivals, Batching("mixed", 8192, 10**6))
    bound = one_pool_at(MODEL, arrivals, Batching("mixed", 8192, 10**6, most=4))
    assert bound.ttft > 10 * free.ttft
    assert bound.tpot < free.tpot


def test_a_step_within_captured_graphs_is_not_held_up_by_its_host() -> None:
    card = accelerator("h100")
    card = replace(card, efficiency=replace(card.efficiency, prefill_launch_seconds=1e-3))
    eager = CostModel(geometry("llama-3.1-8b"), card)
    some = CostModel(geometry("llama-3.1-8b"), card, kernels=Kernels(captured_tokens=64))
    within, beyond = (8, 36.0, 8.0, 1, 56, 1e4), (9, 45.0, 9.0, 1, 56, 1e4)
    assert some.mixed_of(*within).seconds < 32 * 1e-3 < eager.mixed_of(*within).seconds
    assert some.mixed_of(*beyond) == eager.mixed_of(*beyond)


def test_records_are_read_run_by_run(tmp_path: Path) -> None:
    columns = (
        "experiment_folder", "model", "stage_index", "metric_name", "actual", "hardware", "tp",
        "max_num_batched_tokens",
    )  # fmt: skip
    run = ("a/36-qwen3-14b-tp1-general-lite-1", "Qwen/Qwen3-14B")
    rows = [
        (*run, "-1", "ttft_mean", "85.1", "A100-80GB", "1", "2048.0"),
        (*run, "-1", "e2e_mean", "6884", "A100-80GB", "1", "2048.0"),
        (*run, "0", "e2e_mean", "1", "A100-80GB", "1", "2048.0"),
        ("a/9-unknown-tp1-codegen", "who/Knows", "-1", "e2e_mean", "1", "H100", "1", "2048"),
    ]
    path = tmp_path / "error_records.csv"
    with path.open("w", newline="") as lines:
        csv.writer(lines).writerows([columns, *rows])
    (found,) = recorded_runs(path)
    assert (found.model, found.card, found.profile) == ("qwen3-14b", "a100", "general-lite")
    assert (found.ttft, found.whole) == (0.0851, 6.884)
    assert set(PROFILES) >= {found.profile}

"""The simulator against measured runs of other engines that its constants were not fitted to
(benchmarks/fidelity.py)."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.engines import SimulatedEngine, starts
from benchmarks.measure import RESULTS
from benchmarks.measured_runs import (
    FITTED_RUNS,
    MeasuredRun,
    attainment,
    distserve_runs,
    summary,
    vllm_runs,
)
from benchmarks.run_fitting import from_lone_steps, from_report, kv_tokens_seen, report_constants


def engine(name: str) -> SimulatedEngine:
    """Returns an engine with the constants of the committed results."""
    constants = json.loads((RESULTS / "fidelity.json").read_text())["constants"]
    return from_report(starts()[name], constants[name])


def errors(run: MeasuredRun, ours: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    found = {"attainment": attainment(*ours) - attainment(run.ttft, run.tpot)}
    for name, predicted, measured in (("ttft", ours[0], run.ttft), ("tpot", ours[1], run.tpot)):
        for percent in (50, 90):
            found[f"{name}_p{percent}"] = float(
                np.nanpercentile(predicted, percent) / np.nanpercentile(measured, percent) - 1
            )
    return found


@pytest.mark.parametrize(
    "name",
    [
        "distserve-c21d11-300-4.5",
        pytest.param("distserve-c21d11-300-6", marks=pytest.mark.slow),
        pytest.param("distserve-c21d11-450-4.5", marks=pytest.mark.slow),
    ],
)
def test_a_held_out_run_of_two_pools_is_predicted(name: str) -> None:
    run = distserve_runs()[name]
    found = errors(run, engine("distserve").run(run.arrivals))
    assert abs(found["attainment"]) < 4
    assert max(abs(found[key]) for key in ("ttft_p50", "ttft_p90", "tpot_p50")) < 0.15
    assert abs(found["tpot_p90"]) < 0.4


@pytest.mark.parametrize(
    "name",
    ["distserve-c21d12-400-4", pytest.param("distserve-c21d12-600-6", marks=pytest.mark.slow)],
)
def test_a_held_out_run_with_two_stages_of_decode_is_predicted(name: str) -> None:
    run = distserve_runs()[name]
    found = errors(run, replace(engine("distserve"), stages=2).run(run.arrivals))
    assert abs(found["attainment"]) < 8
    assert max(abs(found[key]) for key in ("ttft_p50", "tpot_p50")) < 0.15
    assert abs(found["tpot_p90"]) < 0.4


def test_with_live_turns_two_stages_attain_what_was_measured_in_shorter_steps() -> None:
    run = distserve_runs()["distserve-c21d12-400-4"]
    own, live = (
        replace(engine("distserve"), stages=2, live_turns=live_turns).run(run.arrivals)
        for live_turns in (False, True)
    )
    assert abs(errors(run, live)["attainment"]) < 8
    assert np.nanmedian(live[1]) < np.nanmedian(own[1])


@pytest.mark.parametrize(
    "name", ["vllm-150-1.5", pytest.param("vllm-250-2.5", marks=pytest.mark.slow)]
)
def test_a_held_out_run_of_one_pool_that_prefills_first_is_predicted(name: str) -> None:
    run = distserve_runs()[name]
    found = errors(run, engine("vllm").run(run.arrivals))
    assert abs(found["attainment"]) < 6.3
    assert max(abs(found[key]) for key in ("ttft_p50", "ttft_p90", "tpot_p50")) < 0.15


@pytest.mark.parametrize("kind", ["vllm", pytest.param("distserve", marks=pytest.mark.slow)])
def test_the_committed_constants_are_those_that_the_fitted_run_gives(kind: str) -> None:
    run = distserve_runs()[FITTED_RUNS[kind]]
    found, committed = (
        report_constants(from_lone_steps(starts()[kind], run)),
        report_constants(engine(kind)),
    )
    assert found == pytest.approx(committed, rel=0.02)


@pytest.mark.parametrize(
    "name",
    [
        "vllm-150-1.5",
        "distserve-c21d12-400-4",
        pytest.param("distserve-c21d12-600-6", marks=pytest.mark.slow),
    ],
)
def test_the_committed_table_is_what_the_code_gives(name: str) -> None:
    run, stages = distserve_runs()[name], 2 if "c21d12" in name else 1
    ours = replace(engine(name.split("-")[0]), stages=stages).run(run.arrivals)
    committed = json.loads((RESULTS / "fidelity.json").read_text())["runs"][name]["predicted"]
    assert summary(*ours) == pytest.approx(committed, rel=0.02)


def test_memory_is_read_off_before_anybody_waited() -> None:
    run = vllm_runs()["RTX4090/Llama-3.1-8B"]
    early = run.queued[:100] < 1.0
    assert (
        run.prompts[:100][early].sum()
        <= kv_tokens_seen(run, 100)
        <= run.prompts[:100][early].sum() + 41 * 120
    )


@pytest.mark.slow
def test_a_crowded_run_with_preemptions_is_predicted_from_its_first_hundred_requests() -> None:
    name = "RTX4090/Llama-3.1-8B"
    run, ours = vllm_runs()[name], engine(name)
    ttft, tpot = replace(ours, kv_tokens=kv_tokens_seen(run, 100)).run(run.arrivals)
    assert tpot[100:].mean() == pytest.approx(run.tpot[100:].mean(), rel=0.05)
    assert ttft[100:].mean() == pytest.approx(run.ttft[100:].mean(), rel=0.2)

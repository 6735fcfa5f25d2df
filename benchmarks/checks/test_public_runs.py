"""Public measurements: the loader reads all of them, the committed table equals the code's output,
and the closed loop agrees with closed forms (benchmarks/public_runs.py)."""

import json

import pytest

from benchmarks.closed_loop import Batching, Load, one_pool, two_pools
from benchmarks.public_points import condensed, public_points
from benchmarks.public_runs import RESULTS, coverage, page, predict, shown
from jdisagg.costs.catalog import geometry
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.hardware import accelerator

MODEL = CostModel(geometry("llama-3.1-8b"), accelerator("h100"))
FIGURES = json.loads((RESULTS / "public_runs.json").read_text())
POINTS = public_points()


def test_every_published_point_is_read_and_can_be_asked_for_or_says_why_not() -> None:
    assert len(POINTS) == 4065
    assert all(point.ttft > 0 and point.tpot > 0 and point.users > 0 for point in POINTS)
    assert coverage(POINTS) == FIGURES["coverage"]


def test_both_halves_have_whole_series() -> None:
    halves: dict[str, set[bool]] = {}
    for point in POINTS:
        halves.setdefault(point.series, set()).add(point.looked_at)
    assert all(len(half) == 1 for half in halves.values())
    looked = sum(point.looked_at for point in POINTS)
    assert 0.4 < looked / len(POINTS) < 0.6


def test_the_committed_table_is_what_the_code_gives() -> None:
    assert (RESULTS / "public_runs.md").read_text() == page(FIGURES)
    sample = FIGURES["sample"]
    assert len(sample) > 30
    # The longest loops are left to the script: this lane waits for nobody.
    cheap = [point for point in POINTS if str(point.number) in sample and point.users <= 64]
    for point in cheap:
        assert shown(predict(point)) == pytest.approx(sample[str(point.number)], rel=1e-3)


def test_a_layout_that_counts_its_devices_twice_is_read_as_its_copy_has_it() -> None:
    row = dict.fromkeys(
        ("attention_dp_size", "moe_tp_size", "moe_ep_size", "batch_size", "decode_num_workers"), ""
    )
    prefill = dict.fromkeys(
        f"prefill_{name}"
        for name in ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "batch_size",
                     "num_workers")
    )  # fmt: skip
    row |= dict.fromkeys(prefill, "")
    row |= {
        "silicon_data_source": "db-dump; silicon_concurrency=64", "backend": "sglang",
        "backend_version": "", "model_path": "deepseek-ai/DeepSeek-R1", "system": "b200_sxm",
        "precision": "fp8", "mode": "agg", "isl": "1024", "osl": "1024", "batch_size": "64",
        "silicon_ttft_ms": "496.4", "silicon_tpot_ms": "16.31",
    }  # fmt: skip
    doubled = row | dict(tp_size="64", attention_dp_size="1", moe_tp_size="8", moe_ep_size="8")
    plain = row | dict(tp_size="8", attention_dp_size="1", moe_tp_size="1", moe_ep_size="8")
    assert condensed([doubled]) == condensed([plain]) == condensed([doubled, plain])


def test_a_lone_user_waits_for_the_prefill_of_the_prompt_and_then_for_its_own_steps() -> None:
    times = one_pool(MODEL, Load(1, 1000, 100), Batching("mixed", 8192, 10**6))
    assert times.ttft == pytest.approx(MODEL.prefill([(1000, 0)]).seconds, rel=1e-9)
    steps = [MODEL.decode([1001 + step]).seconds for step in range(99)]
    assert times.tpot == pytest.approx(sum(steps) / 99, rel=1e-6)


def test_of_a_burst_that_fills_chunks_each_waits_for_those_before_it() -> None:
    load = Load(4, 2048, 2, rounds=1)
    times = one_pool(MODEL, load, Batching("prefill_first", 2048, 10**6))
    each = MODEL.prefill([(2048, 0)]).seconds
    assert times.ttft == pytest.approx(each * (1 + 2 + 3 + 4) / 4, rel=1e-9)


def test_prompts_come_no_sooner_where_kv_has_room_for_one_user_of_four() -> None:
    load = Load(4, 1000, 200)
    wide = one_pool(MODEL, load, Batching("mixed", 8192, 10**6))
    narrow = one_pool(MODEL, load, Batching("mixed", 8192, 1500))
    assert narrow.ttft > 2.5 * 200 * MODEL.decode([1000]).seconds > 5 * wide.ttft
    assert narrow.tpot < wide.tpot


def test_in_two_pools_no_prompt_disturbs_a_step() -> None:
    load = Load(8, 4096, 64)
    one = one_pool(MODEL, load, Batching("mixed", 8192, 10**6))
    two = two_pools(MODEL, MODEL, load, Batching("mixed", 8192, 10**6), 1, 1)
    full = MODEL.decode([4096 + 64] * 8).seconds
    assert two.tpot <= full < one.tpot


def test_where_answers_outgrow_the_room_the_youngest_is_computed_anew_and_all_still_end() -> None:
    load, room = Load(8, 200, 400, rounds=2), 8 * 300
    full = one_pool(MODEL, load, Batching("mixed", 8192, 8 * 700))
    short = one_pool(MODEL, load, Batching("mixed", 8192, room, reserved=0.1))
    # Eight prompts fit and eight answers do not: who waits again keeps its first token's time.
    assert short.tpot > 1.1 * full.tpot
    never = one_pool(MODEL, load, Batching("mixed", 8192, room))
    assert never.tpot < short.tpot
    assert never.ttft > short.ttft


def test_a_newcomer_waits_for_the_steps_that_were_issued_before_it_came() -> None:
    load = Load(2, 100, 50, shortest=0.5)
    now, later = (
        one_pool(MODEL, load, Batching("mixed", 8192, 10**6, ahead=ahead)) for ahead in (0, 2)
    )
    step = MODEL.decode([125]).seconds
    # All but the burst, and those that end together, come while the other user decodes.
    assert step < later.ttft - now.ttft < 2 * step


def test_who_looks_for_newcomers_at_every_tenth_step_lets_them_wait_about_five() -> None:
    load = Load(2, 100, 300, shortest=0.5)
    now, seldom = (
        one_pool(MODEL, load, Batching("prefill_first", 8192, 10**6, poll=poll)) for poll in (0, 10)
    )
    step = MODEL.decode([250]).seconds
    assert 2 * step < seldom.ttft - now.ttft < 10 * step

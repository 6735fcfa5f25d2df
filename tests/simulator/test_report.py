"""The report's figures against hand-computed ones and numpy's, and bucketed gaps against the gaps
themselves."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.study_report import rate_at_attainment
from jdisagg.errors import ConfigError, WorkloadError
from jdisagg.simulator.gaps import Gaps, merged_percentile
from jdisagg.simulator.report import (
    Percentiles,
    RequestOutcome,
    SloLimits,
    WorkerUsage,
    attainment,
    summarise,
)
from jdisagg.simulator.tables import COLUMNS, text_of, write_outcomes


def outcome(
    number: int, ttft: float | None = 0.1, tpot: float = 0.02, tokens: int = 11, **more: object
) -> RequestOutcome:
    """Returns an outcome that arrives at `number` seconds with evenly spaced tokens."""
    first = None if ttft is None else number + ttft
    finish = number + (ttft or 0.0) + tpot * (tokens - 1)
    gaps = None if ttft is None else Gaps.of([(tpot, tokens - 1)])
    return RequestOutcome(
        f"r{number}",
        float(number),
        finish,
        100,
        tokens if ttft is not None else 0,
        first,
        gaps,
        **more,  # type: ignore[arg-type]
    )


def test_times_of_a_request_are_those_of_the_definitions() -> None:
    one = outcome(3, ttft=0.5, tpot=0.02, tokens=11)
    assert one.ttft == pytest.approx(0.5)
    assert one.tpot == pytest.approx(0.02)
    assert one.latency == pytest.approx(0.7)
    single = outcome(0, tokens=1)
    assert single.tpot is None and single.gaps is None


def test_an_slo_is_met_only_by_what_finished_within_every_limit() -> None:
    slo = SloLimits(0.2, 0.05)
    assert slo.attained(outcome(0))
    assert slo.attained(outcome(0, tokens=1))
    assert not slo.attained(outcome(0, ttft=0.3))
    assert not slo.attained(outcome(0, tpot=0.06))
    assert not slo.attained(outcome(0, end="deadline"))
    assert not slo.attained(outcome(0, ttft=None, end="refused"))
    assert not SloLimits(longest_gap_seconds=0.01).attained(outcome(0))
    with pytest.raises(ConfigError, match="ttft_seconds"):
        SloLimits(0.0)


def test_goodput_counts_refused_requests_as_arrivals() -> None:
    outcomes = [outcome(number) for number in range(8)] + [
        outcome(8, ttft=None, end="refused"),
        outcome(9, ttft=9.0),
    ]
    report = summarise(
        outcomes,
        SloLimits(0.2, 0.05),
        [WorkerUsage("p", "prefill", 2, 4.0, 3.0), WorkerUsage("d", "decode", 1, 9.0, 2.0)],
    )
    assert report.attainment == pytest.approx(0.8)
    # ten arrivals, nine seconds between first and last
    assert report.arrivals_per_second == pytest.approx(1.0)
    assert report.goodput_per_second == pytest.approx(0.8)
    assert report.goodput_per_accelerator == pytest.approx(0.8 / 3)
    assert report.ends == {"finished": 9, "refused": 1}
    duration = 9 + 9.0 + 0.2
    assert report.duration_seconds == pytest.approx(duration)
    assert report.utilisation == {
        "decode": pytest.approx(9.0 / duration),
        "prefill": pytest.approx(4.0 / duration),
    }
    dollars = (2 * 3.0 + 2.0) * duration / 3600
    assert report.dollars_per_million_output_tokens == pytest.approx(1e6 * dollars / 99)
    assert report.dollars_per_million_tokens == pytest.approx(1e6 * dollars / (99 + 900))
    json.dumps(report.as_fields())
    assert "SLO attainment 80.0 %" in text_of(report) and "prefill" in text_of(report)


def test_percentiles_are_numpys_and_none_where_nothing_is() -> None:
    values = [0.5, 0.1, 0.9, 0.3]
    found = Percentiles.of(values)
    assert (found.p50, found.p90, found.p99) == tuple(np.percentile(values, [50, 90, 99]))
    assert Percentiles.of([]).p50 is None
    refused = summarise([outcome(0, ttft=None, end="refused")], SloLimits(1.0))
    assert refused.ttft.p50 is None and refused.attainment == 0.0 and "-" in text_of(refused)


def test_without_price_slo_or_usage_those_figures_are_not_made_up() -> None:
    report = summarise([outcome(0), outcome(1)], usage=[WorkerUsage("w", "mixed", 1, 1.0, None)])
    assert report.attainment is None
    assert report.goodput_per_second is None
    assert report.dollars_per_million_tokens is None


def test_tenants_are_reported_apart() -> None:
    report = summarise(
        [outcome(0, tenant="a"), outcome(1, tenant="a", ttft=5.0), outcome(2, tenant="b")],
        SloLimits(1.0),
    )
    assert report.tenants == {"a": 0.5, "b": 1.0}


def test_no_requests_are_refused() -> None:
    with pytest.raises(WorkloadError):
        summarise([])


@given(st.lists(st.lists(st.floats(2e-6, 100.0), min_size=1, max_size=60), min_size=1, max_size=5))
def test_bucketed_percentiles_are_within_one_percent_of_nearest_rank(
    all_gaps: list[list[float]],
) -> None:
    kept = [Gaps.of((gap, 1) for gap in gaps) for gaps in all_gaps]
    everything = np.array([gap for gaps in all_gaps for gap in gaps])
    found = merged_percentile([item for item in kept if item], (50, 90, 99))
    exact = np.percentile(everything, (50, 90, 99), method="inverted_cdf")
    assert np.allclose(found, exact, rtol=0.0101)


@given(st.lists(st.tuples(st.floats(1e-5, 10.0), st.integers(1, 9)), min_size=1, max_size=40))
def test_runs_of_gaps_are_kept_like_single_gaps(runs: list[tuple[float, int]]) -> None:
    single = [seconds for seconds, count in runs for _ in range(count)]
    kept = Gaps.of(runs)
    assert kept is not None
    assert kept.count == len(single) == sum(kept.counts)
    assert kept.total == pytest.approx(sum(single))
    assert kept.longest == max(single)
    assert kept.first == single[0]
    tenth = max(1, round(len(single) / 10))
    assert kept.slowest_tenth == pytest.approx(np.mean(sorted(single)[-tenth:]))
    again = Gaps.of((seconds, 1) for seconds in single)
    assert again is not None and (again.buckets, again.counts) == (kept.buckets, kept.counts)


def test_gaps_of_times_are_their_differences() -> None:
    kept = Gaps.of_times([1.0, 1.5, 1.5, 3.5])
    assert kept is not None
    assert (kept.count, kept.first, kept.longest, kept.total) == (3, 0.5, 2.0, 2.5)
    assert Gaps.of_times([1.0]) is None


def test_the_rate_at_an_attainment_is_read_off_the_curve() -> None:
    assert rate_at_attainment([(1.0, 1.0), (2.0, 0.95), (3.0, 0.85), (4.0, 0.99)]) == pytest.approx(
        2.5
    )
    assert rate_at_attainment([(1.0, 0.5)]) == 0.0
    assert rate_at_attainment([(1.0, 1.0), (2.0, 0.9)]) == 2.0


def test_a_table_holds_a_row_for_each_request(tmp_path: Path) -> None:
    outcomes = [
        outcome(0),
        outcome(1, ttft=None, end="refused", reason="no room"),
        outcome(2, tokens=1),
    ]
    write_outcomes(outcomes, tmp_path / "out.csv", SloLimits(0.2, 0.05))
    with open(tmp_path / "out.csv", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert tuple(rows[0]) == COLUMNS and len(rows) == 3
    assert float(rows[0]["ttft_seconds"]) == pytest.approx(0.1) and rows[0]["attained"] == "1"
    assert rows[1]["ttft_seconds"] == ""
    assert rows[1]["reason"] == "no room"
    assert rows[1]["attained"] == "0"
    assert attainment(outcomes, SloLimits(0.2, 0.05)) == pytest.approx(2 / 3)


def test_a_table_of_another_kind_or_without_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder does not exist"):
        write_outcomes([outcome(0)], tmp_path / "no" / "out.csv")
    with pytest.raises(ConfigError, match=".csv or .parquet"):
        write_outcomes([outcome(0)], tmp_path / "out.xlsx")

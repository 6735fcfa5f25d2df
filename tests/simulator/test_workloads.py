"""Workloads: traces are read as written, distributions hold, and errors name what is unusable."""

import gzip
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jdisagg.errors import WorkloadError
from jdisagg.simulator.trace_files import read_trace
from jdisagg.simulator.workloads import (
    Arrival,
    Fixed,
    LogNormal,
    Mixture,
    Resampled,
    at_rate,
    gamma,
    mean_rate,
    merge,
    poisson,
    spread_ticks,
    within_context,
)  # fmt: skip
from tests.simulator.traces import write_trace


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "name, text",
    [
        ("azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:08.2945790,396,109\n"),  # noqa: E501
        ("rebased.csv", "arrival_s,prompt_tokens,output_tokens\n0.0,374,44\n4.314619,396,109\n"),
        ("splitwise.csv", "arrival_timestamp,prompt_size,token_size\n10.0,374,44\n14.314619,396,109\n"),  # noqa: E501
        ("measured.csv", "run,arrival_s,prompt_len,output_len,ttft_ms\na,0.0,374,44,3\na,4.314619,396,109,4\n"),  # noqa: E501
        ("vllm.csv", "run,arrival_s,input_toks,output_toks\na,0.0,374,44\na,4.314619,396,109\n"),
        ("mooncake.jsonl", '{"timestamp": 0, "input_length": 374, "output_length": 44, "hash_ids": []}\n'  # noqa: E501
         '{"timestamp": 4314.619, "input_length": 396, "output_length": 109}\n'),
        ("own.jsonl", '{"at_seconds": 4.314619, "prompt_tokens": 396, "output_tokens": 109}\n'
         '{"at_seconds": 0, "prompt_tokens": 374, "output_tokens": 44}\n'),
    ],
)  # fmt: skip
def test_traces_of_every_origin_are_read_by_their_columns(
    tmp_path: Path, name: str, text: str
) -> None:
    first, second = read_trace(written(tmp_path / name, text))
    assert (first.at_seconds, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.at_seconds == pytest.approx(4.314619, abs=1e-5)
    assert (second.prompt_tokens, second.output_tokens) == (396, 109)


def test_gzipped_mooncake_rows_keep_their_block_hashes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as out:
        out.write(
            json.dumps(
                {"timestamp": 3000, "input_length": 1030, "output_length": 2, "hash_ids": [7, 8, 9]}
            )
            + "\n"
        )
    assert read_trace(path) == [Arrival(0.0, 1030, 2, (7, 8, 9))]


@pytest.mark.parametrize("name", ["own.csv", "own.csv.gz", "own.jsonl", "own.jsonl.gz"])
def test_what_is_written_is_read_back(tmp_path: Path, name: str) -> None:
    arrivals = [
        Arrival(0.0, 5, 6),
        Arrival(0.25, 7, 8, (1, 2), "team a", 3, 1.5),
        Arrival(0.25, 1, 1, tenant="b"),
    ]
    write_trace(arrivals, tmp_path / name)
    assert read_trace(tmp_path / name) == arrivals


def test_a_row_of_jsonl_names_what_it_has_whatever_the_first_one_named(tmp_path: Path) -> None:
    more = {"tenant": "a", "priority": 2, "deadline": 3.0, "hash_ids": [7]}
    plain = {"at_seconds": 0, "prompt_tokens": 1, "output_tokens": 1}
    lines = [json.dumps(row) for row in (plain, {**plain, **more}, {**plain, "block_hashes": [8]})]
    found = read_trace(written(tmp_path / "own.jsonl", "\n".join(lines)))
    assert found == [
        Arrival(0.0, 1, 1),
        Arrival(0.0, 1, 1, (7,), "a", 2, 3.0),
        Arrival(0.0, 1, 1, (8,)),
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "at_seconds,prompt_tokens,output_tokens,tenant\n0,1,1,\u00e4\n"),
        (
            "a.jsonl",
            '{"at_seconds": 0, "prompt_tokens": 1, "output_tokens": 1, "tenant": "\u00e4"}\n',
        ),
    ],
)
def test_a_trace_is_utf_8_with_a_byte_order_mark_or_without(
    tmp_path: Path, name: str, text: str
) -> None:
    for mark in ("", "\ufeff"):
        (tmp_path / name).write_bytes((mark + text).encode())
        assert read_trace(tmp_path / name) == [Arrival(0.0, 1, 1, tenant="\u00e4")]


def test_the_first_requests_of_a_trace_are_taken_and_no_fewer_than_one(tmp_path: Path) -> None:
    path = written(tmp_path / "run.csv", "arrival_s,prompt_len,output_len\n5,2,2\n7,3,3\n0,1,1\n")
    assert [item.at_seconds for item in read_trace(path, limit=2)] == [0.0, 5.0]
    for limit in (0, -1):
        with pytest.raises(WorkloadError, match="at least 1"):
            read_trace(path, limit)


def test_moments_may_name_their_offset_and_be_whole_seconds(tmp_path: Path) -> None:
    rows = (
        "2024-05-10 00:00:00+00:00",
        "2024-05-10T03:00:00.5+02:00",
        "2024-05-10 02:00:00.2500000Z",
        "2024-05-10 03:00:00",
    )
    path = written(
        tmp_path / "own.csv",
        "at_seconds,prompt_tokens,output_tokens\n" + "".join(f"{row},1,1\n" for row in rows),
    )
    assert [item.at_seconds for item in read_trace(path)] == [0.0, 3600.5, 7200.25, 10800.0]


HEADS = ("arrival_s", "prompt_tokens", "output_tokens")
TABLES = [  # columns, rows, what is said
    ((), [], "no requests"),
    (HEADS, [], "no requests"),
    (("arrival_s", "output_tokens"), ["0,1"], "no column for prompt_tokens"),
    (HEADS[1:], ["1,1"], "no column for at_seconds"),
    (HEADS, ["0,5,3", "1,-4,3"], "row 3, prompt_tokens.*-4"),
    (HEADS, ["0,5,0"], "row 2, output_tokens.*at least 1"),
    (HEADS, ["-1,5,3"], "row 2, arrival_s.*0 or more"),
    (HEADS, ["nan,5,3"], "row 2, arrival_s"),
    (HEADS, ["0,5.5,3"], "row 2, prompt_tokens"),
    (HEADS, ["0,5"], "row 2, output_tokens"),
    (HEADS, [f"0,{'9' * 5000},3"], r"row 2, prompt_tokens.*got '9+\.\.\.; correct"),
    ((*HEADS, "deadline"), ["0,5,3,", "0,5,3,0"], "row 3: an arrival's deadline must be positive"),
    (("at_seconds", *HEADS[1:]), ["0001-01-01 00:00:00,1,1"], "row 2: an arrival's time must be 0"),
    ((*HEADS, "hash_ids"), ["0,5,3,4 -1"], "row 2, hash_ids.*at least 0, got '-1'"),
]


@pytest.mark.parametrize(("columns", "rows", "words"), TABLES)
def test_a_bad_table_is_refused_by_row_and_column(
    tmp_path: Path, columns: tuple[str, ...], rows: list[str], words: str
) -> None:
    text = "".join(f"{row}\n" for row in (",".join(columns), *rows)) if columns else ""
    with pytest.raises(WorkloadError, match=words):
        read_trace(written(tmp_path / "bad.csv", text))


NO_TIME = '"prompt_tokens": 1, "output_tokens": 1}'


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "invalid JSON"),
        ("[1]", "must be an object"),
        ('{"timestamp": true}', "no column"),
        ("[" * 200_000, "row 1: invalid JSON"),
        (f'{{"at_seconds": {"9" * 5000}, {NO_TIME}', "row 1: invalid JSON"),
        (f'{{"at_seconds": {"9" * 400}, {NO_TIME}', "row 1, at_seconds: must be a number"),
        (
            f'{{"at_seconds": 0, "deadline": {"9" * 400}, {NO_TIME}',
            "row 1, deadline: must be a number",
        ),
        (
            f'{{"at_seconds": 0, "priority": {"9" * 400}, {NO_TIME}',
            "row 1, priority: must be an integer",
        ),
    ],
    ids=range(8),
)
def test_bad_lines_are_refused(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        read_trace(written(tmp_path / "bad.jsonl", line + "\n"))


def test_files_that_are_missing_broken_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(WorkloadError, match="must be a .csv or .jsonl"):
        read_trace(written(tmp_path / "trace.txt", "x"))
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_trace(written(tmp_path / "trace.csv.gz", "not gzip"))


@pytest.mark.parametrize(
    "values", [(-1, 1, 1), (float("nan"), 1, 1), (0, 0, 1), (0, 1, -3), (0, 1, 1, (3, -1))]
)
def test_an_impossible_arrival_is_refused(values: tuple[float, int, int]) -> None:
    with pytest.raises(WorkloadError):
        Arrival(*values)


@pytest.mark.parametrize("variation", [0.0, 0.5, 1.0, 3.0])
def test_gaps_have_the_mean_and_the_variation_asked_for(variation: float) -> None:
    arrivals = gamma(20.0, 40_000, Fixed(10, 5), variation, seed=1)
    gaps = np.diff([item.at_seconds for item in arrivals])
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.1, abs=1e-9)
    assert mean_rate(arrivals) == pytest.approx(20.0, rel=0.06)


def test_the_seed_alone_decides() -> None:
    lengths = LogNormal(500, 1.0, 100, 0.7)
    assert poisson(3.0, 50, lengths, seed=4) == poisson(3.0, 50, lengths, seed=4)
    assert poisson(3.0, 50, lengths, seed=4) != poisson(3.0, 50, lengths, seed=5)


def test_lengths_follow_their_law() -> None:
    drawn = poisson(1.0, 5_000, LogNormal(500, 1.0, 100, 0.5, longest=4000), seed=2)
    assert statistics.median(item.prompt_tokens for item in drawn) == pytest.approx(500, rel=0.05)
    assert statistics.median(item.output_tokens for item in drawn) == pytest.approx(100, rel=0.05)
    assert max(item.prompt_tokens for item in drawn) == 4000
    mixed = poisson(1.0, 5_000, Mixture(((3.0, Fixed(10, 1)), (1.0, Fixed(20, 2)))), seed=2)
    assert sum(item.prompt_tokens == 10 for item in mixed) / len(mixed) == pytest.approx(
        0.75, abs=0.01
    )
    assert all(item.output_tokens == item.prompt_tokens // 10 for item in mixed)
    again = poisson(1.0, 200, Resampled(mixed), seed=3)
    assert {(item.prompt_tokens, item.output_tokens) for item in again} == {(10, 1), (20, 2)}


def test_a_coarse_clock_is_spread_within_its_ticks_in_order() -> None:
    arrivals = [Arrival(3.0 * (index // 10), 1 + index, 1) for index in range(50)]
    spread = spread_ticks(arrivals, 3.0, seed=0)
    assert [item.prompt_tokens for item in spread] == [item.prompt_tokens for item in arrivals]
    times = [item.at_seconds for item in spread]
    assert times == sorted(times) and len(set(times)) == 50
    assert [at // 3 for at in times] == [item.at_seconds // 3 for item in arrivals]


def test_workloads_are_stretched_merged_and_kept_within_a_context() -> None:
    arrivals = poisson(5.0, 500, Fixed(100, 10), seed=1)
    assert mean_rate(at_rate(arrivals, 2.0)) == pytest.approx(2.0)
    both = merge(arrivals, poisson(1.0, 20, Fixed(7, 1), tenant="b"))
    assert len(both) == 520
    assert all(a.at_seconds <= b.at_seconds for a, b in zip(both, both[1:], strict=False))
    assert len(within_context(both, 50)) == 20
    with pytest.raises(WorkloadError, match="none of 520"):
        within_context(both, 5)


@pytest.mark.parametrize(
    "call",
    [
        lambda: poisson(0.0, 5, Fixed(1, 1)),
        lambda: poisson(1.0, 0, Fixed(1, 1)),
        lambda: mean_rate([]),
        lambda: poisson(1.0, 2, Resampled([])),
        lambda: gamma(1.0, 5, Fixed(1, 1), -1.0),
        lambda: poisson(1.0, 2, Mixture(())),
    ],
)
def test_an_impossible_workload_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(WorkloadError):
        call()

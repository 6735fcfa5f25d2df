"""`benchmarks.device_day`, the measurements on a GPU or a TPU, in its CPU form, so that it still
runs when one is available."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.device_day.__main__ import PARTS
from benchmarks.device_day.day import Day, Figures, table
from benchmarks.device_day.serve import split_flags
from launch import cluster
from launch.flags import Given
from tests.programs import PROGRAMS


def day(folder: Path, *, seconds: float = 1000.0, small: bool = True) -> Day:
    return Day("part", folder / "new", small, seconds)


def rows(folder: Path) -> list[dict[str, object]]:
    return json.loads((folder / "new" / "part.json").read_text())["rows"]


def test_a_row_that_fails_is_a_row_with_its_error_and_the_next_one_is_run(tmp_path: Path) -> None:
    def fails() -> Figures:
        raise RuntimeError("no such kernel")

    this = day(tmp_path)
    this.row("first", fails)
    assert "no such kernel" in str(rows(tmp_path)[0]["error"])  # written before the next one
    this.row("second", lambda: {"ms": 1.5})
    assert [row.get("ms") for row in rows(tmp_path)] == [None, 1.5]
    assert "error" in table(this.rows)
    assert "ms 1.5" in table(this.rows)


def test_a_row_is_skipped_when_the_time_is_over_or_it_means_nothing_without_a_gpu(
    tmp_path: Path,
) -> None:
    begun = []
    day(tmp_path, seconds=0.0).row("late", lambda: {"begun": begun.append(1)})
    assert not begun
    assert "were over" in str(rows(tmp_path)[0]["skipped"])
    day(tmp_path).row("only there", lambda: {"GB/s": 1}, gpu=True)
    assert "GPU" in str(rows(tmp_path)[0]["skipped"])
    day(tmp_path, small=False).row("only there", lambda: {"GB/s": 1}, gpu=True)
    assert rows(tmp_path)[0]["GB/s"] == 1


def test_a_row_that_is_interrupted_is_written_and_ends_the_part(tmp_path: Path) -> None:
    def interrupted() -> Figures:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        day(tmp_path).row("first", interrupted)
    assert "KeyboardInterrupt" in str(rows(tmp_path)[0]["error"])


def test_the_two_workers_on_one_gpu_are_given_it_both_with_half_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = Given(cluster.flags.names, ())
    flags.values(["cluster", *split_flags(small=False)])
    monkeypatch.setattr(cluster, "flags", flags)
    plan = cluster.plan(cluster.cluster_config(), tmp_path)
    told = [command.environment or {} for group in plan.workers() for command in group.commands()]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in told] == ["0", "0"]
    assert [one["XLA_CLIENT_MEM_FRACTION"] for one in told] == ["0.4500", "0.4500"]


LONG = ("handoff", "serve", "kernels", "prefill")  # a minute of processor time or more


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=getattr(pytest.mark, "slow" if part in LONG else "ci"))
        for part in PARTS
    ],
)
def test_every_part_runs_on_a_cpu_and_no_row_fails(part: str, tmp_path: Path) -> None:
    command = (
        *(sys.executable, "-m", "benchmarks.device_day", part, "--small", "--minutes=60"),
        *(f"--out={tmp_path}", f"--programs={PROGRAMS}"),
    )
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    found = json.loads((tmp_path / f"{part}.json").read_text())["rows"]
    assert [row for row in found if "error" in row] == []
    assert any("skipped" not in row for row in found)
    assert ended.returncode == 0, ended.stderr

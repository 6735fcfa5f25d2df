"""Whether a worker like this one was warm before is known by all that decides which programs there
are."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from jdisagg.config import InstanceConfig, LimitsConfig, ServiceConfig, WorkerConfig
from jdisagg.costs.measured import StepTimes
from jdisagg.layout.axes import Layout
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.node import warm_up
from jdisagg.node.cluster import Cluster
from jdisagg.node.cluster_log import ClusterLog
from jdisagg.node.warm_up import FIRST_GUESS_SECONDS, Loading, WarmedBefore


def config(cache: Path | str) -> WorkerConfig:
    return WorkerConfig(instance=InstanceConfig(layout=Layout(tp=2)), compilation_cache=str(cache))


def test_a_worker_that_was_warm_is_found_again_at_another_port_and_with_other_limits(
    tmp_path: Path,
) -> None:
    WarmedBefore(config(tmp_path), WorkerRole.DECODE, "model").note({})
    moved = replace(
        config(tmp_path), service=ServiceConfig(port=1), limits=LimitsConfig(pull_seconds=1.0)
    )
    assert WarmedBefore(moved, WorkerRole.DECODE, "model").found()


def test_the_measured_times_of_a_mesh_are_kept_with_the_mark(tmp_path: Path) -> None:
    times = StepTimes((64, 128), ((64, 0, 0.25),), (1, 2), ((1, 1, 0.125),))
    warmed = WarmedBefore(config(tmp_path), WorkerRole.DECODE, "model")
    warmed.note({"decode": times, "prefill": None})
    assert warmed.times("decode") == times and warmed.times("prefill") is None
    (mark,) = tmp_path.glob("warmed-*")
    mark.write_bytes(b"")  # as versions without measured times wrote it
    assert warmed.found() and warmed.times("decode") is None


def test_a_worker_with_other_programs_was_not_warm(tmp_path: Path) -> None:
    WarmedBefore(config(tmp_path), WorkerRole.DECODE, "model").note({})
    wider = replace(config(tmp_path), instance=InstanceConfig(layout=Layout(tp=4)))
    packed = replace(config(tmp_path), instance=InstanceConfig(layout=Layout(tp=2), codec="int8"))
    assert not WarmedBefore(wider, WorkerRole.DECODE, "model").found()
    assert not WarmedBefore(packed, WorkerRole.DECODE, "model").found()
    assert not WarmedBefore(config(tmp_path), WorkerRole.PREFILL, "model").found()
    assert not WarmedBefore(config(tmp_path), WorkerRole.DECODE, "another").found()


def test_without_a_cache_nothing_is_remembered(tmp_path: Path) -> None:
    for cache in ("", tmp_path / "gone"):
        WarmedBefore(config(cache), WorkerRole.DECODE, "model").note({})
        assert not WarmedBefore(config(cache), WorkerRole.DECODE, "model").found()


def test_how_long_loading_will_take_follows_its_pace_and_ends_with_it() -> None:
    now = 100.0
    loading = Loading(lambda: now)
    assert loading.seconds() == FIRST_GUESS_SECONDS
    now = 102.0
    loading.progress(4, 20)
    assert loading.seconds() == 8.0
    now = 105.0  # requests ran
    loading.resume()
    now = 105.5
    loading.progress(5, 20)
    assert loading.seconds() == 7.5
    now = 110.0
    loading.progress(20, 20)
    assert loading.seconds() == 0.0


def test_loading_that_breaks_off_is_waited_for_no_longer() -> None:
    loading = Loading(lambda: 0.0)
    loading.progress(1, 20)
    loading.end()
    assert loading.seconds() == 0.0


def test_compiling_is_logged_where_there_is_no_terminal_and_the_clusters_table_reads_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warm_up, "LOG_SECONDS", 0.0)
    with caplog.at_level(logging.INFO), warm_up.progress_bar("compiling") as progress:
        progress(3, 29)
    (line,) = (record.getMessage() for record in caplog.records)
    written: list[str] = []
    cluster = Cluster.__new__(Cluster)
    cluster._phases = {"decode-0": "compiling"}  # pyright: ignore[reportPrivateUsage]
    log = SimpleNamespace(write=lambda name, text: written.append(text))
    cluster._log = cast(ClusterLog, log)  # pyright: ignore[reportPrivateUsage]
    cluster._take_line("decode-0", f"INFO {line}")  # pyright: ignore[reportPrivateUsage]
    assert cluster._phases == {"decode-0": "compiling 3/29"}  # pyright: ignore[reportPrivateUsage]
    assert written == [f"INFO {line}"]

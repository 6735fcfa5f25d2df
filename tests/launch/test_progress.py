"""The progress of warm-up."""

import logging
from types import SimpleNamespace
from typing import cast

import pytest

from jdisagg.node import warm_up
from jdisagg.node.cluster import Cluster
from jdisagg.node.cluster_log import ClusterLog


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

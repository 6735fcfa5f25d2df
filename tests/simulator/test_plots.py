"""Every plot is drawn from real outcomes, refused ones and single tokens included, and shows its
input."""

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.study_report import goodput_curves
from jdisagg.errors import ConfigError
from jdisagg.simulator import plots
from jdisagg.simulator.gaps import Gaps
from jdisagg.simulator.report import RequestOutcome

OUTCOMES = [
    RequestOutcome("a", 0.0, 3.0, 10, 5, 1.0, Gaps.of([(0.5, 4)])),
    RequestOutcome("b", 1.0, 2.0, 10, 1, 2.0),
    RequestOutcome("c", 1.5, 1.5, 10, 0, end="refused"),
]


def test_every_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = {"one": OUTCOMES, "two": OUTCOMES[:1]}
    pictures = {
        "curves": goodput_curves({"one": [(1.0, 1.0), (2.0, 0.5)]}),
        "ttft": plots.ttft_distribution(runs),
        "tbt": plots.tbt_distribution(runs),
        "timelines": plots.timelines(OUTCOMES),
        "load": plots.load(OUTCOMES),
    }
    for name, figure in pictures.items():
        plots.save(figure, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes()[1:4] == b"PNG"


def test_the_curve_shows_its_points_and_the_load_its_counts() -> None:
    pytest.importorskip("matplotlib")
    (line, _) = goodput_curves({"one": [(2.0, 0.5), (1.0, 1.0)]}).axes[0].get_lines()
    assert np.array_equal(line.get_xdata(), [1.0, 2.0])
    assert np.array_equal(line.get_ydata(), [100.0, 50.0])
    waiting, decoding = (
        np.asarray(drawn.get_ydata()) for drawn in plots.load(OUTCOMES).axes[0].get_lines()
    )
    assert waiting.max() == 1 and decoding.max() == 1 and waiting[-1] == 0


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"jdisagg\[notebooks\]"):
        plots.load(OUTCOMES)

"""Plots runs: goodput curves, distributions of TTFT and TBT, timelines of requests and of load.

matplotlib (extra `notebooks`) is imported only when drawing. This module uses the object interface
of matplotlib, so that a caller's pyplot state does not change. This module must not depend on
clusters."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jdisagg.errors import ConfigError
from jdisagg.simulator.gaps import bucket_seconds
from jdisagg.simulator.report import RequestOutcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def ttft_distribution(runs: Mapping[str, Sequence[RequestOutcome]]) -> "Figure":
    figure, axes = new_figure()
    for name, outcomes in runs.items():
        seconds = np.sort([item.ttft for item in outcomes if item.ttft is not None])
        axes.step(
            seconds,
            100 * np.arange(1, len(seconds) + 1) / max(1, len(outcomes)),
            where="post",
            label=name,
        )
    _distribution(axes, "time to first token, s", "requests, %")
    return figure


def tbt_distribution(runs: Mapping[str, Sequence[RequestOutcome]]) -> "Figure":
    figure, axes = new_figure()
    for name, outcomes in runs.items():
        merged: dict[int, int] = {}
        for gaps in (item.gaps for item in outcomes if item.gaps):
            for bucket, count in zip(gaps.buckets, gaps.counts, strict=True):
                merged[bucket] = merged.get(bucket, 0) + count
        ordered = [bucket for bucket in sorted(merged) if bucket > 0]
        whole = sum(merged.values())
        longer = [
            100 * sum(merged[other] for other in ordered[index:]) / whole
            for index in range(len(ordered))
        ]
        axes.step([bucket_seconds(bucket) for bucket in ordered], longer, where="pre", label=name)
    _distribution(axes, "gap between tokens, s", "gaps that are as long or longer, %")
    axes.set_yscale("log")
    return figure


def timelines(outcomes: Sequence[RequestOutcome], limit: int = 200) -> "Figure":
    figure, axes = new_figure()
    shown = sorted(outcomes, key=lambda item: item.arrival)[:limit]
    for row, item in enumerate(shown):
        first = item.first_token if item.first_token is not None else item.finish
        axes.hlines(row, item.arrival, first, color="tab:orange", linewidth=1.5)
        axes.hlines(row, first, item.finish, color="tab:blue", linewidth=1.5)
        if item.end != "finished":
            axes.plot(item.finish, row, marker="x", color="tab:red", markersize=4)
    axes.plot([], [], color="tab:orange", label="until first token")
    axes.plot([], [], color="tab:blue", label="decode")
    axes.set(xlabel="seconds", ylabel="request")
    axes.legend(fontsize="small", loc="lower right")
    return figure


def load(outcomes: Sequence[RequestOutcome]) -> "Figure":
    figure, axes = new_figure()
    waiting = [
        (item.arrival, item.first_token if item.first_token is not None else item.finish)
        for item in outcomes
    ]
    decoding = [
        (item.first_token, item.finish) for item in outcomes if item.first_token is not None
    ]
    for name, spans in (("waiting or in prefill", waiting), ("decoding", decoding)):
        events = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
        axes.step(
            [at for at, _ in events],
            np.cumsum([change for _, change in events]),
            where="post",
            label=name,
        )
    axes.set(xlabel="seconds", ylabel="requests")
    axes.legend(fontsize="small")
    return figure


def save(figure: "Figure", path: str | Path) -> None:
    figure.savefig(path, dpi=120)


def new_figure() -> "tuple[Figure, Axes]":
    try:
        module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            "plots need matplotlib, which is not installed; pip install 'jdisagg[notebooks]'"
        ) from error
    figure = module.Figure(figsize=(7.0, 4.2), layout="constrained")
    return figure, figure.subplots()


def _distribution(axes: "Axes", x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.set_xscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")

"""Formats the study's results as a page: tables, plots and the published figures beside them. Reads
only `results/study.json`.

    python -m benchmarks.study_report          # writes results/study.md and results/study_*.png

A mode's goodput under some limits is that of its best candidate: the best chunk size, ratio and
layouts among those simulated. The text of the page is in the handwritten `study_words.md`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jdisagg.simulator.plots import new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
WORDS = Path(__file__).parent / "study_words.md"
MODES = ("unified", "chunked", "disaggregated")
WANTED = 0.9


@dataclass(frozen=True, slots=True)
class Best:
    """A mode's best candidate under some limits, and the highest rate per accelerator at which the
    fraction `WANTED` of its requests meets them. `at_least`: no run missed the limits, so the true
    rate is higher."""

    name: str
    rate: float
    at_least: bool
    runs: Sequence[Mapping[str, object]]

    @property
    def shown(self) -> str:
        return f"{'> ' if self.at_least else ''}{self.rate:.3g}"


def rate_at_attainment(points: Sequence[tuple[float, float]], wanted: float = 0.9) -> float:
    """Returns the highest rate up to which the attainment is at least `wanted`. Interpolates
    linearly between `points`, (rate, attainment). Returns 0 if the lowest rate misses `wanted`, and
    the highest rate if no rate misses it."""
    good = 0.0
    ordered = sorted(points)
    for index, (rate, met) in enumerate(ordered):
        if met >= wanted:
            good = rate
            continue
        if index:
            before, had = ordered[index - 1]
            good = before + (rate - before) * (had - wanted) / (had - met)
        break
    return good


def goodput_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    wanted: float = 0.9,
    unit: str = "requests per second",
) -> "Figure":
    """Plots SLO attainment over request rate, one line for each name in `curves`. The legend gives
    the rate at which each line crosses the attainment `wanted`."""
    figure, axes = new_figure()
    for name, points in curves.items():
        rates, met = zip(*sorted(points), strict=True)
        axes.plot(
            rates,
            [100 * part for part in met],
            marker="o",
            markersize=3,
            label=f"{name} ({rate_at_attainment(points, wanted):.3g})",
        )
    axes.axhline(100 * wanted, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel=f"arrivals, {unit}", ylabel="SLO attainment, %", ylim=(0, 102))
    axes.legend(fontsize="small", title=f"rate at {100 * wanted:.0f} %")
    return figure


def points_of(curve: Mapping[str, object], limits: str) -> list[tuple[float, float]]:
    """Returns (rate per accelerator, attainment) of each run."""
    runs: Sequence[Mapping[str, object]] = curve["runs"]  # type: ignore[assignment]
    return [(run["per_accelerator"], run["attainment"][limits]) for run in runs]  # type: ignore[index,misc]


def best_of(case: Mapping[str, object], mode: str, limits: str) -> Best | None:
    found: list[Best] = []
    curves: Mapping[str, Mapping[str, object]] = case["curves"]  # type: ignore[assignment]
    for curve in curves.values():
        points = points_of(curve, limits)
        if curve["mode"] == mode and points:
            # 0 where the lowest rate fails: a line from nothing is no measurement
            rate = rate_at_attainment(points, WANTED)
            found.append(Best(str(curve["name"]), rate, rate >= max(points)[0], curve["runs"]))  # type: ignore[arg-type]
    return max(found, key=lambda best: best.rate, default=None)


def table(case: Mapping[str, object]) -> list[str]:
    """Returns a table with one row per limits, and columns for the modes and for disaggregated
    compared with the best single pool."""
    lines = [
        (
            "| limits: TTFT, TPOT, longest gap | unified | chunked | disaggregated | against the"
            " best of one pool |"
        ),
        "|---|---|---|---|---|",
    ]
    limits: Mapping[str, Sequence[float | None]] = case["limits"]  # type: ignore[assignment]
    for name, (ttft, tpot, gap) in limits.items():
        best = {mode: best_of(case, mode, name) for mode in MODES}
        cells = [f"{item.shown} ({item.name})" if item else "-" for item in best.values()]
        two, one = (
            best["disaggregated"],
            max((best["unified"], best["chunked"]), key=lambda item: item.rate if item else 0.0),
        )
        said = f"{ttft:g} s, {1e3 * (tpot or 0):g} ms{f', {1e3 * gap:g} ms' if gap else ''}"
        rival = next((mode for mode in MODES[:2] if best[mode] is one), "")
        versus = f" ({rival})" if two and one and (two.rate and one.rate) else ""
        lines.append(f"| {name}: {said} | {' | '.join(cells)} | {_compared(two, one)}{versus} |")
    return lines


def _compared(two: Best | None, one: Best | None) -> str:
    if two is None or one is None or not (two.rate or one.rate):
        return "neither"
    if not one.rate:
        return "only two pools"
    if not two.rate:
        return "only one pool"
    return f"{100 * (two.rate / one.rate - 1):+.0f} %" + (
        " or so" if two.at_least or one.at_least else ""
    )


def tails(case: Mapping[str, object], limits: str = "usual") -> list[str]:
    """Returns percentiles in milliseconds, at the highest common rate at which all modes meet the
    limits."""
    best = {mode: best_of(case, mode, limits) for mode in MODES}
    if any(item is None for item in best.values()):
        return []
    common = min(item.rate for item in best.values() if item)
    lines = []
    for mode, item in best.items():
        assert item is not None
        runs = [run for run in item.runs if run["per_accelerator"] <= common * 1.001]  # type: ignore[operator]
        if runs:
            run = runs[-1]
            cells = [
                _three(run[name])
                for name in ("ttft", "tpot", "tbt", "slowest_tenth", "handoff_gap")
            ]
            lines.append(
                f"| {mode}, {item.name} | {run['per_accelerator']:.3g} | {' | '.join(cells)} |"
            )
    head = [
        (
            "| at | req/s an accelerator | TTFT | TPOT | TBT | slowest tenth of a request's gaps |"
            " first to second token |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    return head + lines if lines else []


def _three(values: object) -> str:
    return " / ".join("-" if value is None else f"{1e3 * value:.3g}" for value in values)  # type: ignore[attr-defined]


def page(results: Mapping[str, object], folder: Path, words: str) -> str:
    """Returns the page, and draws its plots."""
    cases: Mapping[str, Mapping[str, object]] = results["cases"]  # type: ignore[assignment]
    made: Mapping[str, str] = results["made"]  # type: ignore[assignment]
    curves = [curve for case in cases.values() for curve in case["curves"].values()]  # type: ignore[attr-defined]
    runs = sum(len(curve["runs"]) for curve in curves)
    commits = " and ".join(sorted({curve["commit"] for curve in curves}))
    parts = [words.strip(), "", "## Figures", ""]
    parts += [
        (
            f"{runs} runs, {made['date']}, commit {commits}. First table of each case: requests a"
            f" second and accelerator at which {100 * WANTED:.0f} % of the requests keep"
            " all of a row's limits, with the candidate that reaches it. Second: p50 / p90 / p99"
            " in milliseconds, at the highest rate tried that all three modes carry within the"
            " usual limits. Left at their defaults: bfloat16 weights and KV, KV sent as it is, no"
            " prefix reuse, 10 % of memory for activations, pages of 64 tokens, up to 512 sequences"
            " a dp rank, whole prompts or 8,192 tokens a chunk outside chunked mode, one seed."
        ),
        "",
    ]
    for name, case in cases.items():
        parts += [f"### {name}", ""]
        if not covered(case):
            parts += [
                (
                    "Not all three modes have been run yet; `python -m benchmarks.study` goes on"
                    " where it stopped."
                ),
                "",
            ]
            continue
        parts += [searched(case), "", *table(case), ""]
        if rows := tails(case):
            parts += [*rows, ""]
        parts += [
            f"![{limits}]({draw(name, case, limits, folder)})" for limits in ("tight", "usual")
        ]
        parts.append("")
    return "\n".join(parts)


def searched(case: Mapping[str, object]) -> str:
    """Returns a description of the simulated runs: number of accelerators, candidates, and highest
    rate."""
    curves: Mapping[str, Mapping[str, object]] = case["curves"]  # type: ignore[assignment]
    names = {
        mode: [str(curve["name"]) for curve in curves.values() if curve["mode"] == mode]
        for mode in MODES
    }
    rates = [run["per_accelerator"] for curve in curves.values() for run in curve["runs"]]  # type: ignore[attr-defined]
    told = "; ".join(
        f"{mode} {', '.join(name.replace(', ', ' ') for name in found)}"
        for mode, found in names.items()
    )
    return (
        f"{case['accelerators']} accelerators, {min(rates):.3g} to {max(rates):.3g} requests a"
        f" second and accelerator. Simulated: {told}."
    )


def covered(case: Mapping[str, object]) -> bool:
    """Returns whether each mode has a curve from rates that meet the usual limits to rates that
    miss them."""
    curves: Mapping[str, Mapping[str, object]] = case.get("curves", {})  # type: ignore[assignment]
    points = {
        mode: [points_of(curve, "usual") for curve in curves.values() if curve["mode"] == mode]
        for mode in MODES
    }
    return all(
        any(curve and curve[0][1] >= WANTED > curve[-1][1] for curve in found)
        for found in points.values()
    )


def draw(name: str, case: Mapping[str, object], limits: str, folder: Path) -> str:
    """Plots attainment over rate for each mode's best candidate under these limits. Returns the
    file's name."""
    curves: Mapping[str, Mapping[str, object]] = case["curves"]  # type: ignore[assignment]
    lines: dict[str, list[tuple[float, float]]] = {}
    for mode in MODES:
        best = best_of(case, mode, limits)
        if best is not None:
            lines[f"{mode}, {best.name}"] = points_of(curves[f"{mode}: {best.name}"], limits)
    figure = goodput_curves(lines, WANTED, "requests per second and accelerator")
    figure.axes[0].set_title(f"{name}, {limits} limits", fontsize="small")
    file = (
        "study_"
        + "".join(letter if letter.isalnum() else "_" for letter in f"{name}_{limits}").replace(
            "___", "_"
        )
        + ".png"
    )
    save(figure, folder / file)
    return file


def main() -> None:
    results = json.loads((RESULTS / "study.json").read_text())
    (RESULTS / "study.md").write_text(page(results, RESULTS, WORDS.read_text()))


if __name__ == "__main__":
    main()

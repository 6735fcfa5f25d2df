"""Formats outcomes as a table of stream pauses and recovery times per scenario."""

import statistics
from collections.abc import Sequence

from benchmarks.soak.scenarios import Outcome


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns one line per scenario; runs of the same scenario are combined."""
    lines = [
        f"{'scenario':58} {'runs':>4} {'wrong':>5} {'streams':>7} {'pause median':>12} {'max':>6}"
        f" {'quiet max':>9} {'back max':>8}"
    ]
    names = dict.fromkeys(outcome.scenario for outcome in outcomes)
    for name in names:
        runs = [outcome for outcome in outcomes if outcome.scenario == name]
        pauses = [pause for run in runs for pause in run.pauses]
        quiet = [run.quiet_seconds for run in runs if run.quiet_seconds is not None]
        back = [run.back_seconds for run in runs if run.back_seconds is not None]
        wrong = sum(bool(run.faults) for run in runs)
        times = (
            f"{_seconds(statistics.median(pauses) if pauses else None):>12}"
            f" {_seconds(max(pauses, default=None)):>6}"
        )
        rest = f"{_seconds(max(quiet, default=None)):>9} {_seconds(max(back, default=None)):>8}"
        lines.append(f"{name:58} {len(runs):>4} {wrong:>5} {len(pauses):>7} {times} {rest}")
    everything = [pause for outcome in outcomes for pause in outcome.pauses]
    if everything:
        lines.append(
            f"{len(outcomes)} scenarios; pauses: median {statistics.median(everything):.2f} s, max"
            f" {max(everything):.2f} s"
        )
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Returns figures over all outcomes: seconds of stream pauses, of the time until all pages were
    free, and of the victims' recovery."""
    pauses = [pause for outcome in outcomes for pause in outcome.pauses]
    quiet = [outcome.quiet_seconds for outcome in outcomes if outcome.quiet_seconds is not None]
    back = [outcome.back_seconds for outcome in outcomes if outcome.back_seconds is not None]
    return {
        "scenarios": len(outcomes),
        "wrong": sum(bool(outcome.faults) for outcome in outcomes),
        "streams_interrupted": len(pauses),
        **{
            f"{name}_{what}_s": value
            for name, seconds in (("pause", pauses), ("quiet", quiet), ("back", back))
            for what, value in _of(seconds)
        },
    }


def _of(seconds: list[float]) -> list[tuple[str, float]]:
    return (
        [("median", round(statistics.median(seconds), 2)), ("max", round(max(seconds), 2))]
        if seconds
        else []
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"

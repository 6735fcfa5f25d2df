"""What a study of this folder needs beside its own runs: the search for the highest rate that
attains a goal, and the page with the results. Must not depend on a particular paper."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "results"
WORDS = Path(__file__).resolve().parent / "words"
TOLERANCE = 0.06  # of a rate, where the search for the highest ends
MOST_RUNS = 10  # of one search


def highest(met: Callable[[float], bool], guess: float, above: float = 0.0) -> float:
    """Returns the highest tried rate that is `met`, within TOLERANCE of one that is not. Returns 0
    if no rate down to a sixteenth of the guess is met. `above`: rate to exceed; the search begins
    there and returns 0 if it is not met."""
    low = high = 0.0
    runs, rate = 0, above * (1 + TOLERANCE) or guess
    while runs < MOST_RUNS and not (low and high):
        runs += 1
        if met(rate):
            low, rate = rate, rate * (1.25 if above else 1.6)
        elif above and not low:
            return 0.0
        else:
            high, rate = rate, rate / 1.6
            if not low and rate < guess / 16:
                return 0.0
    while runs < MOST_RUNS and high > low * (1 + TOLERANCE):
        runs, middle = runs + 1, (low * high) ** 0.5
        low, high = (middle, high) if met(middle) else (low, middle)
    return low


def page(results: Mapping[str, object], words: str) -> str:
    """Returns the page of a study: its handwritten text and its tables."""
    machine: Mapping[str, object] = results["machine"]  # type: ignore[assignment]
    tables: Sequence[Mapping[str, object]] = results["tables"]  # type: ignore[assignment]
    lines = [words.strip(), "", "## Figures", ""]
    lines.append(
        f"`python -m benchmarks.papers {results['study']}`, {machine['date']}, commit"
        f" {machine['commit']}, {results['runs']} runs in {results['cpu_seconds']} processor"
        f" seconds ({machine['processor']}, Python {machine['python']}). Seconds are the cost"
        " model's: a faster machine gives the same figures."
    )
    for table in tables:
        columns: Sequence[str] = table["columns"]  # type: ignore[assignment]
        rows: Sequence[Sequence[object]] = table["rows"]  # type: ignore[assignment]
        lines += ["", f"### {table['title']}", "", _row(columns), "|---" * len(columns) + "|"]
        lines += [_row([_shown(cell) for cell in row]) for row in rows]
    return "\n".join(lines) + "\n"


def read(study: str) -> Mapping[str, object]:
    return json.loads((RESULTS / f"papers_{study}.json").read_text())


def words(study: str) -> str:
    return (WORDS / f"{study}.md").read_text()


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _shown(cell: object) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)

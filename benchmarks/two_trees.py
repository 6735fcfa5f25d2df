"""Measures this checkout and another checkout of this project in alternating rounds."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from absl import flags

from benchmarks.commits import commit

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")


def in_turn(argv: list[str], run: Callable[[Path], T]) -> tuple[list[T], list[T], str]:
    """Defines and reads --against, --rounds and --name, and runs both checkouts in alternating
    rounds. Returns the results of each round of this checkout and of the other one (none without
    --against), and the other's commit ("" without --against)."""
    flags.DEFINE_string("against", "", "Another checkout of this project; '' measures this one.")
    flags.DEFINE_integer("rounds", 5, "Rounds, in turn.")
    flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")
    flags.FLAGS(argv)
    other = Path(flags.FLAGS.against).resolve() if flags.FLAGS.against else None
    ours: list[T] = []
    theirs: list[T] = []
    for _ in range(flags.FLAGS.rounds):
        ours.append(run(ROOT))
        if other is not None:
            theirs.append(run(other))
    return ours, theirs, commit(other) if other is not None else ""

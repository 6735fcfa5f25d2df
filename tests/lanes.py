"""Which tests a person waits for. A test is `slow` (full matrices and long runs: only when asked
for), `ci` (clusters of processes and what widens a matrix: `.ci/run` runs it, too) or, without
either mark, `quick`: the line in README.md runs those alone."""

from collections.abc import Iterable, Sequence

import pytest


def first_quick(cases: Iterable[Sequence[object]], quick: int = 1) -> list[object]:
    """Cases for `parametrize`: all but the first `quick` belong to the lane `ci`."""
    return [
        case if number < quick else pytest.param(*case, marks=pytest.mark.ci)
        for number, case in enumerate(cases)
    ]


def sort_into_lanes(items: list[pytest.Item]) -> None:
    """Marks what is quick, and begins with the files that take long, so that no worker has one of
    them left at the end."""
    long = set()
    for item in items:
        if item.get_closest_marker("ci"):
            long.add(item.path)
        elif not item.get_closest_marker("slow"):
            item.add_marker("quick")
    items.sort(key=lambda item: item.path not in long)

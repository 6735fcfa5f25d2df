"""Lanes of tests. `slow` tests (full matrices and long runs) run only on request. `ci` tests
(clusters of processes, wider matrices) also run in `.ci/run`. Others are `quick`, and the command
in README.md runs only those."""

from collections.abc import Iterable, Sequence

import pytest


def first_quick(cases: Iterable[Sequence[object]], quick: int = 1) -> list[object]:
    """Returns cases for `parametrize`: all but the first `quick` are in lane `ci`."""
    return _later(cases, quick, pytest.mark.ci)


def first_ci(cases: Iterable[Sequence[object]], ci: int = 1) -> list[object]:
    """Returns cases for `parametrize` of a test in lane `ci`: all but the first `ci` are slow."""
    return _later(cases, ci, pytest.mark.slow)


def _later(
    cases: Iterable[Sequence[object]], first: int, mark: pytest.MarkDecorator
) -> list[object]:
    """Marks all but the first cases."""
    return [
        case if number < first else pytest.param(*case, marks=mark)
        for number, case in enumerate(cases)
    ]


def sort_into_lanes(items: list[pytest.Item]) -> None:
    """Marks quick tests, and starts with long files, so that no worker runs one alone at the
    end."""
    long = set()
    for item in items:
        if item.get_closest_marker("ci"):
            long.add(item.path)
        elif not item.get_closest_marker("slow"):
            item.add_marker("quick")
    items.sort(key=lambda item: item.path not in long)

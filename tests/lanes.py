"""Lanes of tests. `slow` tests (full matrices and long runs) run only on request. `ci` tests
(clusters of processes, wider matrices) also run in `.ci/run`. Others are `quick`, and the command
in README.md runs only those."""

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from hypothesis import given, settings

# Tests of these folders never import JAX, which takes longer than most of their tests. A rule of
# tests/test_import_rules.py holds it.
WITHOUT_JAX = (
    "chat",
    "costs",
    "dispatch",
    "grammar",
    "layout",
    "messages",
    "router",
    "scheduler",
    "service",
    "simulator",
    "worker",
)


def without_jax(path: Path) -> bool:
    tests = Path(__file__).parent
    return path.is_relative_to(tests) and path.relative_to(tests).parts[0] in WITHOUT_JAX


def first_quick(cases: Iterable[Sequence[object]], quick: int = 1, ci: int = 1) -> list[object]:
    """Returns cases for `parametrize`: after the first `quick`, `ci` are in lane `ci`, and all
    others are slow."""
    marks = {number: pytest.mark.ci for number in range(quick, quick + ci)}
    return [
        case if number < quick else pytest.param(*case, marks=marks.get(number, pytest.mark.slow))
        for number, case in enumerate(cases)
    ]


def first_ci(cases: Iterable[Sequence[object]], ci: int = 1) -> list[object]:
    """Returns cases for `parametrize` of a test in lane `ci`: all but the first `ci` are slow."""
    return first_quick(cases, quick=ci, ci=0)


def given_examples(
    quick: int, slow: int, *strategies: Any, **named: Any
) -> Callable[[FunctionType], Callable[..., None]]:
    """`given` with `quick` examples. A twin of the test, whose name ends in `_at_length`, has
    `slow` examples in the lane of that name."""

    def decorate(test: FunctionType) -> Callable[..., None]:
        def with_examples(count: int) -> Callable[..., None]:
            copy = FunctionType(
                test.__code__, test.__globals__, argdefs=test.__defaults__, closure=test.__closure__
            )
            functools.update_wrapper(copy, test)
            del copy.__wrapped__
            return settings(max_examples=count)(given(*strategies, **named)(copy))

        test.__globals__[f"{test.__name__}_at_length"] = pytest.mark.slow(with_examples(slow))
        return with_examples(quick)

    return decorate


def sort_into_lanes(items: list[pytest.Item]) -> None:
    """Marks quick tests, and starts with long files, so that no worker runs one alone at the
    end."""
    long = {item.path for item in items if item.path.parent.name == "end_to_end"}
    for item in items:
        if item.get_closest_marker("ci"):
            long.add(item.path)
        elif not item.get_closest_marker("slow"):
            item.add_marker("quick")
    items.sort(key=lambda item: item.path not in long)

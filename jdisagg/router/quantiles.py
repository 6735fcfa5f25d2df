"""Quantiles of observed values. A quantile is always an observed value, never interpolated."""

import math
from collections.abc import Sequence
from typing import TypeVar

Value = TypeVar("Value", int, float)


def quantile(values: Sequence[float], at: float) -> float:
    """Returns the smallest of the values such that at least the fraction `at` of all values is less
    than or equal to it. Returns 0 if there are no values."""
    return of_sorted(sorted(values), at) if values else 0.0


def of_sorted(ascending: Sequence[Value], at: float) -> Value:
    """Returns `quantile` of a non-empty ascending sequence."""
    return ascending[max(0, math.ceil(at * len(ascending)) - 1)]

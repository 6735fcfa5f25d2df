"""Quantiles of observed values: always an observed value, never interpolated. Pure."""

import math
from collections.abc import Sequence
from typing import TypeVar

Value = TypeVar("Value", int, float)


def quantile(values: Sequence[float], at: float) -> float:
    """Returns the smallest value that at least a share `at` does not exceed, or 0 if empty."""
    return of_sorted(sorted(values), at) if values else 0.0


def of_sorted(ascending: Sequence[Value], at: float) -> Value:
    """Returns `quantile` of a non-empty ascending sequence."""
    return ascending[max(0, math.ceil(at * len(ascending)) - 1)]

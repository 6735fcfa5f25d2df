"""The quantile by which the router judges what it saw: a value that was seen, never one between
two. Pure."""

import math
from collections.abc import Sequence
from typing import TypeVar

Value = TypeVar("Value", int, float)


def quantile(values: Sequence[float], at: float) -> float:
    """The smallest value that at least a share `at` of the values does not exceed; 0 where there
    are none."""
    return of_sorted(sorted(values), at) if values else 0.0


def of_sorted(ascending: Sequence[Value], at: float) -> Value:
    """The same of values in order, of which there is one at least."""
    return ascending[max(0, math.ceil(at * len(ascending)) - 1)]

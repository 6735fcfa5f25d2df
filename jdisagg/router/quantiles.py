"""The quantile by which the router judges what it saw: a value that was seen, never one between two. Pure."""

import math
from collections.abc import Sequence


def quantile(values: Sequence[float], at: float) -> float:
    """The smallest value that at least a share `at` of the values does not exceed; 0 where there are none."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(at * len(values)) - 1)]

"""The generator of the layout matrices, in process and between processes."""

import itertools
from typing import Any


def pairwise(*choices: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Cases in which every pair of values of two different parameters occurs, chosen greedily and
    always the same."""
    cases = list(itertools.product(*choices))
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in cases}
    wanted = set().union(*pairs.values())
    chosen: list[tuple[Any, ...]] = []
    while wanted:
        best = max(cases, key=lambda case: len(pairs[case] & wanted))
        chosen.append(best)
        wanted -= pairs[best]
    return chosen

"""Batches that take turns at pipeline stages, against a plain step-by-step simulation."""

from collections.abc import Callable

import numpy as np
import pytest

from jdisagg.simulator.turns import Turns


def by_hand(
    arrivals: list[float], tokens: int, stages: int, base: float, each: float
) -> list[float]:
    """Returns the end of each sequence. Every batch moves through every stage in turn, and an empty
    batch takes the next newcomer."""
    batches: list[dict[int, int]] = [{} for _ in range(stages)]
    back, free, ends = [0.0] * stages, [0.0] * stages, [0.0] * len(arrivals)
    waiting = list(range(len(arrivals)))
    while waiting or any(batches):
        turn = min(
            range(stages),
            key=lambda index: (
                back[index] if batches[index] else (arrivals[waiting[0]] if waiting else np.inf)
            ),
        )
        now = back[turn] if batches[turn] else max(arrivals[waiting[0]], free[0])
        for number in list(batches[turn]):
            batches[turn][number] -= 1
            if not batches[turn][number]:
                ends[number] = now
                del batches[turn][number]
        while waiting and arrivals[waiting[0]] <= now:
            batches[turn][waiting.pop(0)] = tokens
        if batches[turn]:
            at, stage_seconds = now, (base + each * len(batches[turn])) / stages
            for stage in range(stages):
                at = free[stage] = max(at, free[stage]) + stage_seconds
            back[turn] = at
    return ends


def moved(
    arrivals: list[float], tokens: int, cycle: Callable[[float, list[int], list[int]], float]
) -> np.ndarray:
    """Returns each sequence's seconds per token. `cycle(now, slots, new ones)` returns the seconds
    in which every slot makes one token; slots are the sequences' numbers."""
    left: dict[int, int] = {}
    ends, now, waiting = [0.0] * len(arrivals), 0.0, list(range(len(arrivals)))
    while waiting or left:
        new = [number for number in waiting if arrivals[number] <= now]
        del waiting[: len(new)]
        left |= dict.fromkeys(new, tokens)
        if not left:
            now = arrivals[waiting[0]]
            continue
        now += cycle(now, list(left), new)
        for number in list(left):
            left[number] -= 1
            if not left[number]:
                ends[number] = now
                del left[number]
    return (np.array(ends) - arrivals) / tokens


def test_steps_of_uneven_batches_take_as_long_as_turns_moved_one_by_one() -> None:
    base, each, tokens = 0.02, 0.0007, 150
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / 4.0, 400)).tolist()
    expected = (np.array(by_hand(arrivals, tokens, 2, base, each)) - arrivals) / tokens
    turns = Turns(2, lambda sequences, context, longest: (base + each * sequences, 0.0))
    found = moved(
        arrivals,
        tokens,
        lambda now, slots, new: base + each * turns.fullest(slots, new, [0] * 400)[0],
    )
    assert np.median(found) == pytest.approx(np.median(expected), rel=0.05)
    assert np.percentile(found, 90) == pytest.approx(np.percentile(expected, 90), rel=0.1)


def test_a_newcomer_founds_a_batch_where_one_is_empty_and_who_is_gone_counts_no_more() -> None:
    turns = Turns(2, lambda sequences, context, longest: (1.0, 0.0))
    assert turns.fullest([0, 1], [0, 1], [10, 20]) == (1, 21, 21)
    assert turns.fullest([0, 1, 2, 3], [2, 3], [10, 20, 5, 5])[0] in (2, 3)
    assert turns.fullest([3], [], [0, 0, 0, 5]) == (1, 6, 6)

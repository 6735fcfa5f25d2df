"""Slots that are divided into batches, one for each pipeline stage."""

import pytest

from jdisagg.simulator.turns import largest_batch

POSITIONS = (9, 19, 4, 4, 0, 99)


@pytest.mark.parametrize(
    ("slots", "stages", "expected"),
    [
        ((0, 1, 2, 3), 1, (4, 40, 20)),
        ((0, 1, 2, 3), 2, (2, 25, 20)),  # 0 and 2, or 1 and 3, which have more context
        ((0, 2, 3), 2, (2, 15, 10)),
        ((1, 3, 5), 2, (3, 125, 100)),  # all in one batch
        ((5,), 3, (1, 100, 100)),
        ((), 2, (0, 0, 0)),
    ],
)
def test_the_largest_batch_has_the_most_sequences_and_then_the_most_context(
    slots: tuple[int, ...], stages: int, expected: tuple[int, int, int]
) -> None:
    assert largest_batch(slots, POSITIONS, stages) == expected

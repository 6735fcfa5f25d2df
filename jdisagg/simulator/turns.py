"""Divides the slots of an instance with pipeline stages into batches, as live decode workers do
(`executor/decode_stages.py`): the batch of a slot is its number modulo the number of stages.

At any time each batch is in a different stage, and batches cannot overtake each other. So all run
as slowly as the largest batch. Has no side effects."""

from collections.abc import Collection, Sequence

# Number of sequences in a step, sum of their contexts, longest context, all after the step.
Load = tuple[int, int, int]


def load_of(slots: Collection[int], positions: Sequence[int]) -> Load:
    held = [positions[slot] for slot in slots]
    return len(held), len(held) + sum(held), max(held, default=-1) + 1


def largest_batch(slots: Sequence[int], positions: Sequence[int], stages: int) -> Load:
    if stages == 1:
        return load_of(slots, positions)
    batches = ([slot for slot in slots if slot % stages == turn] for turn in range(stages))
    return max(load_of(batch, positions) for batch in batches)

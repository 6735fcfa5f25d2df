"""Rows of some lengths packed in a chunk, as programs pack them."""

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jdisagg.model_api import Runs

ROWS, TOKENS, GRAIN = 4, 160, 16
COUNTS = st.lists(st.integers(0, 40), min_size=ROWS, max_size=ROWS).filter(
    lambda counts: sum(-(-count // GRAIN) * GRAIN for count in counts) <= TOKENS
)


def layout(counts: list[int], grain: int, tokens: int) -> Runs:
    """Rows of these lengths, each at the next multiple of the grain."""
    row, index = np.full(tokens, -1, np.int32), np.full(tokens, -1, np.int32)
    first, at = [], 0
    for number, count in enumerate(counts):
        first.append(at)
        row[at : at + count], index[at : at + count] = number, np.arange(count)
        at += -(-count // grain) * grain
    arrays = (row, index, np.array(first, np.int32), np.array(counts))
    return Runs(*map(jnp.asarray, arrays), grain=grain)

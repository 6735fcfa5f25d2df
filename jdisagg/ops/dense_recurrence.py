"""Runs recurrent layers over a whole sequence without a stored state, for tests and KV calibration.
`ops/dense_attention.py` does the same for attention."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.layout.kv_spec import KVComponent
from jdisagg.model_api import Advance, Inputs, Recur, Runs, Shards

_GRAIN = 16


def recur_from_the_beginning(
    parts: Sequence[KVComponent], dtype: str, tokens: int, shards: Shards
) -> Recur:
    over = lax.axis_size(shards.tp[0]) if shards.tp else 1

    def recur(inputs: Inputs, advance: Advance) -> jax.Array:
        state = tuple(
            jnp.zeros((1, part.heads // over, part.width), jnp.dtype(part.dtype or dtype))
            for part in parts
        )
        index_T = jnp.arange(tokens, dtype=jnp.int32)
        count_1 = jnp.full((1,), tokens, jnp.int32)
        runs = Runs(jnp.zeros_like(index_T), index_T, jnp.zeros_like(count_1), count_1, _GRAIN)
        return advance(inputs, state, runs)[0]

    return recur

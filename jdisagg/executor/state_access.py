"""Inside a program: the states of one layer's sequences, read from their slots, given to the layer,
written back.

A layer's states are pages of one slot (`layout/kv_spec.py`), [slots, K, 1, H] by component; slots
at or beyond the end are nobody's: what is read there counts for nothing and nothing is written."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jdisagg.executor.page_pool import LayerPages
from jdisagg.model_api import Advance, Recur, Runs
from jdisagg.ops.kv_pages import as_kept, as_read


def recur_over(
    pages: LayerPages,
    slot_R: jax.Array,
    fresh_R: jax.Array | None,
    runs: Runs | None,
    keep: Callable[[LayerPages], None],
) -> Recur:
    """What a layer with state is called with.

    Args:
        pages: its states.
        slot_R: each row's slot.
        fresh_R: rows that begin a sequence: their state is zeros. None: none does.
        runs: where rows lie among the tokens; None: each token is a row.
        keep: told the states that the layer leaves.
    """

    def read(part_PK1H: jax.Array) -> jax.Array:
        state_RKH = as_read(part_PK1H.at[slot_R, :, 0].get(mode="clip"), jnp.dtype("bfloat16"))
        if fresh_R is None:
            return state_RKH
        return jnp.where(fresh_R[:, None, None], jnp.zeros((), state_RKH.dtype), state_RKH)

    def recur(advance: Advance) -> jax.Array:
        out, state = advance(tuple(map(read, pages)), runs)
        keep(
            tuple(
                part.at[slot_R, :, 0].set(as_kept(new, part.dtype), mode="drop")
                for part, new in zip(pages, state, strict=True)
            )
        )
        return out

    return recur


def runs_of(segment_T: jax.Array, positions_T: jax.Array, past_R: jax.Array, grain: int) -> Runs:
    """Where a chunk's rows lie: `segment_T` is each token's row, -1 for padding; `past_R` the
    position of each row's first token."""
    row_R = jnp.arange(past_R.shape[0], dtype=jnp.int32)
    mine_RT = segment_T[None, :] == row_R[:, None]
    index_T = positions_T - jnp.take(past_R, segment_T, mode="clip")
    return Runs(
        row_T=segment_T,
        index_T=jnp.where(segment_T >= 0, index_T, -1),
        first_R=jnp.argmax(mine_RT, axis=1).astype(jnp.int32),
        count_R=jnp.sum(mine_RT, axis=1, dtype=jnp.int32),
        grain=grain,
    )

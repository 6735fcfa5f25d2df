"""Access to a layer's recurrent states inside a program: read from their slots, passed to the
layer, written back.

A layer's states are pages of one token (`layout/kv_spec.py`), [slots, K, 1, H] for each component.
A slot number beyond the end belongs to no sequence: its values are ignored and nothing is
written."""

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
    """Returns the function that a layer calls to advance its states.

    Args:
        pages: States of the layer.
        slot_R: Slot of each row.
        fresh_R: Rows that begin a sequence, whose state is zero; None if every row continues.
        runs: Tokens of each row; None if each row is one token.
        keep: Callback that gets the new states.
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
    """Returns the tokens of a chunk's rows.

    Args:
        segment_T: Row of each token; -1 for padding.
        positions_T: Position of each token.
        past_R: Position of each row's first token.
        grain: Tokens of a recurrence step; rows begin at multiples of it.
    """
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

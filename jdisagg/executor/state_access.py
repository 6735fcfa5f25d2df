"""Reads a layer's recurrent states from their slots inside a program, passes them to the layer, and
writes the new states back.

The states are stored like pages of one token (`layout/kv_spec.py`): [slots, K, 1, H] for each
component. An out-of-range slot number belongs to no sequence: values read from it are ignored, and
writes to it have no effect."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jdisagg.executor.page_pool import LayerPages
from jdisagg.model_api import Advance, Inputs, Recur, Runs, State
from jdisagg.ops.kv_pages import as_kept, as_read


def recur_over(
    pages: LayerPages,
    slot_R: jax.Array,
    fresh_R: jax.Array | None,
    runs: Runs | None,
    keep: Callable[[LayerPages], None],
    stop_slot_R: jax.Array | None = None,
) -> Recur:
    """Returns the function by which a layer updates its recurrent states.

    Args:
        fresh_R: Whether the row begins a sequence, so that its state is zero. None if no row does.
        stop_slot_R: Slot for the state of each row after `Runs.stop_R` tokens. None if `runs` has
            no `stop_R`.
    """
    written = slot_R if stop_slot_R is None else jnp.concatenate([slot_R, stop_slot_R])

    def begun(state_RKH: jax.Array) -> jax.Array:
        if fresh_R is None:
            return state_RKH
        return jnp.where(fresh_R[:, None, None], jnp.zeros((), state_RKH.dtype), state_RKH)

    def recur(inputs: Inputs, advance: Advance) -> jax.Array:
        out, state = advance(inputs, tuple(map(begun, read_states(pages, slot_R))), runs)
        keep(write_states(pages, written, state))
        return out

    return recur


def read_states(pages: LayerPages, slot_R: jax.Array) -> State:
    return tuple(
        as_read(part_PK1H.at[slot_R, :, 0].get(mode="clip"), jnp.dtype("bfloat16"))
        for part_PK1H in pages
    )


def write_states(pages: LayerPages, slot_R: jax.Array, state: State) -> LayerPages:
    return tuple(
        part.at[slot_R, :, 0].set(as_kept(new, part.dtype), mode="drop")
        for part, new in zip(pages, state, strict=True)
    )


def runs_of(
    segment_T: jax.Array,
    positions_T: jax.Array,
    past_R: jax.Array,
    grain: int,
    stop_R: jax.Array | None = None,
) -> Runs:
    """Returns the token ranges of a prefill chunk's rows.

    Args:
        grain: Number of tokens that one recurrence step computes. Rows begin at multiples of
            `grain`.
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
        stop_R=stop_R,
    )

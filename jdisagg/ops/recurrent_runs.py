"""Applies recurrences to a prefill chunk. The tokens of each row (sequence) are cut into runs of
`grain` tokens.

At the first run of a row, the row's state is selected by `where`, never by a product with zero, so
that a row with non-finite values affects no other row."""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.model_api import Runs


class OnState(Protocol):
    """Interface for the effect of one run of tokens on a state. Implementations are NamedTuples of
    arrays, so that JAX can stack them."""

    def on(self, state: jax.Array, /) -> tuple[jax.Array, jax.Array]:
        """Applies the run to a state. Returns the run's output and the next state."""
        ...


def cut_into_runs(part_TX: jax.Array, runs: Runs) -> jax.Array:
    """Cuts an array of tokens into n runs: [n, X, grain, ...] in float32, with padding set to
    zero."""
    real_T, lacking = runs.row_T >= 0, -runs.row_T.shape[0] % runs.grain
    masked = jnp.where(
        real_T.reshape(-1, *(1,) * (part_TX.ndim - 1)), part_TX.astype(jnp.float32), 0.0
    )
    masked = jnp.pad(masked, ((0, lacking), *((0, 0),) * (part_TX.ndim - 1)))
    return jnp.swapaxes(masked.reshape(-1, runs.grain, *part_TX.shape[1:]), 1, 2)


def owners(runs: Runs) -> tuple[jax.Array, jax.Array]:
    return runs.row_T[:: runs.grain], runs.index_T[:: runs.grain] == 0


def _ending(runs: Runs, row_n: jax.Array) -> list[jax.Array]:
    index_n = runs.index_T[:: runs.grain]
    found = []
    for end_R in runs.ends:
        end_n = jnp.take(end_R, row_n, mode="clip")
        here_n = (row_n >= 0) & (index_n < end_n) & (end_n <= index_n + runs.grain)
        found.append(jnp.where(here_n, row_n, -1))
    return found


def in_turn(parts: OnState, state_R: jax.Array, runs: Runs) -> tuple[jax.Array, jax.Array]:
    """Processes the runs in order, in a loop. Returns the outputs [n, ...] and the states of the
    rows at `runs.ends`. For a row without such an end, the result is the row's state in
    `state_R`."""
    rows, (row_n, first_n) = state_R.shape[0], owners(runs)
    ending = _ending(runs, row_n)

    def one_row(
        carry: tuple[jax.Array, ...], run: tuple[OnState, jax.Array, jax.Array, list[jax.Array]]
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        out, state = run[0].on(carry[0])
        stopped = [
            jnp.where(row < 0, before, state)
            for row, before in zip(run[3][1:], carry[1:], strict=True)
        ]
        return (state, *stopped), out

    def several_rows(
        carry: tuple[jax.Array, ...], run: tuple[OnState, jax.Array, jax.Array, list[jax.Array]]
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        part, row, first, ends = run
        before = jnp.where(first, jnp.take(state_R, row, axis=0, mode="clip"), carry[0])
        out, state = part.on(before)
        ended = [
            kept.at[jnp.where(row < 0, rows, row)].set(state, mode="drop")
            for row, kept in zip(ends, carry[1:], strict=True)
        ]
        return (state, *ended), out

    inputs = (parts, row_n, first_n, ending)
    if rows == 1:
        kept, out = lax.scan(one_row, (state_R[0],) * len(ending), inputs)
        return out, jnp.stack(kept)
    first = jnp.zeros_like(state_R[0])
    (_, *kept_R), out = lax.scan(several_rows, (first, *(state_R,) * len(ending)), inputs)
    return out, jnp.concatenate(kept_R)


def at_once(
    keep_n: jax.Array,
    add_n: jax.Array,
    state_R: jax.Array,
    runs: Runs,
    product: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Computes the same states as `in_turn` without a loop, because on a GPU the host would drive a
    loop. A run's effect must be linear, S' = product(keep, S) + add with an associative `product`,
    so that effects compose (Blelloch, 1990).

    Returns:
        The state before each run, and the states of the rows at `runs.ends`.
    """
    row_n, first_n = owners(runs)
    given_n = jnp.take(state_R, row_n, axis=0, mode="clip")
    first = first_n.reshape(-1, *(1,) * (state_R.ndim - 1))
    add_n = jnp.where(first, product(keep_n, given_n) + add_n, add_n)

    def then(
        one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        anew, keep, add = other
        return (
            one[0] | anew,
            jnp.where(anew, keep, product(keep, one[1])),
            jnp.where(anew, add, product(keep, one[2]) + add),
        )

    _, _, after_n = lax.associative_scan(then, (first, keep_n, add_n))
    earlier_n = jnp.concatenate([jnp.zeros_like(after_n[:1]), after_n[:-1]])
    ended = []
    for end_R in runs.ends:
        last_R = (runs.first_R + end_R - 1) // runs.grain
        some_R = (end_R > 0).reshape(-1, *(1,) * (state_R.ndim - 1))
        ended.append(jnp.where(some_R, jnp.take(after_n, last_R, axis=0, mode="clip"), state_R))
    return jnp.where(first, given_n, earlier_n), jnp.concatenate(ended)

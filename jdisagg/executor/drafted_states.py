"""Recurrent state in a decode step with drafts.

A state cannot be taken back, so a step does not write it before it knows which drafts it accepts.
All rows of a slot are computed from the slot's state at once. After the choice of tokens, the state
is computed again, from the inputs of the accepted rows alone, and written. Between steps, a slot's
state is therefore always that after its tokens: nothing else (snapshots, migration, forks) need
know of drafts.

Every row reads the inputs of the rows before it in the same slot. A slot's rows may be anywhere
among a step's rows, so the inputs are first arranged by slot."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.executor.draft_rows import DraftRows
from jdisagg.executor.page_pool import LayerPages
from jdisagg.executor.state_access import read_states, write_states
from jdisagg.model_api import Advance, Inputs, Recur, Runs


class DraftedStates:
    """The states of one step's recurrent layers. Traced inside the step's program.

    Args:
        slot_B: State slot of each of the step's slots.
    """

    def __init__(self, step: DraftRows, slot_B: jax.Array) -> None:
        self._step, self._slot_B = step, slot_B
        self._settle: list[Callable[[Runs, jax.Array], LayerPages]] = []

    def over(self, pages: LayerPages) -> Recur:
        """Returns the `recur` function of the next layer."""
        step, slot_B = self._step, self._slot_B
        batch, longest = step.index_BQ.shape

        def recur(inputs: Inputs, advance: Advance) -> jax.Array:
            by_slot = tuple(step.by_slot(x).reshape(-1, *x.shape[1:]) for x in inputs)
            runs = self._runs(step.count_B)
            out, _ = advance(by_slot, read_states(pages, slot_B), runs)

            def settle(runs: Runs, slot_B: jax.Array) -> LayerPages:
                _, state = advance(by_slot, read_states(pages, slot_B), runs)
                return write_states(pages, slot_B, state)

            self._settle.append(settle)
            return step.by_row(out.reshape(batch, longest, *out.shape[1:]))

        return recur

    def settled(self, count_B: jax.Array) -> list[LayerPages]:
        """Returns the states of all layers after the first `count_B` rows of each slot."""
        # With the barrier the states are read again. Else XLA would keep those of all layers.
        slot_B, count_B = lax.optimization_barrier((self._slot_B, count_B))
        runs = self._runs(count_B)
        return [settle(runs, slot_B) for settle in self._settle]

    def _runs(self, count_B: jax.Array) -> Runs:
        batch, longest = self._step.index_BQ.shape
        offset_BQ = jnp.broadcast_to(jnp.arange(longest, dtype=jnp.int32), (batch, longest))
        there_BQ = offset_BQ < count_B[:, None]
        row_B = jnp.arange(batch, dtype=jnp.int32)
        return Runs(
            row_T=jnp.where(there_BQ, row_B[:, None], -1).reshape(-1),
            index_T=jnp.where(there_BQ, offset_BQ, -1).reshape(-1),
            first_R=row_B * longest,
            count_R=count_B,
            grain=longest,
            short=True,
        )

"""Rows of a decode step in which a slot computes several tokens: its own, and drafts after it.

The step computes the slot's token and its drafts at successive positions. It chooses the model's
own token at each of these positions, and keeps them up to the first one that differs from the draft
(verification). The choice depends on logits, seed, child and position alone, so that a stream is
the same with and without drafts. KV of rejected drafts lies after the slot's new position. This KV
is not read, and is overwritten later."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.executor.choose import Chosen
from jdisagg.executor.slot_state import BatchRows, RowFormat
from jdisagg.messages.step_commands import NO_TOKEN
from jdisagg.scheduler.speculation import rows_before_snapshot

Slots = tuple[tuple[int, ...], ...]


class Guess(NamedTuple):
    """Predicted tokens of one slot.

    Attributes:
        tokens: Tokens of successive positions. Empty for the drafts of the mesh itself.
        count: Number of extra rows of the slot, the largest number of drafts that it verifies.
    """

    start: int
    tokens: tuple[int, ...]
    count: int


Guesses = Mapping[tuple[int, int], Guess]  # by (rank, index of the row among the rank's slots)


@dataclass(frozen=True)
class DraftPlan:
    """The extra rows of a step.

    Attributes:
        array: int32 [ranks, 2 E + B * (1 + G)], for B slots, E extra rows and G guessed tokens of
            each slot. For each extra row: the slot's row (B if the extra row is unused) and the
            offset from the slot's position. For each slot's row: the position of its first guessed
            token, and the guessed tokens (-1 for none).
    """

    array: np.ndarray
    first: Mapping[tuple[int, int], int]

    @staticmethod
    def of(guesses: Guesses, ranks: int, rows: int, extra: int, longest: int) -> "DraftPlan":
        """Packs guesses. They need at most `extra` rows per rank and `longest` - 1 rows per
        slot."""
        array = np.zeros((ranks, 2 * extra + rows * (1 + guessed(longest))), np.int32)
        array[:, :extra] = rows
        by_row = array[:, 2 * extra :].reshape(ranks, rows, -1)
        by_row[:, :, 1:] = -1
        used, first = [0] * ranks, {}
        for (rank, row), guess in guesses.items():
            begin, tokens = used[rank], guess.tokens[: guessed(longest)]
            used[rank] = end = begin + guess.count
            assert end <= extra and guess.count < longest
            array[rank, begin:end] = row
            array[rank, extra + begin : extra + end] = np.arange(1, guess.count + 1)
            by_row[rank, row, 0] = guess.start
            by_row[rank, row, 1 : 1 + len(tokens)] = tokens
            first[rank, row] = rows + begin
        return DraftPlan(array, first)

    def place(self, rank: int, row: int, offset: int) -> int:
        """Returns the index, among the step's rows, of the row that computes the token `offset`
        positions after a slot's own token."""
        return self.first[rank, row] + offset - 1 if offset else row


def guessed(longest: int) -> int:
    """Returns the number of tokens to guess for a slot with up to `longest` rows per step. The
    previous step may still be running, and may accept up to `longest` tokens of the guess
    itself."""
    return 2 * longest - 1


class DraftRows(NamedTuple):
    """A step's rows on one dp rank. Without drafts they are the slots' rows.

    Attributes:
        row_T: Index of each row's slot among the B rows; B if the row is unused.
        index_BQ: Index of each slot's rows, in the order of their positions; B + E for none.
    """

    all: BatchRows
    row_T: jax.Array
    offset_T: jax.Array
    index_BQ: jax.Array

    @staticmethod
    def of(
        rows: RowFormat,
        slot_B: jax.Array,
        plan: jax.Array | None,
        sizes: tuple[int, int],
        hot_S2: jax.Array,
        ints_SI: jax.Array,
        floats_SF: jax.Array,
        drafts_SG: jax.Array | None = None,
    ) -> "DraftRows":
        """Builds a step's rows from a rank's part of `DraftPlan.array`, or from None without
        drafts. `drafts_SG` has the mesh's own drafts of each slot: the position of the first, and
        tokens. They apply to slots without tokens in the plan. `sizes`: the largest number of rows
        of a slot, and the `snapshot_tokens` of recurrent state."""
        own, count = rows.batch(slot_B, hot_S2, ints_SI, floats_SF), slot_B.shape[0]
        own_B = jnp.arange(count, dtype=jnp.int32)
        if plan is None:
            return DraftRows(own, own_B, jnp.zeros_like(own_B), own_B[:, None])
        longest, snapshot_tokens = sizes
        width = guessed(longest)
        extra = (plan.shape[0] - count * (1 + width)) // 2
        guess_BG = plan[2 * extra :].reshape(count, 1 + width)
        if drafts_SG is not None:
            padding = ((0, 0), (0, 1 + width - drafts_SG.shape[1]))
            ours_BG = jnp.take(drafts_SG, slot_B, axis=0, mode="clip")
            ours_BG = jnp.pad(ours_BG, padding, constant_values=-1)
            guess_BG = jnp.where(guess_BG[:, 1:2] >= 0, guess_BG, ours_BG)
        row_T = jnp.concatenate((own_B, plan[:extra]))
        offset_T = jnp.concatenate((jnp.zeros_like(own_B), plan[extra : 2 * extra]))
        taken: BatchRows = jax.tree.map(lambda x: jnp.take(x, row_T, axis=0, mode="clip"), own)
        guess_TG = jnp.take(guess_BG, row_T, axis=0, mode="clip")
        position_T = taken.position + offset_T
        at_T = position_T - guess_TG[:, 0]
        token_T = jnp.take_along_axis(
            guess_TG[:, 1:], jnp.clip(at_T, 0, width - 1)[:, None], axis=1
        )[:, 0]
        used_T = row_T < count
        drafted_T = (at_T >= 0) & (at_T < width) & (token_T >= 0)
        limit_T, _ = rows.limit_and_table(taken.ints)
        drafted_T &= offset_T < rows_before_snapshot(taken.position, snapshot_tokens)
        every = taken._replace(
            token=jnp.where(offset_T == 0, taken.token, token_T),
            position=position_T,
            active=taken.active & used_T & ((offset_T == 0) | (drafted_T & (position_T < limit_T))),
        )
        tokens = count + extra
        index_BQ = jnp.full((count, longest), tokens, jnp.int32)
        index_BQ = index_BQ.at[row_T, offset_T].set(
            jnp.arange(tokens, dtype=jnp.int32), mode="drop"
        )
        return DraftRows(every, row_T, offset_T, index_BQ)

    @property
    def drafts(self) -> bool:
        return self.index_BQ.shape[1] > 1

    @property
    def positions_BQ(self) -> jax.Array:
        """A row that is missing or computes no token has the position of the slot."""
        at_BQ = self.by_slot(self.all.at)
        return jnp.where(self._active_BQ, at_BQ, at_BQ[:, :1])

    @property
    def _active_BQ(self) -> jax.Array:
        there_BQ = self.index_BQ < self.row_T.shape[0]
        return there_BQ & self.by_slot(self.all.active)

    @property
    def count_B(self) -> jax.Array:
        """Number of rows of each slot that follow one another from its own row on."""
        return jnp.cumprod(self._active_BQ, axis=1, dtype=jnp.int32).sum(1, dtype=jnp.int32)

    def by_slot(self, x_T: jax.Array) -> jax.Array:
        """Arranges values [T, ...] of the rows by slot: [B, Q, ...]."""
        return jnp.take(x_T, self.index_BQ, axis=0, mode="clip")

    def by_row(self, x_BQ: jax.Array) -> jax.Array:
        flat = x_BQ.reshape(-1, *x_BQ.shape[2:])
        place_T = self.row_T * self.index_BQ.shape[1] + self.offset_T
        return jnp.take(flat, place_T, axis=0, mode="clip")

    def counts(self, counts_SV: jax.Array) -> jax.Array:
        """Returns the token counts [T, V] before each row's choice, which include the drafts up to
        the row's own token."""
        counts_TV = jnp.take(counts_SV, self.all.slot, axis=0, mode="clip")
        if not self.drafts:
            return counts_TV
        earlier_TQ = jnp.take(self.by_slot(self.all.token)[:, 1:], self.row_T, axis=0, mode="clip")
        offset_Q = jnp.arange(1, self.index_BQ.shape[1], dtype=jnp.int32)
        counted_TQ = (offset_Q[None, :] <= self.offset_T[:, None]) & self.all.active[:, None]
        row_T1 = jnp.arange(self.row_T.shape[0], dtype=jnp.int32)[:, None]
        nothing = counts_TV.shape[1]
        return counts_TV.at[row_T1, jnp.where(counted_TQ, earlier_TQ, nothing)].add(1, mode="drop")

    def counted(self, counts_SV: jax.Array, token_BQ: jax.Array) -> jax.Array:
        at_BQ = jnp.where(token_BQ >= 0, token_BQ, counts_SV.shape[1])
        slot_B = self.all.slot[: len(token_BQ)]  # the slots' own rows come first
        slot_BQ = jnp.broadcast_to(slot_B[:, None], at_BQ.shape)
        return counts_SV.at[slot_BQ, at_BQ].add(1, mode="drop")

    def accept(self, chosen: Chosen, hot_S2: jax.Array) -> tuple[Chosen, jax.Array]:
        """Verifies the drafts.

        Returns:
            The choice by slot, [B, Q]: the tokens up to the first that differs from its draft, and
                NO_TOKEN after it.
            The new `hot`: token and position of each slot.
        """
        if not self.drafts:
            hot_S2 = self.all.advance(hot_S2, chosen.token)
            return jax.tree.map(lambda x: x[:, None], chosen), hot_S2
        token_BQ = self.by_slot(chosen.token)
        right_BQ = self._active_BQ[:, 1:] & (
            self.by_slot(self.all.token)[:, 1:] == token_BQ[:, :-1]
        )
        accepted_B = jnp.cumprod(right_BQ, axis=1, dtype=jnp.int32).sum(1, dtype=jnp.int32)
        offset_1Q = jnp.arange(token_BQ.shape[1], dtype=jnp.int32)[None, :]
        token_BQ = jnp.where(offset_1Q <= accepted_B[:, None], token_BQ, NO_TOKEN)
        last_B = jnp.take_along_axis(self.index_BQ, accepted_B[:, None], axis=1)[:, 0]
        last: BatchRows = jax.tree.map(lambda x: jnp.take(x, last_B, axis=0), self.all)
        hot_S2 = last.advance(hot_S2, jnp.take(chosen.token, last_B, axis=0))
        return Chosen(token_BQ, self.by_slot(chosen.scores)), hot_S2

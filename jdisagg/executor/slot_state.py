"""Defines how the state of decode slots is packed into a few arrays.

Each dp rank and slot has one row in each of four arrays. `hot` int32 [2] (current token and its
position) changes every step. `ints` and `floats` (limits, sampling parameters, stop and bias ids,
page table) change on admission and growth. `counts` int32 [V] counts each token in the sequence,
for penalties."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.messages.step_commands import SampleSpec
from jdisagg.ops.logit_shaping import ShapingRows, token_counts
from jdisagg.ops.sampling import SamplingRows
from jdisagg.request import INT32, MAX_EOS_IDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams

STOP_COLUMNS = MAX_STOP_TOKEN_IDS + MAX_EOS_IDS  # the caller's and the model's own
_LIMIT, _TOP_K, _SEED, _CHILD, _MIN_POSITION, _STATE, _SHIFT = 0, 1, 2, 4, 5, 6, 7
_FEATURES, _TABLE = 8, 9
_FLOATS = 6
# Bits of a row's features: random sampling, shaped logits, log-probabilities, a grammar. A program
# computes a feature only if a row has its bit.
DRAWN, SHAPED, SCORED, MASKED = 1, 2, 4, 8


@dataclass(frozen=True)
class RowFormat:
    """Column layout of `ints` and `floats`, for page tables of `table_columns` entries. With
    `adapters` the last column of `ints` is the row's adapter slot. With `spatial` the rotary
    position of a token after an image differs from its index."""

    table_columns: int
    vocabulary: int
    adapters: bool = False
    spatial: bool = False

    @property
    def ints(self) -> int:
        return self._bias_columns.stop + self.adapters

    @property
    def floats(self) -> int:
        return _FLOATS + MAX_LOGIT_BIAS

    def pack(
        self,
        ints: np.ndarray,
        floats: np.ndarray,
        spec: SampleSpec,
        pages: Iterable[int] = (),
        limit: int = 0,
        state: int = 0,
        shift: int = 0,
    ) -> None:
        """Fills one slot's rows `ints` [I] and `floats` [F] in place."""
        params = spec.sampling
        # With a grammar, the grammar's mask determines when stop ids are allowed.
        min_position = min(spec.min_position, INT32) if params.grammar is None else 0
        features = _features(params)
        ints[:_TABLE] = limit, params.top_k, 0, 0, spec.child, min_position, state, shift, features
        ints[_SEED : _SEED + 2] = np.array(
            [params.seed & 0xFFFFFFFF, params.seed >> 32], np.uint32
        ).view(np.int32)
        self.pack_pages(ints, pages, limit)
        stops, biases = self._stop_columns, self._bias_columns
        ints[stops] = -1
        ints[stops][: len(spec.stop_ids)] = spec.stop_ids
        ints[biases] = -1
        floats[:] = 0
        floats[:_FLOATS] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        )
        for column, (token_id, bias) in enumerate(params.logit_bias):
            ints[biases.start + column] = token_id
            floats[_FLOATS + column] = bias

    def pack_adapter(self, ints: np.ndarray, slot: int) -> None:
        if self.adapters:
            ints[-1] = slot

    def adapter(self, ints_BI: jax.Array) -> jax.Array:
        return ints_BI[:, -1]

    def pack_pages(self, ints: np.ndarray, pages: Iterable[int], limit: int) -> None:
        ints[_LIMIT] = limit
        row = tuple(pages)
        ints[_TABLE : _TABLE + self.table_columns] = 0
        ints[_TABLE : _TABLE + len(row)] = row

    def pack_history(self, spec: SampleSpec) -> np.ndarray:
        """Returns one row of `counts`, int32 [V], computed from the sequence's tokens."""
        return token_counts(spec.prompt_history, spec.output_history, self.vocabulary)

    def limit_and_table(self, ints_BI: jax.Array) -> tuple[jax.Array, jax.Array]:
        return ints_BI[:, _LIMIT], ints_BI[:, _TABLE : _TABLE + self.table_columns]

    def state(self, ints_BI: jax.Array) -> jax.Array:
        return ints_BI[:, _STATE]

    def features(self, ints_BI: jax.Array) -> jax.Array:
        return ints_BI[:, _FEATURES]

    def turned(self, rows: "BatchRows") -> jax.Array:
        """Returns the rotary position of each row, int32 [B]."""
        return rows.at + rows.ints[:, _SHIFT] if self.spatial else rows.at

    def sampling(
        self, ints_BI: jax.Array, floats_BF: jax.Array, position_B: jax.Array
    ) -> SamplingRows:
        return SamplingRows(
            temperature=floats_BF[:, 0],
            top_k=ints_BI[:, _TOP_K],
            top_p=floats_BF[:, 1],
            min_p=floats_BF[:, 2],
            seed=jax.lax.bitcast_convert_type(ints_BI[:, _SEED : _SEED + 2], jnp.uint32),
            child=ints_BI[:, _CHILD],
            position=position_B,
        )

    def batch(
        self, slot_B: jax.Array, hot_S2: jax.Array, ints_SI: jax.Array, floats_SF: jax.Array
    ) -> "BatchRows":
        """A row with an out-of-range slot number is inactive."""
        ints_BI = jnp.take(ints_SI, slot_B, axis=0, mode="clip")
        token_B, position_B = jnp.take(hot_S2, slot_B, axis=0, mode="clip").T
        return BatchRows(
            slot=slot_B,
            ints=ints_BI,
            floats=jnp.take(floats_SF, slot_B, axis=0, mode="clip"),
            token=token_B,
            position=position_B,
            active=(slot_B < hot_S2.shape[0]) & (position_B < ints_BI[:, _LIMIT]),
        )

    def shaping(self, ints_BI: jax.Array, floats_BF: jax.Array) -> ShapingRows:
        return ShapingRows(
            presence=floats_BF[:, 3],
            frequency=floats_BF[:, 4],
            repetition=floats_BF[:, 5],
            bias_ids=ints_BI[:, self._bias_columns],
            bias_values=floats_BF[:, _FLOATS:],
            stop_ids=ints_BI[:, self._stop_columns],
            min_position=ints_BI[:, _MIN_POSITION],
        )

    @property
    def _stop_columns(self) -> slice:
        first = _TABLE + self.table_columns
        return slice(first, first + STOP_COLUMNS)

    @property
    def _bias_columns(self) -> slice:
        return slice(self._stop_columns.stop, self._stop_columns.stop + MAX_LOGIT_BIAS)


def _features(params: SamplingParams) -> int:
    drawn, shaped = (not params.greedy) * DRAWN, params.shaped * SHAPED
    scored = (params.logprobs is not None) * SCORED
    return drawn | shaped | scored | (params.grammar is not None) * MASKED


class BatchRows(NamedTuple):
    """Only `active` rows compute a token."""

    slot: jax.Array  # int32 [B]
    ints: jax.Array  # int32 [B, I]
    floats: jax.Array  # float32 [B, F]
    token: jax.Array  # int32 [B]
    position: jax.Array  # int32 [B]: of `token`
    active: jax.Array  # bool [B]

    @property
    def at(self) -> jax.Array:
        """Position of each row, int32 [B]. 0 for inactive rows."""
        return jnp.where(self.active, self.position, 0)

    def advance(self, hot_S2: jax.Array, chosen_B: jax.Array) -> jax.Array:
        next_B2 = jnp.stack(
            (
                jnp.where(self.active, chosen_B, self.token),
                self.position + self.active.astype(jnp.int32),
            ),
            axis=1,
        )
        return hot_S2.at[self.slot].set(next_B2, mode="drop")

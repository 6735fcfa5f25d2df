"""Chooses each row's next token from its logits, on the device.

Rows are independent: a token is a function of the row's own logits, parameters and coordinates
(`randomness`). Logits are float32 [B, V_padded]. Padded columns are -inf and never chosen.

Sampling is the Gumbel-max rule, written as a race: with w = exp((logit - max) / temperature) and
exponential noise e, the argmax of w / e over a set is a draw from w on that set (-log e is Gumbel
noise, and this form saves a logarithm). Filters apply in the order temperature, top-k, top-p (on
the renormalised probabilities that top-k leaves), min-p. They keep these sets:
- top-k: the `top_k` tokens of the largest logits, and all that tie with the last of them;
- top-p: tokens for which the probability of all strictly larger logits is below top_p (ties are
  kept or dropped together);
- min-p: tokens with at least `min_p` times the probability of the most likely one.

The most likely token is in all of them. Nothing is sorted: top-p uses rejection under fixed noise.
If the winner over a superset of the nucleus lies in the nucleus, it is also the winner over the
nucleus. If not, no token with a smaller or equal logit lies in the nucleus either, so these tokens
are removed and the race is repeated over the rest.

Argmax ties go to the smallest id. A row without a finite largest logit (a NaN or +inf anywhere, or
-inf everywhere) gives INVALID_TOKEN and affects no other row."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdisagg.layout.platforms import traits_of
from jdisagg.ops import randomness, selection

INVALID_TOKEN = -1
SMALL_TOP_K = 64
_LEAST_TEMPERATURE = np.float32(1e-6)
_LEAST_TOP_P = np.float32(1e-30)
_RERUN_ROWS = 4


class SamplingRows(NamedTuple):
    """Sampling parameters of each row, as in `request.SamplingParams`. Temperature 0 means greedy
    decoding, and top_k 0 means no top-k filter. `position` is the index in the sequence of the
    token to choose."""

    temperature: jax.Array  # float32 [B]
    top_k: jax.Array  # int32 [B]
    top_p: jax.Array  # float32 [B]
    min_p: jax.Array  # float32 [B]
    seed: jax.Array  # uint32 [B, 2]: low word, high word
    child: jax.Array  # int32 [B]
    position: jax.Array  # int32 [B]


def greedy(logits_BV: jax.Array, *, platform: str = "cpu") -> jax.Array:
    """Returns the id of each row's largest logit, int32 [B], ties to the smallest id. Returns
    INVALID_TOKEN for a row whose largest logit is not finite."""
    logits_BV = _nan_to_inf(logits_BV)
    token_B = selection.argmax(logits_BV, in_blocks=traits_of(platform).argmax_in_blocks)
    return jnp.where(jnp.isfinite(_at(logits_BV, token_B)), token_B, INVALID_TOKEN)


def sample(logits_BV: jax.Array, rows: SamplingRows, *, platform: str = "cpu") -> jax.Array:
    """Returns each row's token, int32 [B]: the most likely one if the temperature is 0, and
    otherwise sampled under the row's filters. Deterministic for given coordinates. Works under jit
    and in `shard_map`.

    On a GPU, top-k and top-p find their thresholds by a fixed number of passes
    (`selection.last_value`) instead of loops with early exit."""
    largest_B = jnp.max(_nan_to_inf(logits_BV), axis=-1)
    valid_B = jnp.isfinite(largest_B)
    greedy_B = rows.temperature == 0
    drawn_B = valid_B & ~greedy_B

    scale_B = jnp.where(greedy_B, 1, 1 / jnp.maximum(rows.temperature, _LEAST_TEMPERATURE))
    weight_BV = jnp.exp((logits_BV - largest_B[:, None]) * scale_B[:, None])
    keys = randomness.row_keys(rows.seed, rows.child, rows.position)
    bits_BV = randomness.random_bits(keys, logits_BV.shape[1])
    traits = traits_of(platform)
    top_k_B = jnp.where(drawn_B, rows.top_k, 0)
    threshold_B = (
        _top_k_by_passes(logits_BV, top_k_B)
        if traits.without_loops
        else _top_k_threshold(logits_BV, top_k_B)
    )
    weight_BV = jnp.where(logits_BV >= threshold_B[:, None], weight_BV, 0)
    drawn_score_BV = jnp.where(
        weight_BV >= rows.min_p[:, None], weight_BV / randomness.exponential(bits_BV), -1
    )
    # A greedy row takes part in the same race with its logits as the score, so that one argmax
    # serves all rows.
    score_BV = jnp.where(greedy_B[:, None], logits_BV, drawn_score_BV)
    top_p_B = jnp.where(drawn_B, rows.top_p, 1)
    if traits.without_loops:
        bound_B = _nucleus_by_passes(logits_BV, weight_BV, top_p_B)
        inside_BV = (logits_BV > bound_B[:, None]) | (top_p_B == 1)[:, None]
        score_BV = jnp.where(inside_BV, score_BV, -1)
        token_B = selection.argmax(score_BV, in_blocks=traits.argmax_in_blocks)
    else:
        first_B = selection.argmax(score_BV, in_blocks=traits.argmax_in_blocks)
        token_B = _in_nucleus(first_B, score_BV, logits_BV, weight_BV, top_p_B)
    return jnp.where(valid_B, token_B, INVALID_TOKEN)


def _top_k_by_passes(logits_BV: jax.Array, top_k_B: jax.Array) -> jax.Array:
    """Computes the same threshold as `_top_k_threshold` by a fixed number of passes, without a
    loop."""

    def kth() -> jax.Array:
        def reached(values: Sequence[jax.Array]) -> list[jax.Array]:
            at_least = [(logits_BV >= value_B[:, None]).astype(jnp.int32) for value_B in values]
            return [count_B >= top_k_B for count_B in selection.row_sums(at_least)]

        value_B = selection.last_value(reached, len(top_k_B))
        # XLA computes both branches of a `cond` that only reduce and map elements, and selects one
        # result. The barrier keeps the condition.
        return lax.optimization_barrier(jnp.where(top_k_B > 0, value_B, -jnp.inf))

    off = lambda: jnp.full(top_k_B.shape, -jnp.inf, logits_BV.dtype)  # noqa: E731
    return lax.cond(jnp.any(top_k_B > 0), kth, off)


def _nucleus_by_passes(logits_BV: jax.Array, weight_BV: jax.Array, top_p_B: jax.Array) -> jax.Array:
    """Returns a threshold, float32 [B], for top-p. The row's nucleus consists of all logits above
    the threshold, which is the largest value above which at least top_p of the weight lies."""

    def bound() -> jax.Array:
        p_B1 = jnp.maximum(top_p_B, _LEAST_TOP_P)[:, None]

        def beyond(values: Sequence[jax.Array]) -> list[jax.Array]:
            shares = [
                jnp.where(logits_BV > value_B[:, None], 1 - p_B1, -p_B1) * weight_BV
                for value_B in values
            ]
            return [share_B >= 0 for share_B in selection.row_sums(shares)]

        return lax.optimization_barrier(selection.last_value(beyond, len(top_p_B)))

    off = lambda: jnp.full(top_p_B.shape, -jnp.inf, logits_BV.dtype)  # noqa: E731
    return lax.cond(jnp.any(top_p_B < 1), bound, off)


def _top_k_threshold(logits_BV: jax.Array, top_k_B: jax.Array) -> jax.Array:
    small = min(SMALL_TOP_K, logits_BV.shape[1])
    small_B = (top_k_B > 0) & (top_k_B <= small)

    def of_the_largest() -> jax.Array:
        values_BK, _ = selection.largest(logits_BV, small)
        return jnp.take_along_axis(values_BK, jnp.clip(top_k_B - 1, 0, small - 1)[:, None], axis=1)[
            :, 0
        ]

    kth_B = lax.cond(
        jnp.any(small_B), of_the_largest, lambda: jnp.full_like(logits_BV[:, 0], -jnp.inf)
    )
    large_B = (top_k_B > small) & (top_k_B < logits_BV.shape[1])
    separating_B = selection.separating_value(logits_BV, jnp.maximum(top_k_B, 1), large_B)
    return jnp.where(small_B, kth_B, separating_B)


def _in_nucleus(
    first_B: jax.Array,
    score_BV: jax.Array,
    logits_BV: jax.Array,
    weight_BV: jax.Array,
    top_p_B: jax.Array,
) -> jax.Array:
    """Few rows reject their first winner, so the choice is repeated for only _RERUN_ROWS rows at a
    time."""

    def race() -> jax.Array:
        bound_B = _at(logits_BV, first_B)
        waiting_B = (top_p_B < 1) & _outside(logits_BV, weight_BV, bound_B, top_p_B)

        def rerun(state: _Race) -> _Race:
            _, rows_R = lax.top_k(
                state.waiting_B.astype(jnp.int32), min(_RERUN_ROWS, top_p_B.shape[0])
            )
            logits_RV, weight_RV, score_RV = logits_BV[rows_R], weight_BV[rows_R], score_BV[rows_R]
            waiting_R, bound_R = state.waiting_B[rows_R], state.bound_B[rows_R]
            token_R = selection.argmax(jnp.where(logits_RV > bound_R[:, None], score_RV, -1))
            bound_R = _at(logits_RV, token_R)
            outside_R = _outside(logits_RV, weight_RV, bound_R, top_p_B[rows_R])
            return _Race(
                state.token_B.at[rows_R].set(jnp.where(waiting_R, token_R, state.token_B[rows_R])),
                state.bound_B.at[rows_R].set(bound_R),
                state.waiting_B.at[rows_R].set(waiting_R & outside_R),
            )

        return lax.while_loop(
            lambda state: jnp.any(state.waiting_B), rerun, _Race(first_B, bound_B, waiting_B)
        ).token_B

    return lax.cond(jnp.any(top_p_B < 1), race, lambda: first_B)


class _Race(NamedTuple):
    token_B: jax.Array
    bound_B: jax.Array  # the token's logit
    waiting_B: jax.Array  # whether the token lies outside the nucleus


def _outside(
    logits_BV: jax.Array, weight_BV: jax.Array, bound_B: jax.Array, top_p_B: jax.Array
) -> jax.Array:
    """The condition larger >= p * total is computed as (1 - p) * larger - p * rest >= 0, which
    needs one sum only. p * rest must not underflow, so that the most likely token is always
    inside."""
    p_B1 = jnp.maximum(top_p_B, _LEAST_TOP_P)[:, None]
    return (
        jnp.sum(jnp.where(logits_BV > bound_B[:, None], 1 - p_B1, -p_B1) * weight_BV, axis=-1) >= 0
    )


def _nan_to_inf(x_BV: jax.Array) -> jax.Array:
    """Maps NaN to inf, so that a maximum over the row is not finite. XLA's vectorised maximum on
    CPU may ignore a NaN."""
    return jnp.where(jnp.isnan(x_BV), jnp.inf, x_BV)


def _at(x_BV: jax.Array, index_B: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BV, index_B[:, None], axis=1)[:, 0]

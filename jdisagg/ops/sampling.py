"""Chooses each row's next token from its logits, on the device.

Rows are independent: a token is a function of the row's own logits, parameters and coordinates
(`randomness`). Logits are float32 [B, V_padded]. Padded columns are -inf and never chosen.

Sampling is the Gumbel-max rule, written as a race: with w = exp((logit - max) / temperature) and
exponential noise e, the argmax of w / e over a set is a draw from w on that set (-log e is Gumbel
noise, and this form saves a logarithm). Filters apply in the order temperature, top-k, top-p (on
the renormalised probabilities that top-k leaves), min-p. They keep these sets:
- top-k: the `top_k` tokens of the largest logits, and all that tie with the last of them;
- top-p: tokens for which the probability of all strictly larger logits is below top_p (ties are
  kept or dropped together). Probabilities are summed as integers, 2^29 to 2^30 for all tokens,
  so that no order of summation changes a token;
- min-p: tokens with at least `min_p` times the probability of the most likely one.

The most likely token is in all of them. Nothing is sorted: top-p uses rejection under fixed noise.
If the winner over a superset of the nucleus lies in the nucleus, it is also the winner over the
nucleus. If not, no token with a smaller or equal logit lies in the nucleus either, so these tokens
are removed and the race is repeated over the rest.

Argmax ties go to the smallest id. A row without a finite largest logit (a NaN or +inf anywhere, or
-inf everywhere) gives INVALID_TOKEN and affects no other row."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdisagg.layout.platforms import traits_of
from jdisagg.ops import filtered_draw_pallas, randomness, selection
from jdisagg.ops.filtered_draw_pallas import needed_shares, shares, unit_of

INVALID_TOKEN = -1
SMALL_TOP_K = 64
_LEAST_TEMPERATURE = np.float32(1e-6)
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

    @classmethod
    def unfiltered(cls, count: int, temperature: float) -> "SamplingRows":
        """Returns rows without filters, each a child and position of its own."""
        row_B = jnp.arange(count, dtype=jnp.int32)
        return cls(
            temperature=jnp.full(count, temperature, jnp.float32),
            top_k=jnp.zeros(count, jnp.int32),
            top_p=jnp.ones(count, jnp.float32),
            min_p=jnp.zeros(count, jnp.float32),
            seed=jnp.zeros((count, 2), jnp.uint32),
            child=row_B,
            position=row_B,
        )


def greedy(logits_BV: jax.Array, *, platform: str = "cpu") -> jax.Array:
    """Returns the id of each row's largest logit, int32 [B], ties to the smallest id. Returns
    INVALID_TOKEN for a row whose largest logit is not finite."""
    logits_BV = _nan_to_inf(logits_BV)
    token_B = selection.argmax(logits_BV, in_blocks=traits_of(platform).argmax_in_blocks)
    return jnp.where(jnp.isfinite(_at(logits_BV, token_B)), token_B, INVALID_TOKEN)


def sample(
    logits_BV: jax.Array, rows: SamplingRows, *, platform: str = "cpu", interpret: bool = False
) -> jax.Array:
    """Returns each row's token, int32 [B]: the most likely one if the temperature is 0, and
    otherwise sampled under the row's filters. Deterministic for given coordinates. Works under jit
    and in `shard_map`.

    On a GPU, a kernel applies top-k and top-p (`filtered_draw_pallas`), and runs only if a row has
    one of them. `interpret` runs it on a CPU, for tests."""
    largest_B = jnp.max(_nan_to_inf(logits_BV), axis=-1)
    valid_B = jnp.isfinite(largest_B)
    greedy_B = rows.temperature == 0
    drawn_B = valid_B & ~greedy_B
    top_k_B, top_p_B = jnp.where(drawn_B, rows.top_k, 0), jnp.where(drawn_B, rows.top_p, 1)

    scale_B = jnp.where(greedy_B, 1, 1 / jnp.maximum(rows.temperature, _LEAST_TEMPERATURE))
    keys = randomness.row_keys(rows.seed, rows.child, rows.position)
    traits = traits_of(platform)

    def weights() -> jax.Array:
        return jnp.exp((logits_BV - largest_B[:, None]) * scale_B[:, None])

    def scores(weight_BV: jax.Array) -> jax.Array:
        """A greedy row takes part in the same race with its logits as the score, so that one argmax
        serves all rows."""
        noise_BV = randomness.exponential(randomness.random_bits(keys, logits_BV.shape[1]))
        drawn_BV = jnp.where(weight_BV >= rows.min_p[:, None], weight_BV / noise_BV, -1)
        return jnp.where(greedy_B[:, None], logits_BV, drawn_BV)

    def winner(weight_BV: jax.Array) -> jax.Array:
        return selection.argmax(scores(weight_BV), in_blocks=traits.argmax_in_blocks)

    def filtered() -> jax.Array:
        arrays = logits_BV, scores(weights()), largest_B, scale_B, top_k_B, top_p_B
        return filtered_draw_pallas.filtered_draw(*arrays, interpret=interpret)

    if traits.kernels == "gpu" and filtered_draw_pallas.applies():
        # Weights are computed in each branch, where they need no memory unless rows have filters.
        token_B = lax.cond(
            jnp.any((top_k_B > 0) | (top_p_B < 1)), filtered, lambda: winner(weights())
        )
    else:
        threshold_B = _top_k_threshold(logits_BV, top_k_B)
        weight_BV = jnp.where(logits_BV >= threshold_B[:, None], weights(), 0)
        score_BV = scores(weight_BV)
        first_B = selection.argmax(score_BV, in_blocks=traits.argmax_in_blocks)
        token_B = _in_nucleus(first_B, score_BV, logits_BV, weight_BV, top_p_B)
    return jnp.where(valid_B, token_B, INVALID_TOKEN)


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
        unit_B1 = unit_of(jnp.sum(weight_BV, axis=-1))[:, None]
        share_BV = shares(weight_BV, unit_B1)
        needed_B = needed_shares(top_p_B, jnp.sum(share_BV, axis=-1))
        bound_B = _at(logits_BV, first_B)
        waiting_B = (top_p_B < 1) & _outside(logits_BV, share_BV, bound_B, needed_B)

        def rerun(state: _Race) -> _Race:
            _, rows_R = lax.top_k(
                state.waiting_B.astype(jnp.int32), min(_RERUN_ROWS, top_p_B.shape[0])
            )
            logits_RV, share_RV, score_RV = logits_BV[rows_R], share_BV[rows_R], score_BV[rows_R]
            waiting_R, bound_R = state.waiting_B[rows_R], state.bound_B[rows_R]
            token_R = selection.argmax(jnp.where(logits_RV > bound_R[:, None], score_RV, -1))
            bound_R = _at(logits_RV, token_R)
            outside_R = _outside(logits_RV, share_RV, bound_R, needed_B[rows_R])
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
    logits_BV: jax.Array, share_BV: jax.Array, bound_B: jax.Array, needed_B: jax.Array
) -> jax.Array:
    return jnp.sum(jnp.where(logits_BV > bound_B[:, None], share_BV, 0), axis=-1) >= needed_B


def _nan_to_inf(x_BV: jax.Array) -> jax.Array:
    """Maps NaN to inf, so that a maximum over the row is not finite. XLA's vectorised maximum on
    CPU may ignore a NaN."""
    return jnp.where(jnp.isnan(x_BV), jnp.inf, x_BV)


def _at(x_BV: jax.Array, index_B: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BV, index_B[:, None], axis=1)[:, 0]

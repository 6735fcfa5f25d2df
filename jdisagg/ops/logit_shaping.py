"""Adjusts logits before a token is chosen (penalties, bias, min_tokens), and computes
log-probabilities of the adjusted logits.

The order is vLLM's, so that equal parameters give equal distributions. First come logit bias, then
repetition, frequency and presence penalty. Next, stop ids are set to -inf while fewer than
min_tokens tokens were generated. Last, ids that a grammar forbids are set to -inf.

- repetition (Hugging Face; tokens of prompt or output): logit / r if positive, else logit * r
- frequency and presence (OpenAI; generated tokens): logit - frequency * count - presence * (count >
  0)
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.ops import selection

PROMPT_BIT = 1 << 30


class ShapingRows(NamedTuple):
    """Parameters of each row of logits. Lists of ids are padded with -1 and may have width 0.

    A row's `token_counts` hold how often each id was generated, plus PROMPT_BIT for ids of the
    prompt. `stop_ids` are masked while `position < min_position`, where `min_position` is the
    prompt's length + min_tokens.
    """

    presence: jax.Array  # float32 [B]
    frequency: jax.Array  # float32 [B]
    repetition: jax.Array  # float32 [B]
    bias_ids: jax.Array  # int32 [B, M]
    bias_values: jax.Array  # float32 [B, M]
    stop_ids: jax.Array  # int32 [B, M']
    min_position: jax.Array  # int32 [B]


def shape_logits(
    logits_BV: jax.Array, rows: ShapingRows, token_counts_BV: jax.Array, position_B: jax.Array
) -> jax.Array:
    """Applies bias, penalties and min_tokens. Returns logits, float32 [B, V_padded], from which
    tokens are chosen and log-probabilities are computed."""
    logits_BV = _scatter(logits_BV, rows.bias_ids).add(rows.bias_values, mode="drop")

    generated_BV = token_counts_BV & (PROMPT_BIT - 1)
    repetition_B1 = rows.repetition[:, None]
    repeated_BV = jnp.where(logits_BV > 0, logits_BV / repetition_B1, logits_BV * repetition_B1)
    logits_BV = jnp.where(token_counts_BV > 0, repeated_BV, logits_BV)
    logits_BV = logits_BV - rows.frequency[:, None] * generated_BV.astype(jnp.float32)
    logits_BV = logits_BV - jnp.where(generated_BV > 0, rows.presence[:, None], 0)

    masked_ids = jnp.where((position_B < rows.min_position)[:, None], rows.stop_ids, -1)
    return _scatter(logits_BV, masked_ids).set(-jnp.inf, mode="drop")


def mask_logits(logits_BV: jax.Array, mask_BW: jax.Array) -> jax.Array:
    """Sets logits to -inf at ids whose bit is 0.

    Args:
        mask_BW: uint32 [B, ceil(V / 32)]. The first id is the lowest bit of the first word.
    """
    id_V = jnp.arange(logits_BV.shape[1], dtype=jnp.uint32)
    # Not by `jnp.repeat`, which sums a constant: for a GPU, XLA folds this sum for 14 s.
    words_BW32 = jnp.broadcast_to(mask_BW[:, :, None], (*mask_BW.shape, 32))
    words_BV = words_BW32.reshape(mask_BW.shape[0], -1)
    bits_BV = words_BV[:, : logits_BV.shape[1]] >> (id_V & 31)[None] & 1
    return jnp.where(bits_BV > 0, logits_BV, -jnp.inf)


def logprobs(
    logits_BV: jax.Array, token_B: jax.Array, top: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns natural-log probabilities of `token` [B], and the ids and log-probabilities [B, top]
    of the `top` most likely tokens in descending order, ties by id.

    `logits` must be the result of `shape_logits`, before temperature and filters. An invalid token
    gives NaN."""
    values_BK, ids_BK = selection.largest(logits_BV, max(top, 1))
    # The maximum is not taken as values_BK[:, :1], because with that slice XLA turns its top-k into
    # a sort, at ten times the cost of this function.
    largest_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
    total_B1 = largest_B1 + jnp.log(
        jnp.sum(jnp.exp(logits_BV - largest_B1), axis=-1, keepdims=True)
    )
    token_B1 = token_B[:, None]
    chosen_B1 = jnp.take_along_axis(logits_BV, jnp.maximum(token_B1, 0), axis=1) - total_B1
    chosen_B = jnp.where(token_B >= 0, chosen_B1[:, 0], jnp.nan)
    return chosen_B, ids_BK[:, :top], values_BK[:, :top] - total_B1


def update_counts(
    token_counts_BV: jax.Array, token_B: jax.Array, generated_B: jax.Array | None = None
) -> jax.Array:
    """Invalid tokens and rows where `generated` is False add nothing. Callers should donate
    `token_counts`."""
    if generated_B is not None:
        token_B = jnp.where(generated_B, token_B, -1)
    return _scatter(token_counts_BV, token_B[:, None]).add(1, mode="drop")


def token_counts(
    prompt_token_ids: Sequence[int], generated_token_ids: Sequence[int], vocabulary: int
) -> np.ndarray:
    """Builds one row's counts of prompt and generated ids on the host: int32 [V]."""
    counts_V = np.bincount(np.asarray(generated_token_ids, np.int64), minlength=vocabulary).astype(
        np.int32
    )
    counts_V[np.asarray(prompt_token_ids, np.int64)] |= PROMPT_BIT
    return counts_V


def _scatter(x_BV: jax.Array, ids_BM: jax.Array):
    """A negative index would wrap around."""
    rows_B1 = jnp.arange(x_BV.shape[0], dtype=jnp.int32)[:, None]
    return x_BV.at[
        jnp.broadcast_to(rows_B1, ids_BM.shape), jnp.where(ids_BM < 0, x_BV.shape[1], ids_BM)
    ]

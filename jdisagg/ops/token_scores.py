"""Scores of given tokens: log-probabilities, ranks and the most likely tokens, from logits whose
vocabulary may be spread over devices.

A token's rank is one more than the number of tokens with a larger logit. Ties among the most likely
go to the smaller id."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.ops import selection


class VocabularyShard(NamedTuple):
    """The part of the vocabulary that a device's logits cover inside `shard_map`: ids from `first`
    on. The other devices along `axes` hold the remaining ids. If `axes` is empty, the logits cover
    the whole vocabulary."""

    axes: tuple[str, ...] = ()
    first: jax.Array | int = 0


WHOLE = VocabularyShard()


class TokenScores(NamedTuple):
    """Log-probability and rank of each token, and the `top` most likely tokens. If the vocabulary
    has fewer than `top` ids, the other entries are -inf."""

    logprob: jax.Array  # float32 [T]
    rank: jax.Array  # int32 [T]
    top_ids: jax.Array  # int32 [T, top]
    top_logprobs: jax.Array  # float32 [T, top]


def token_scores(
    logits_TV: jax.Array, token_T: jax.Array, shard: VocabularyShard, top: int
) -> TokenScores:
    """Computes log-probability and rank of each given token, and the most likely tokens at the
    token's position.

    Args:
        logits_TV: float32 logits for this device's part of the vocabulary. Padding ids have -inf.
        token_T: Tokens to score: int32 ids, numbered over the whole vocabulary.

    Returns:
        Scores of all tokens, equal on every device along `shard.axes`.
    """

    def over_all(reduce: Callable[..., jax.Array], x_T: jax.Array) -> jax.Array:
        return reduce(x_T, shard.axes) if shard.axes else x_T

    width = logits_TV.shape[1]
    local_T = token_T - shard.first
    ours_T = (local_T >= 0) & (local_T < width)
    found_T1 = jnp.take_along_axis(logits_TV, jnp.clip(local_T, 0, width - 1)[:, None], axis=1)
    chosen_T = over_all(lax.pmax, jnp.where(ours_T, found_T1[:, 0], -jnp.inf))
    largest_T = over_all(lax.pmax, jnp.max(logits_TV, axis=-1))
    weights_T = jnp.sum(jnp.exp(logits_TV - largest_T[:, None]), axis=-1)
    total_T = largest_T + jnp.log(over_all(lax.psum, weights_T))
    larger_T = jnp.sum((logits_TV > chosen_T[:, None]).astype(jnp.int32), axis=-1)
    values_TK, ids_TK = _most_likely(logits_TV, shard, top)
    return TokenScores(
        chosen_T - total_T, 1 + over_all(lax.psum, larger_T), ids_TK, values_TK - total_T[:, None]
    )


def _most_likely(
    logits_TV: jax.Array, shard: VocabularyShard, top: int
) -> tuple[jax.Array, jax.Array]:
    values_TK, ids_TK = selection.largest(logits_TV, min(top, logits_TV.shape[1]))
    ids_TK = ids_TK + shard.first
    if shard.axes:
        # Candidates are ordered by device, and hence by id where values are equal.
        values_TK = lax.all_gather(values_TK, shard.axes, axis=1, tiled=True)
        ids_TK = lax.all_gather(ids_TK, shard.axes, axis=1, tiled=True)
        values_TK, place_TK = lax.top_k(values_TK, min(top, values_TK.shape[1]))
        ids_TK = jnp.take_along_axis(ids_TK, place_TK, axis=1)
    missing = ((0, 0), (0, top - values_TK.shape[1]))
    values_TK = jnp.pad(values_TK, missing, constant_values=-jnp.inf)
    return values_TK, jnp.pad(ids_TK, missing)

"""Online softmax of attention, which processes scores block by block.

The state consists of the largest score so far, the sum of exponentials relative to this score, and
the unnormalised weighted sum of values, all float32. Masked scores are `MASKED`, a finite number,
which avoids NaN."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

MASKED = -1e30


class Softmax(NamedTuple):
    """Running state: largest score `top` [..., Q, 1], sum of exponentials `total` [..., Q, 1], and
    weighted sum of values `mixed` [..., Q, H]."""

    top: jax.Array
    total: jax.Array
    mixed: jax.Array


def empty(shape: tuple[int, ...]) -> Softmax:
    rows = (*shape[:-1], 1)
    return Softmax(
        jnp.full(rows, MASKED, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def first(scores: jax.Array, mix: Callable[[jax.Array], jax.Array]) -> Softmax:
    """Returns the state after one block of scores [..., Q, S]. `mix` is a function that multiplies
    softmax weights with the block's values, in float32."""
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    return Softmax(top, weights.sum(-1, keepdims=True), mix(weights))


def fold(state: Softmax, scores: jax.Array, mix: Callable[[jax.Array], jax.Array]) -> Softmax:
    top = jnp.maximum(state.top, scores.max(-1, keepdims=True))
    fade, weights = jnp.exp(state.top - top), jnp.exp(scores - top)
    return Softmax(
        top, state.total * fade + weights.sum(-1, keepdims=True), state.mixed * fade + mix(weights)
    )


def merge(one: Softmax, other: Softmax) -> Softmax:
    top = jnp.maximum(one.top, other.top)
    fades = jnp.exp(one.top - top), jnp.exp(other.top - top)
    return Softmax(
        top,
        one.total * fades[0] + other.total * fades[1],
        one.mixed * fades[0] + other.mixed * fades[1],
    )


def finish(state: Softmax, sinks: jax.Array | None = None) -> jax.Array:
    """Returns the attention output. `sinks`, shaped like `top`, are additional scores in the
    softmax without a value."""
    if sinks is None:
        return state.mixed / state.total
    top = jnp.maximum(state.top, sinks)
    fade = jnp.exp(state.top - top)
    return state.mixed * fade / (state.total * fade + jnp.exp(sinks - top))


def capped(scores: jax.Array, cap: float) -> jax.Array:
    """Bounds scores by `cap` through a tanh (Gemma 2, arXiv 2408.00118). 0 leaves them
    unchanged."""
    return cap * jnp.tanh(scores / cap) if cap else scores


def grouped_sinks(sinks_N: jax.Array | None, heads: int) -> jax.Array | None:
    """Groups the attention sinks of query heads by kv head: float32 [K, G, 1, 1]."""
    if sinks_N is None:
        return None
    return sinks_N.astype(jnp.float32).reshape(heads, -1, 1, 1)


def by_kv_head(q_TNH: jax.Array, batch: int, heads: int) -> jax.Array:
    """Groups queries by sequence and kv head: [B, K, Q * N / K, H], for T = B * Q."""
    tokens, query_heads, width = q_TNH.shape
    groups, per = query_heads // heads, tokens // batch
    if per == 1:
        return q_TNH.reshape(batch, heads, groups, width)
    q_BQKGH = q_TNH.reshape(batch, per, heads, groups, width)
    return q_BQKGH.swapaxes(1, 2).reshape(batch, heads, per * groups, width)


def by_token(mixed_BKGH: jax.Array, q_TNH: jax.Array) -> jax.Array:
    """Inverse of `by_kv_head`: attention outputs [T, N, H], where T and N are those of `q_TNH`."""
    batch, heads, rows, width = mixed_BKGH.shape
    tokens, query_heads, _ = q_TNH.shape
    per = tokens // batch
    if per > 1:
        mixed_BKGH = mixed_BKGH.reshape(batch, heads, per, rows // per, width).swapaxes(1, 2)
    return mixed_BKGH.reshape(tokens, query_heads, width)

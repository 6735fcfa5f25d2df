"""The running softmax of attention: scores arrive block by block, the state is what has been seen
so far.

A state is the largest score, the sum of exponentials relative to it, and the unnormalised mix of
values, all float32. Folding blocks in any order gives the softmax over their union. Masked scores
are `MASKED`, a finite number, so that nothing here gives NaN: a row all of whose scores so far are
masked holds rubbish, which the first real score fades to 0."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

MASKED = -1e30


class Softmax(NamedTuple):
    """top, total: [..., Q, 1]; mixed: [..., Q, H]."""

    top: jax.Array
    total: jax.Array
    mixed: jax.Array


def empty(shape: tuple[int, ...]) -> Softmax:
    """The state before any score, for an output of this shape."""
    rows = (*shape[:-1], 1)
    return Softmax(
        jnp.full(rows, MASKED, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def first(scores: jax.Array, mix: Callable[[jax.Array], jax.Array]) -> Softmax:
    """The state after one block of scores [..., Q, S]; `mix` multiplies weights with the block's
    values, in float32."""
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    return Softmax(top, weights.sum(-1, keepdims=True), mix(weights))


def fold(state: Softmax, scores: jax.Array, mix: Callable[[jax.Array], jax.Array]) -> Softmax:
    """The state after one more block."""
    top = jnp.maximum(state.top, scores.max(-1, keepdims=True))
    fade, weights = jnp.exp(state.top - top), jnp.exp(scores - top)
    return Softmax(
        top, state.total * fade + weights.sum(-1, keepdims=True), state.mixed * fade + mix(weights)
    )


def merge(one: Softmax, other: Softmax) -> Softmax:
    """The state after what both have seen."""
    top = jnp.maximum(one.top, other.top)
    fades = jnp.exp(one.top - top), jnp.exp(other.top - top)
    return Softmax(
        top,
        one.total * fades[0] + other.total * fades[1],
        one.mixed * fades[0] + other.mixed * fades[1],
    )


def finish(state: Softmax, sinks: jax.Array | None = None) -> jax.Array:
    """The attention. `sinks`: as `top`, scores of nothing: they take their part of the softmax."""
    if sinks is None:
        return state.mixed / state.total
    top = jnp.maximum(state.top, sinks)
    fade = jnp.exp(state.top - top)
    return state.mixed * fade / (state.total * fade + jnp.exp(sinks - top))


def capped(scores: jax.Array, cap: float) -> jax.Array:
    """Scores bounded by `cap` through a tanh (Gemma 2, arXiv 2408.00118); 0: as they are."""
    return cap * jnp.tanh(scores / cap) if cap else scores


def grouped_sinks(sinks_N: jax.Array | None, heads: int) -> jax.Array | None:
    """Of query heads: float32 [K, G, 1, 1], by the kv head that they share."""
    if sinks_N is None:
        return None
    return sinks_N.astype(jnp.float32).reshape(heads, -1, 1, 1)

"""Applies the LoRA adapters of many slots: adds x A B to the product of x with a matrix, where each
token uses the adapter of its own slot.

One product covers all G slots of rank R: A [in, G, R] and B [G, R, out] are used as the matrices
[in, G R] and [G R, out], and a mask keeps each token's own slot of x A. Slot g is entry g - 1 of G.
Tokens without an adapter keep their values bit for bit."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdisagg.ops.linear import project

Product = Callable[[jax.Array, jax.Array], jax.Array]


class Factors(NamedTuple):
    """The LoRA factors of one matrix in all slots. Factors of experts have a leading dimension
    [E]."""

    a_IGR: jax.Array
    b_GRO: jax.Array


class ExpertFactors(NamedTuple):
    """The LoRA factors of the experts' three matrices. `gate` equals `up` for experts without a
    gate."""

    gate: Factors
    up: Factors
    down: Factors


def add_adapters(
    y_TD: jax.Array, x_TD: jax.Array, factors: Factors, slot_T: jax.Array, product: Product
) -> jax.Array:
    """Returns `y_TD` plus the adapters' products with `x_TD`.

    Args:
        slot_T: Slot of each token. An array with one entry gives the slot of all tokens.
        product: Function that multiplies rows with a matrix, or each row with the matrix of its
            expert.
    """
    a, b = factors
    slots, rank = a.shape[-2:]
    inner = product(x_TD, a.reshape(*a.shape[:-2], slots * rank))
    own_TG = slot_T[:, None] == jnp.arange(1, slots + 1, dtype=slot_T.dtype)[None, :]
    inner_TGR = inner.reshape(-1, slots, rank)
    inner = jnp.where(own_TG[:, :, None], inner_TGR, 0).reshape(inner.shape)
    more_TD = product(inner, b.reshape(*b.shape[:-3], slots * rank, b.shape[-1]))
    return jnp.where((slot_T > 0)[:, None], y_TD + more_TD.astype(y_TD.dtype), y_TD)


def add_one(
    y_TD: jax.Array, x_TD: jax.Array, factors: Factors, slot: jax.Array, platform: str
) -> jax.Array:
    at = jnp.maximum(slot - 1, 0)
    a_IR = jax.lax.dynamic_index_in_dim(factors.a_IGR, at, 1, keepdims=False)
    b_RO = jax.lax.dynamic_index_in_dim(factors.b_GRO, at, 0, keepdims=False)
    more_TD = project(project(x_TD, a_IR, platform=platform), b_RO, platform=platform)
    return jnp.where(slot > 0, y_TD + more_TD.astype(y_TD.dtype), y_TD)

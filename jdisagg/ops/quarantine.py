"""Keeps a sequence whose activations are not finite from reaching any other through attention.

Attention multiplies what it masks by zero, and zero times NaN is NaN: a broken sequence would break whoever shares its chunk,
and whoever is later given the pages that it leaves. So its keys are stored as zeros and its values as a marker, finite and far
beyond any real value: masked, it contributes exactly nothing; attended to, by the sequence itself, it shows in the mix, however
small its weight, and is turned back into NaN. The sequence stays broken to its end, where sampling finds it out.
"""

import jax
import jax.numpy as jnp

MARKER = 1e30
SHOWS = 1e15


def seal(k_TKH: jax.Array, v_TKH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values of a layer as they may be cached and attended to."""
    whole_T = jnp.all(jnp.isfinite(k_TKH) & jnp.isfinite(v_TKH), axis=(1, 2))[:, None, None]
    return jnp.where(whole_T, k_TKH, jnp.zeros((), k_TKH.dtype)), jnp.where(whole_T, v_TKH, jnp.asarray(MARKER, v_TKH.dtype))


def reveal(o_TNH: jax.Array) -> jax.Array:
    """Attention's output with NaN in the rows that saw a marker."""
    broken_T = jnp.any(jnp.abs(o_TNH) > SHOWS, axis=(1, 2))[:, None, None]
    return jnp.where(broken_T, jnp.asarray(jnp.nan, o_TNH.dtype), o_TNH)

"""Keeps a sequence with non-finite activations from affecting others through attention.

Attention multiplies masked values by zero, and zero times NaN is NaN. A broken sequence would break
sequences that share its chunk or later receive its pages. So where keys or values are not finite,
keys are stored as zero and values as a marker, finite and far beyond any real value. Masked, it
contributes exactly nothing. Attended to by the sequence itself, it persists in the residual stream,
however small its weight. `reveal` finds it before the logits.

In latent attention one vector is key and value: all of it becomes the marker, and its score, which
reveals it, counts as zero (`seen_scores`).

`seal` is elementwise and needs no kernel of its own. `reveal` is one reduction per step, not per
layer."""

import jax
import jax.numpy as jnp

MARKER = 1e30
SHOWS = 1e15


def seal(k_TKH: jax.Array, v_TKH: jax.Array | None) -> tuple[jax.Array, ...]:
    """Returns a layer's keys and values, or the vector of latent attention, in the form that may be
    cached and attended to."""
    if v_TKH is None:
        return (_seal_latent(k_TKH),)
    whole = jnp.isfinite(k_TKH) & jnp.isfinite(v_TKH)
    return jnp.where(whole, k_TKH, jnp.zeros((), k_TKH.dtype)), jnp.where(
        whole, v_TKH, jnp.asarray(MARKER, v_TKH.dtype)
    )


def _seal_latent(cached_T1H: jax.Array) -> jax.Array:
    whole_T11 = jnp.all(jnp.isfinite(cached_T1H), axis=-1, keepdims=True)
    return jnp.where(whole_T11, cached_T1H, jnp.asarray(MARKER, cached_T1H.dtype))


def seen_scores(scores: jax.Array) -> jax.Array:
    """Returns scores of latent attention, with 0 where the key is the marker."""
    return jnp.where(jnp.abs(scores) <= SHOWS, scores, jnp.zeros((), scores.dtype))


def reveal(x_RD: jax.Array) -> jax.Array:
    """Returns the last hidden states, with NaN in rows that attended to a marker."""
    broken_R1 = jnp.any(jnp.abs(x_RD) > SHOWS, axis=-1, keepdims=True)
    return jnp.where(broken_R1, jnp.asarray(jnp.nan, x_RD.dtype), x_RD)

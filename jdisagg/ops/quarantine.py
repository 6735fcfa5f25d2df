"""Keeps a sequence whose activations are not finite from reaching any other through attention.

Attention multiplies what it masks by zero, and zero times NaN is NaN: a broken sequence would break
whoever shares its chunk, and whoever is later given the pages that it leaves. So where its keys or
values are not finite, keys are stored as zero and values as a marker, finite and far beyond any
real value: masked, it contributes exactly nothing; attended to, by the sequence itself, it shows in
the residual stream, however small its weight, and stays there. `reveal` finds it before the logits.

Of latent attention one vector is key and value: the whole of it is the marker then, and its score,
which shows it, counts as zero (`seen_scores`).

`seal` is element by element, so that it costs no kernel of its own; `reveal` is one reduction a
step, not one a layer."""

import jax
import jax.numpy as jnp

MARKER = 1e30
SHOWS = 1e15


def seal(k_TKH: jax.Array, v_TKH: jax.Array | None) -> tuple[jax.Array, ...]:
    """Keys and values of a layer, or the one vector of latent attention, as they may be cached and
    attended to."""
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
    """Scores of latent attention, 0 where the key is the marker."""
    return jnp.where(jnp.abs(scores) <= SHOWS, scores, jnp.zeros((), scores.dtype))


def reveal(x_RD: jax.Array) -> jax.Array:
    """The last hidden states, NaN in the rows that saw a marker."""
    broken_R1 = jnp.any(jnp.abs(x_RD) > SHOWS, axis=-1, keepdims=True)
    return jnp.where(broken_R1, jnp.asarray(jnp.nan, x_RD.dtype), x_RD)

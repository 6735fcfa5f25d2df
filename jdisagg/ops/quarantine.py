"""Keeps a sequence with non-finite activations from affecting other sequences through attention.

Attention multiplies masked values by zero, and zero times NaN is NaN. A sequence with non-finite
values would thus spoil sequences that share its prefill chunk or later receive its pages. Therefore
non-finite keys are stored as zero, and non-finite values as a marker: a finite number far beyond
any real value. For other sequences the marker is masked and contributes exactly zero. The faulty
sequence itself attends to the marker, which stays visible in the residual stream even with a tiny
weight. `reveal` detects it before the logits.

In latent attention one vector is both key and value. If it is not finite, the whole vector is
replaced by the marker, and `seen_scores` replaces its score by zero.

`seal` is elementwise and needs no kernel of its own. `reveal` is one reduction per step, not per
layer."""

import jax
import jax.numpy as jnp

MARKER = 1e30
SHOWS = 1e15


def seal(k_TKH: jax.Array, v_TKH: jax.Array | None) -> tuple[jax.Array, ...]:
    """Returns a layer's keys and values for storage. Non-finite keys become zero, and non-finite
    values, or vectors of latent attention, become the marker."""
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
    """Replaces scores of latent attention by 0 where the key is the marker."""
    return jnp.where(jnp.abs(scores) <= SHOWS, scores, jnp.zeros((), scores.dtype))


def reveal(x_RD: jax.Array) -> jax.Array:
    """Returns the last hidden states, with NaN in rows that attended to a quarantined KV entry.
    Such an entry holds the marker, whose size shows in every row that attends to it."""
    broken_R1 = jnp.any(jnp.abs(x_RD) > SHOWS, axis=-1, keepdims=True)
    return jnp.where(broken_R1, jnp.asarray(jnp.nan, x_RD.dtype), x_RD)

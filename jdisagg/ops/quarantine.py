"""Keeps a sequence with non-finite activations from affecting other sequences through attention.

Attention multiplies masked values by zero, and zero times NaN is NaN. A sequence with non-finite
values would thus spoil sequences that share its prefill chunk or later receive its pages. Therefore
non-finite keys are stored as zero, and non-finite values as a marker: a finite number far beyond
any real value. For other sequences the marker is masked and contributes exactly zero.

In latent attention one vector is both key and value. If it is not finite, the whole vector is
replaced by the marker, and `seen_scores` replaces its score by zero."""

import jax
import jax.numpy as jnp

from jdisagg.model_api import Index

MARKER = 1e30
SHOWS = 1e15


def seal(
    k_TKH: jax.Array, v_TKH: jax.Array | None, index: Index | None = None
) -> tuple[jax.Array, ...]:
    """Returns a layer's keys and values, and the keys of its indexer, for storage. Non-finite keys
    become zero, and non-finite values, or vectors of latent attention, become the marker."""
    if v_TKH is None:
        return _seal_together(k_TKH) if index is None else _seal_together(k_TKH, index.keys_T1D)
    finite = [jnp.isfinite(k_TKH), jnp.isfinite(v_TKH)]
    if k_TKH.shape[2] != v_TKH.shape[2]:
        finite = [jnp.all(each, axis=-1, keepdims=True) for each in finite]
    whole = finite[0] & finite[1]
    keys = ()
    if index is not None:  # its keys are replicated, so they cannot depend on a device's k and v
        whole &= jnp.all(jnp.isfinite(index.keys_T1D), axis=-1, keepdims=True)
        keys = _seal_together(index.keys_T1D)
    sealed_k = jnp.where(whole, k_TKH, jnp.zeros((), k_TKH.dtype))
    return sealed_k, jnp.where(whole, v_TKH, jnp.asarray(MARKER, v_TKH.dtype)), *keys


def _seal_together(*parts: jax.Array) -> tuple[jax.Array, ...]:
    whole = [jnp.all(jnp.isfinite(part_T1H), axis=-1, keepdims=True) for part_T1H in parts]
    whole_T11 = whole[0] if len(parts) == 1 else whole[0] & whole[1]
    return tuple(jnp.where(whole_T11, part, jnp.asarray(MARKER, part.dtype)) for part in parts)


def seen_scores(scores: jax.Array) -> jax.Array:
    """Replaces scores of latent attention by 0 where the key is the marker. Such scores have a
    magnitude beyond that of any real score."""
    return jnp.where(jnp.abs(scores) <= SHOWS, scores, jnp.zeros((), scores.dtype))


def reveal(x_RD: jax.Array) -> jax.Array:
    """Returns the last hidden states, with NaN in rows that attended to a quarantined KV entry."""
    broken_R1 = jnp.any(jnp.abs(x_RD) > SHOWS, axis=-1, keepdims=True)
    return jnp.where(broken_R1, jnp.asarray(jnp.nan, x_RD.dtype), x_RD)

"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1). One vector per
token is cached for all heads: a latent of `rank` values and a key part with rotary positions.

A head's key is the head's key matrix times the latent, followed by the rotary part. A head's value
is its value matrix times the latent. The same attention can be computed in two forms:
- *expanded*: keys and values of each head are computed from the latents, for ordinary attention.
  This form is cheapest if many queries attend to the same tokens (prefill).
- *absorbed*: the key matrix is applied to the query, and the value matrix to the weighted sum of
  latents. Attention then has many query heads over one kv head of rank + rope values, of which the
  first `rank` are also the value. Each cached vector is read once for all heads. This form is used
  for decode and for cached tokens.
"""

import jax
import jax.numpy as jnp

from jdisagg.model_api import Latent


def absorb(q_TNH: jax.Array, latent: Latent) -> jax.Array:
    """Computes the queries of the absorbed form by applying each head's key matrix to its query of
    nope + rope values. Returns [T, N, rank + rope], to be multiplied with cached vectors."""
    nope = latent.keys_NRH.shape[2]
    inner_TNR = jnp.einsum(
        "tnh,nrh->tnr", q_TNH[..., :nope], latent.keys_NRH, preferred_element_type=jnp.float32
    )
    return jnp.concatenate((inner_TNR.astype(q_TNH.dtype), q_TNH[..., nope:]), axis=-1)


def release(mixed_TNR: jax.Array, latent: Latent) -> jax.Array:
    """Applies each head's value matrix to the head's weighted sum of latents. Returns the outputs
    of all heads: [T, N, value]."""
    values = latent.values_NRH.astype(mixed_TNR.dtype)
    return jnp.einsum("tnr,nrv->tnv", mixed_TNR, values, preferred_element_type=jnp.float32).astype(
        mixed_TNR.dtype
    )


def expand(cached_T1H: jax.Array, latent: Latent) -> tuple[jax.Array, jax.Array]:
    """Computes keys [T, N, nope + rope] and values [T, N, value] of each head from the cached
    vectors."""
    rank = latent.keys_NRH.shape[1]
    inner_TR, turned_T1H = cached_T1H[:, 0, :rank], cached_T1H[..., rank:]
    keys_TNH, values_TNV = (
        jnp.einsum("tr,nrh->tnh", inner_TR, weights, preferred_element_type=jnp.float32).astype(
            cached_T1H.dtype
        )
        for weights in (latent.keys_NRH, latent.values_NRH)
    )
    turned_TNH = jnp.broadcast_to(turned_T1H, (*keys_TNH.shape[:2], turned_T1H.shape[2]))
    return jnp.concatenate((keys_TNH, turned_TNH), axis=-1), values_TNV

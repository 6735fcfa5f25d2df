"""Attention among the patches of an image. Queries are processed in blocks, so that the scores of a
large image need little memory."""

import jax
import jax.numpy as jnp
from jax import lax

SCORES = 1 << 24  # of one block: 64 MB


def image_attention(
    q_PNH: jax.Array, k_PNH: jax.Array, v_PNH: jax.Array, count: jax.Array, scale: float
) -> jax.Array:
    """Returns the attention output [P, N, H] of all patches over the first `count` patches. The
    number of patches must be a power of two, or small."""
    patches, heads, size = q_PNH.shape
    block = patches
    while block % 2 == 0 and block * heads * patches > SCORES:
        block //= 2
    seen_P = jnp.arange(patches, dtype=jnp.int32) < jnp.maximum(count, 1)

    def attend(q_QNH: jax.Array) -> jax.Array:
        scores_NQP = jnp.einsum("qnh,pnh->nqp", q_QNH, k_PNH, preferred_element_type=jnp.float32)
        scores_NQP = jnp.where(seen_P[None, None], scores_NQP * scale, -jnp.inf)
        weights_NQP = jax.nn.softmax(scores_NQP, axis=-1).astype(v_PNH.dtype)
        return jnp.einsum("nqp,pnh->qnh", weights_NQP, v_PNH)

    if block == patches:
        return attend(q_PNH)
    blocks = q_PNH.reshape(patches // block, block, heads, size)
    return lax.map(attend, blocks).reshape(q_PNH.shape)

"""Root mean square norm (Zhang and Sennrich, 2019), computed in float32 and rounded once, before
the weight, as the published checkpoints were trained."""

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(
    x: jax.Array, weight_D: jax.Array, epsilon: float, over: tuple[str, ...] = ()
) -> jax.Array:
    """Normalises the last axis of x [..., D]; returns x's dtype. `over`: mesh axes that the last
    axis is sharded over, in equal parts (or replicated, which leaves the mean as it is)."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    if over:
        mean_square = lax.pmean(mean_square, over)
    normal = (wide * lax.rsqrt(mean_square + epsilon)).astype(x.dtype)
    return normal * weight_D.reshape((1,) * (x.ndim - 1) + weight_D.shape)

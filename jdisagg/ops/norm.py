"""Root mean square norm (Zhang and Sennrich, 2019), computed in float32 and rounded once: before
the weight, or behind it where the weight is what is added to one (Gemma), as the published
checkpoints were trained."""

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(
    x: jax.Array,
    weight_D: jax.Array | None,
    epsilon: float,
    over: tuple[str, ...] = (),
    *,
    above_one: bool = False,
) -> jax.Array:
    """Normalises the last axis of x [..., D]; returns x's dtype. `over`: mesh axes that the last
    axis is sharded over, in equal parts (or replicated, which leaves the mean as it is).
    `above_one`: the scale is one plus the weight; `weight_D` None: one."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    if over:
        mean_square = lax.pmean(mean_square, over)
    normal = wide * lax.rsqrt(mean_square + epsilon)
    if weight_D is None:
        return normal.astype(x.dtype)
    weight = weight_D.reshape((1,) * (x.ndim - 1) + weight_D.shape)
    if above_one:
        return (normal * (1 + weight.astype(jnp.float32))).astype(x.dtype)
    return normal.astype(x.dtype) * weight

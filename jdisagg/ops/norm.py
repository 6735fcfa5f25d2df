"""Root mean square norm (Zhang and Sennrich, 2019), computed in float32 and rounded once. The
result is rounded before multiplication by the weight, or after it if one is added to the weight
(Gemma). Published checkpoints were trained in this way."""

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
    """Normalises the last axis of x [..., D] and returns x's dtype.

    Args:
        over: Mesh axes over which the last axis is sharded in equal parts (axes over which x is
            replicated may be included).
    """
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


def layer_norm(
    x: jax.Array, weight_D: jax.Array, bias_D: jax.Array | None, epsilon: float
) -> jax.Array:
    """Normalises the last axis of x [..., D] to zero mean and unit variance, and applies weight and
    bias, which may have more of x's last axes. Computed in float32 and rounded once."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    of_x = (1,) * (x.ndim - weight_D.ndim) + weight_D.shape
    y = wide * lax.rsqrt(variance + epsilon) * weight_D.astype(jnp.float32).reshape(of_x)
    if bias_D is not None:
        y += bias_D.astype(jnp.float32).reshape(of_x)
    return y.astype(x.dtype)

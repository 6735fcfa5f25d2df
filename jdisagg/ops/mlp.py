"""Activations of the feed-forward block: silu(gate) * up, gelu(gate) * up with the tanh form of
GELU (Shazeer, 2020), or relu(up)^2 (So et al., 2021) or xIELU(up) without a gate."""

import jax
import jax.numpy as jnp

from jdisagg.ops.activations import Activation, BoundedGate, ExpertGate, GeluGate, SquaredRelu


def gated(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    if activation == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    return gated_silu(gate, up)


def squared_relu(up: jax.Array) -> jax.Array:
    return jnp.square(jnp.maximum(up, 0))


def xielu(
    x: jax.Array, alpha_p: jax.Array, alpha_n: jax.Array, beta: jax.Array, eps: jax.Array
) -> jax.Array:
    """Computes xIELU (arXiv 2411.13010) in float32, and returns x's dtype. Its slopes are the
    softplus of alpha, and eps is the largest argument of the exponential, just below zero."""
    wide = x.astype(jnp.float32)
    rising = jax.nn.softplus(alpha_p) * jnp.square(wide)
    falling = (jnp.expm1(jnp.minimum(wide, eps)) - wide) * (beta + jax.nn.softplus(alpha_n))
    return (jnp.where(wide > 0, rising, falling) + beta * wide).astype(x.dtype)


def gated_silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def gated_expert(gate: jax.Array, up: jax.Array, clamp: ExpertGate | None) -> jax.Array:
    if clamp is None:
        return gated_silu(gate, up)
    if isinstance(clamp, SquaredRelu):
        return jnp.maximum(gate, 0) * up
    if isinstance(clamp, GeluGate):
        return gated(gate, up, "gelu_tanh")
    if isinstance(clamp, BoundedGate):
        gate = jnp.minimum(gate * jax.nn.sigmoid(gate), clamp.limit)
        return gate * jnp.clip(up, -clamp.limit, clamp.limit)
    gate, up = jnp.minimum(gate, clamp.limit), jnp.clip(up, -clamp.limit, clamp.limit)
    return (up + 1) * (gate * jax.nn.sigmoid(clamp.alpha * gate))

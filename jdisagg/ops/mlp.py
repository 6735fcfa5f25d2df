"""The gated feed-forward block's activation: silu(gate) * up, or gelu(gate) * up with the tanh form
of GELU (Shazeer, 2020)."""

import jax

from jdisagg.ops.activations import Activation


def gated(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    """Elementwise, in the inputs' dtype."""
    if activation == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    return gated_silu(gate, up)


def gated_silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Elementwise, in the inputs' dtype."""
    return jax.nn.silu(gate) * up

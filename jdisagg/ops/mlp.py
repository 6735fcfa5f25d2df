"""The gated feed-forward block's activation: silu(gate) * up (Shazeer, 2020)."""

import jax


def gated_silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Elementwise, in the inputs' dtype."""
    return jax.nn.silu(gate) * up

"""Rotary position embedding (Su et al., 2021) and its context extensions, as a function of a
token's own position alone: a token's key never depends on how its prompt was cut into chunks, or on
what came after it.

Types: default; linear (positions divided); llama3 (long wavelengths divided, with a smooth
passage); yarn (Peng et al., 2023: the same by rotations, and a factor on the attention
temperature)."""

import jax
import jax.numpy as jnp

from jdisagg.ops.rope_frequencies import Rope


def rope_angles(positions_T: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 [T, H / 2], times the attention factor."""
    position_T1 = positions_T.astype(jnp.float32)[:, None]
    angles_TF = position_T1 * jnp.asarray(rope.frequencies())[None, :]
    return jnp.cos(angles_TF) * rope.attention_factor, jnp.sin(angles_TF) * rope.attention_factor


def rotate(x_TNH: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates dimension i with dimension i + H / 2 of each head; returns x's dtype."""
    cos_T1F, sin_T1F = (angle[:, None, :].astype(x_TNH.dtype) for angle in angles)
    first, second = jnp.split(x_TNH, 2, axis=-1)
    return jnp.concatenate(
        (first * cos_T1F - second * sin_T1F, second * cos_T1F + first * sin_T1F), axis=-1
    )

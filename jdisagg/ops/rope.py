"""Rotary position embedding (Su et al., 2021) and its context extensions. Angles depend only on a
token's own position, so a key never depends on later tokens or on how the prompt was divided into
chunks.

Types of frequencies (`Rope.type`):
- default: no extension.
- linear: positions are divided by a factor.
- llama3: low frequencies are divided by a factor, with a smooth transition to high ones.
- yarn (Peng et al., 2023): frequencies are divided depending on their number of rotations, and
  attention has a temperature.
- longrope (Ding et al., 2024): the frequency of each pair is divided by its own factor.
- proportional (Gemma 4): only the first pairs rotate, at the wavelengths that they would have if
  all pairs did."""

import jax
import jax.numpy as jnp

from jdisagg.ops.rope_frequencies import Rope


def rope_angles(positions_T: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines of the rotation angles, each float32 [T, R / 2] for R rotated
    dimensions, multiplied by the attention factor. Positions are [T], or [T, 3] with the time, row
    and column of each token (`Rope.sections`)."""
    if positions_T.ndim == 1:
        position_TF = positions_T.astype(jnp.float32)[:, None]
    else:
        position_TF = jnp.take(positions_T, jnp.asarray(rope.dimensions()), axis=1)
        position_TF = position_TF.astype(jnp.float32)
    angles_TF = position_TF * jnp.asarray(rope.frequencies())[None, :]
    return jnp.cos(angles_TF) * rope.attention_factor, jnp.sin(angles_TF) * rope.attention_factor


def rotate(
    x_TNH: jax.Array, angles: tuple[jax.Array, jax.Array], *, interleaved: bool = False
) -> jax.Array:
    """Rotates the first R dimensions of each head, where R / 2 is the number of columns of
    `angles`. Returns x's dtype. Dimension i is paired with i + R / 2, or 2i with 2i + 1 if
    `interleaved`. Other dimensions are unchanged."""
    cos_T1F, sin_T1F = (angle[:, None, :].astype(x_TNH.dtype) for angle in angles)
    turned = 2 * cos_T1F.shape[-1]
    part_TNR = x_TNH[..., :turned]
    if interleaved:
        first, second = part_TNR[..., 0::2], part_TNR[..., 1::2]
    else:
        first, second = jnp.split(part_TNR, 2, axis=-1)
    pair = (first * cos_T1F - second * sin_T1F, second * cos_T1F + first * sin_T1F)
    rotated_TNR = (
        jnp.stack(pair, axis=-1).reshape(part_TNR.shape)
        if interleaved
        else jnp.concatenate(pair, axis=-1)
    )
    if turned == x_TNH.shape[-1]:
        return rotated_TNR
    return jnp.concatenate((rotated_TNR, x_TNH[..., turned:]), axis=-1)


def query_growth(positions_T: jax.Array, beta: float, every: int) -> jax.Array:
    """Returns the scale of queries beyond the first `every` positions, float32 [T, 1, 1]: 1 + beta
    log(1 + floor(position / every)), the attention temperature of Llama 4 and Ministral 3."""
    rounds_T = jnp.floor(positions_T.astype(jnp.float32) / every)
    return (1 + beta * jnp.log1p(rounds_T))[:, None, None]

"""Rotary position embedding (Su et al., 2021) and its context extensions, as a function of a token's own position alone.

Types: default; linear (positions divided); llama3 (long wavelengths divided, with a smooth passage); yarn (Peng et al., 2023:
the same by rotations, and a factor on the attention temperature); dynamic (the base grows beyond the original context).
`dynamic` takes the base from each token's own position, max(position + 1, original context): a token's key never depends on
how its prompt was cut into chunks, or on what came after it. It equals generation token by token with a cache elsewhere; it
differs there only where a prompt longer than the original context is rotated at once with the base of its full length.
"""

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class Rope:
    """What determines the rotation: hashable, so that it is part of a layer's structure. Fields beyond `theta` count only for
    the types that use them. `original_tokens` is the context before extension."""

    head_dim: int
    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    original_tokens: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def frequencies(self) -> np.ndarray:
        """Radians per position of each pair of dimensions: float32 [H / 2]. (Of `dynamic`: within the original context.)"""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        plain = (1.0 / np.float32(self.theta) ** exponents).astype(np.float32)
        match self.type:
            case "default" | "dynamic":
                return plain
            case "linear":
                return plain / np.float32(self.factor)
            case "llama3":
                return self._llama3(plain)
            case "yarn":
                return self._yarn(plain)

    def _llama3(self, plain: np.ndarray) -> np.ndarray:
        turns = self.original_tokens * plain.astype(np.float64) / (2 * math.pi)  # rotations within the original context
        smooth = (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return ((1 - smooth) * plain / self.factor + smooth * plain).astype(np.float32)

    def _yarn(self, plain: np.ndarray) -> np.ndarray:
        low, high = (self._dimension_of_turns(turns) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        width = high - low if high != low else 0.001
        divided = np.clip((np.arange(self.head_dim // 2) - low) / width, 0.0, 1.0)
        return (plain * (1 - divided) + plain / self.factor * divided).astype(np.float32)

    def _dimension_of_turns(self, turns: float) -> float:
        """The pair of dimensions that makes so many rotations within the original context."""
        return self.head_dim * math.log(self.original_tokens / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


def rope_angles(positions_T: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 [T, H / 2], times the attention factor."""
    position_T1 = positions_T.astype(jnp.float32)[:, None]
    if rope.type == "dynamic":
        angles_TF = position_T1 * _dynamic_frequencies(position_T1, rope)
    else:
        angles_TF = position_T1 * jnp.asarray(rope.frequencies())[None, :]
    return jnp.cos(angles_TF) * rope.attention_factor, jnp.sin(angles_TF) * rope.attention_factor


def rotate(x_TNH: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates dimension i with dimension i + H / 2 of each head; returns x's dtype."""
    cos_T1F, sin_T1F = (angle[:, None, :].astype(x_TNH.dtype) for angle in angles)
    first, second = jnp.split(x_TNH, 2, axis=-1)
    return jnp.concatenate((first * cos_T1F - second * sin_T1F, second * cos_T1F + first * sin_T1F), axis=-1)


def _dynamic_frequencies(position_T1: jax.Array, rope: Rope) -> jax.Array:
    stretch_T1 = jnp.maximum(position_T1 + 1, rope.original_tokens) / rope.original_tokens
    growth_T1 = (rope.factor * stretch_T1 - (rope.factor - 1)) ** (rope.head_dim / (rope.head_dim - 2))
    exponents_F = np.arange(0, rope.head_dim, 2, dtype=np.float32) / np.float32(rope.head_dim)
    return 1.0 / (rope.theta * growth_T1) ** jnp.asarray(exponents_F)[None, :]

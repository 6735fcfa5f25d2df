"""Quantizes KV values symmetrically. Each row of H values (one component, head and token) has one
float32 scale.

Error bounds, with row x, packed q and `scale` = max|x| / (127, 7 or 448):
- int8: |x - q * scale| <= scale / 2, so max|x| / 254;
- int4: |x - q * scale| <= scale / 2, so max|x| / 14;
- fp8 (e4m3): |x - q * scale| <= max(|x| / 16, scale / 1024).

Float32 rounding (a few 2^-24 of max|x|) and rounding to a narrower result dtype add to these
bounds. Rows of zeros are restored exactly. Values must be finite. An int4 byte holds one value of
each half of H, so that both halves are contiguous."""

import jax
import jax.numpy as jnp
from jax import lax

INT8_LARGEST, INT4_LARGEST, FP8_LARGEST = 127.0, 7.0, 448.0


def row_scale(values: jax.Array, largest: float) -> jax.Array:
    """Returns the scale [..., 1] that maps each row's largest magnitude to `largest`."""
    magnitude = jnp.max(jnp.abs(values.astype(jnp.float32)), axis=-1, keepdims=True)
    return magnitude / jnp.float32(largest)


def scaled(values: jax.Array, scale: jax.Array) -> jax.Array:
    usable = scale > 0
    return jnp.where(
        usable,
        values.astype(jnp.float32) / jnp.where(usable, scale, jnp.float32(1)),
        jnp.float32(0),
    )


def to_int8(values: jax.Array, scale: jax.Array, largest: float = INT8_LARGEST) -> jax.Array:
    return jnp.clip(jnp.round(scaled(values, scale)), -largest, largest).astype(jnp.int8)


def pack_int4(whole: jax.Array) -> jax.Array:
    """Packs two numbers of [-8, 7] into a byte: int8 [..., H] -> uint8 [..., H / 2]. The first half
    of H is in the low four bits."""
    nibbles = lax.bitcast_convert_type(whole, jnp.uint8) & jnp.uint8(15)
    low, high = jnp.split(nibbles, 2, axis=-1)
    return low | (high << jnp.uint8(4))


def unpack_int4(packed: jax.Array) -> jax.Array:
    """Inverts `pack_int4`: uint8 [..., H / 2] -> int8 [..., H]."""
    nibbles = jnp.concatenate([packed & jnp.uint8(15), packed >> jnp.uint8(4)], axis=-1).astype(
        jnp.int8
    )
    return jnp.where(nibbles > jnp.int8(7), nibbles - jnp.int8(16), nibbles)


def to_fp8(values: jax.Array, scale: jax.Array) -> jax.Array:
    """Divides by the scale and converts to fp8 (e4m3), stored as bytes (uint8), so that compiled
    programs return no float8 arrays."""
    limited = jnp.clip(scaled(values, scale), -FP8_LARGEST, FP8_LARGEST)
    return lax.bitcast_convert_type(limited.astype(jnp.float8_e4m3fn), jnp.uint8)


def from_fp8(packed: jax.Array) -> jax.Array:
    """Converts e4m3 bytes to float32."""
    return lax.bitcast_convert_type(packed, jnp.float8_e4m3fn).astype(jnp.float32)


def rescaled(numbers: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return (numbers.astype(jnp.float32) * scale).astype(dtype)

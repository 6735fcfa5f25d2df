"""Randomness as a pure function of (request seed, child, token position, vocabulary id).

No generator state is split or carried over: every number is computed from its coordinates. The
tokens of a request thus do not depend on its batch, slot, layout or vocabulary padding, nor on
transfers to other workers.

The hash is counter based, on uint32, the widest integer multiply of CPU and GPU vector units:

- A row's coordinates (two seed words, child, position) are absorbed one word at a time, with a full
  mix after each, in two lanes with different initial values. This gives a 64-bit key per row. Two
  rows share a key with chance 2^-64.
- An element takes its vocabulary id times an odd constant (a bijection that spreads neighbouring
  ids over all bits) plus the first key word, then multiply and xor-shift, then xor with the second
  key word, then multiply and xor-shift. The second word enters in the middle, because with one word
  two rows would be shifts of one another.
- Shifts and multipliers are MurmurHash3's finaliser, whose avalanche is within 0.3 % of one half
  for every pair of input and output bit. Each step is a bijection, so ids never collide within a
  row. The tests measure avalanche, uniformity and correlation between neighbours along every
  coordinate.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_SPREAD = np.uint32(0x9E3779B1)
_MULTIPLY_1 = np.uint32(0x85EBCA6B)
_MULTIPLY_2 = np.uint32(0xC2B2AE35)
_LANE_STARTS = (np.uint32(0x243F6A88), np.uint32(0xB7E15162))


def row_keys(
    seed_B2: jax.Array, child_B: jax.Array, position_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns two uint32 key words per row. `seed` is uint32 [B, 2] (low word, high word), child
    and position are int32 [B]."""
    words = (
        seed_B2[:, 0],
        seed_B2[:, 1],
        child_B.astype(jnp.uint32),
        position_B.astype(jnp.uint32),
    )
    return _absorb(_LANE_STARTS[0], words), _absorb(_LANE_STARTS[1], words)


def random_bits(
    keys: tuple[jax.Array, jax.Array], vocabulary: int, first: jax.Array | int = 0
) -> jax.Array:
    """Returns random bits, uint32 [B, V], for V consecutive vocabulary ids from `first` on. The
    bits of an id do not depend on V."""
    key_B1, late_key_B1 = keys[0][:, None], keys[1][:, None]
    ids_BV = lax.broadcasted_iota(jnp.uint32, (key_B1.shape[0], vocabulary), 1)
    ids_BV = ids_BV + jnp.asarray(first).astype(jnp.uint32)
    x_BV = ids_BV * _SPREAD + key_B1
    x_BV = (x_BV ^ (x_BV >> np.uint32(16))) * _MULTIPLY_1
    x_BV = (x_BV ^ (x_BV >> np.uint32(13)) ^ late_key_B1) * _MULTIPLY_2
    return x_BV ^ (x_BV >> np.uint32(16))


def uniform(bits: jax.Array) -> jax.Array:
    """Converts random bits to float32 in (0, 1), never 0 or 1. Near 0 the spacing of results is
    2^-31, which `exponential` needs."""
    step = np.float32(2.0**-31)
    # Converts from signed integers, because x86 before AVX-512 has no conversion from unsigned
    # ones. The minimum is needed because rounding may give 1.
    numerator = (bits >> np.uint32(1)).astype(jnp.int32).astype(jnp.float32)
    return jnp.minimum(numerator * step + step / 2, np.float32(1 - 2.0**-24))


def exponential(bits: jax.Array) -> jax.Array:
    """Returns exponential variates -log(1 - u), positive and finite. Small variates have full
    relative precision.

    Sampling takes the smallest variate over a large vocabulary. If computed as -log(u), small
    variates would be multiples of 2^-24, and tokens would tie. log1p uses Kahan's correction,
    log(w) * u / (1 - w) with w = 1 - u rounded, in half the time of `jnp.log1p`."""
    u = uniform(bits)
    w = 1 - u
    return jnp.where(w == 1, u, -jnp.log(w) * u / (1 - w))


def _absorb(state: np.uint32, words: tuple[jax.Array, ...]) -> jax.Array:
    x = jnp.full_like(words[0], state)
    for word in words:
        x = _mix(x * _SPREAD + word)
    return x


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> np.uint32(16))) * _MULTIPLY_1
    x = (x ^ (x >> np.uint32(13))) * _MULTIPLY_2
    return x ^ (x >> np.uint32(16))

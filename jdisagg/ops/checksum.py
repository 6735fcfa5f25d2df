"""Keyed checksums of KV, which detect corruption when KV is transferred from a prefill worker to a
decode worker. Sender and receiver compute the same sum for any sharding, page size and block size.

A row is the H values of one (component, head, position), read as the integers of their bits. The
term of a row is mix(sum_h bits_h * weight(h, key) + row_key(component, head, position, key)) mod
2^32, with odd weights and a bijective `mix`. The sum of rows is the sum of their terms mod 2^32.
The sum is additive over components, heads and positions, and hence over any shards and blocks.
Swapped rows, another key, several changed bits or missing rows go undetected with chance 2^-64.

Coordinates are global: the component's index over all layers, the kv head's index in the model, the
absolute position. Callers must pass materialised arrays, because XLA may recompute a fused value
with another rounding."""

import hashlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LANES = 2
_GOLDEN, _HEAD, _POSITION = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_LANE_SALTS = (0x27D4EB2F, 0x165667B1)


# Numbers of words by which `byte_sum` groups. They are coprime, and a slab of as many words as
# their product is small.
_WIDTHS = (1024, 1021)
_SLAB = _WIDTHS[0] * _WIDTHS[1]


def byte_sum(values: np.ndarray) -> bytes:
    """Computes a checksum of an array's bytes, 16 bytes, nearly as fast as they are read.

    The words are summed mod 2^32, grouped by index modulo 1024 and again by index modulo 1021, and
    the sums are hashed."""
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    words = flat[: flat.size // 4 * 4].view(np.uint32)
    whole = words.size // _SLAB * _SLAB
    digest = hashlib.blake2b(str(flat.size).encode(), digest_size=16)
    sums = [np.zeros(width, np.uint32) for width in _WIDTHS]
    for first in range(0, whole, _SLAB):
        slab = words[first : first + _SLAB]
        for total in sums:
            total += slab.reshape(-1, total.size).sum(axis=0, dtype=np.uint32)
    rest = words[whole:]
    for total in sums:
        even = rest.size // total.size * total.size
        total += rest[:even].reshape(-1, total.size).sum(axis=0, dtype=np.uint32)
        total[: rest.size - even] += rest[even:]
        digest.update(total.tobytes())
    digest.update(flat[words.size * 4 :].tobytes())
    return digest.digest()


def key_words(key: int) -> np.ndarray:
    """Splits a 64-bit key into two words, uint32 [2], the form in which compiled programs receive
    it."""
    return np.array([key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF], np.uint32)


def fold(sums: np.ndarray) -> int:
    """Adds partial sums [..., 2] into one 64-bit number. Lane 0 is the low half."""
    low, high = (
        int(lane) & 0xFFFFFFFF for lane in sums.reshape(-1, LANES).astype(np.uint64).sum(axis=0)
    )
    return high << 32 | low


def row_sums(
    parts: Sequence[jax.Array],
    key_2: jax.Array,
    component: jax.Array,
    head: jax.Array,
    positions_T: jax.Array,
    valid_T: jax.Array,
) -> jax.Array:
    """Computes the checksum of each head and token, summed over components: uint32 [K, T, 2].

    Args:
        parts: Arrays [C, K, T, x], which are concatenated along the last axis to the values of each
            row.
        component, head: Index, in the whole model, of the first component and of the first head of
            `parts`.
        valid_T: Mask of the tokens to include. Excluded tokens give 0.
    """
    components, heads = parts[0].shape[:2]
    c_C11 = jnp.arange(components, dtype=jnp.uint32)[:, None, None] + jnp.asarray(component).astype(
        jnp.uint32
    )
    k_1K1 = jnp.arange(heads, dtype=jnp.uint32)[None, :, None] + jnp.asarray(head).astype(
        jnp.uint32
    )
    t_11T = positions_T.astype(jnp.uint32)[None, None, :]
    bits = [bits_of(part) for part in parts]
    seeds = [_lane_seed(key_2, lane) for lane in range(LANES)]
    terms = []
    for seed, row_CKT in zip(seeds, _weighted(bits, seeds), strict=True):
        place_CK1 = _mix(~seed + c_C11 * jnp.uint32(_GOLDEN) + k_1K1 * jnp.uint32(_HEAD))
        terms.append(_mix(row_CKT + _mix(place_CK1 + t_11T * jnp.uint32(_POSITION))))
    rows_KT2 = jnp.stack(_sum_lanes(terms, 0), axis=-1)
    return jnp.where(valid_T[None, :, None], rows_KT2, jnp.uint32(0))


def _weighted(bits: Sequence[jax.Array], seeds: Sequence[jax.Array]) -> list[jax.Array]:
    lanes = [jnp.uint32(0)] * len(seeds)
    first = 1
    for part_CKTx in bits:
        index_x = jnp.arange(first, first + part_CKTx.shape[-1], dtype=jnp.uint32)
        weights = [_mix(seed + index_x * jnp.uint32(_GOLDEN)) | jnp.uint32(1) for seed in seeds]
        sums = _sum_lanes([part_CKTx * weight_x[None, None, None, :] for weight_x in weights], 3)
        lanes = [lane + one for lane, one in zip(lanes, sums, strict=True)]
        first += part_CKTx.shape[-1]
    return lanes


def _sum_lanes(lanes: Sequence[jax.Array], axis: int) -> list[jax.Array]:
    """Sums all lanes in one pass, because separate reductions took five times as long on a CPU."""
    zeros = [jnp.uint32(0)] * len(lanes)
    return list(
        lax.reduce(
            list(lanes),
            zeros,
            lambda one, other: [a + b for a, b in zip(one, other, strict=True)],
            (axis,),
        )
    )


def granule_sums(rows_KT2: jax.Array, granule: int) -> jax.Array:
    """Sums the checksums of tokens over all heads and over each run of `granule` tokens, which is
    the unit in which KV is verified: uint32 [ceil(T / granule), 2]."""
    rows_T2 = jnp.sum(rows_KT2, axis=0, dtype=jnp.uint32)
    rows_T2 = jnp.pad(rows_T2, ((0, -rows_T2.shape[0] % granule), (0, 0)))
    return jnp.sum(rows_T2.reshape(-1, granule, LANES), axis=1, dtype=jnp.uint32)


def bits_of(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, jnp.dtype(f"uint{8 * values.dtype.itemsize}")).astype(
        jnp.uint32
    )


def _lane_seed(key_2: jax.Array, lane: int) -> jax.Array:
    return _mix(key_2[lane] + _mix(key_2[1 - lane] ^ jnp.uint32(_LANE_SALTS[lane])))


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))

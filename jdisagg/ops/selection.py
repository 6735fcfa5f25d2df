"""Largest entries of each row of [B, V] without sorting: the argmax, the k largest, the k-th value,
and the last value that satisfies a condition.

All are exact, and ties go to the smaller index. XLA's own operations are slow on a CPU for a
vocabulary: for [32, 32000] on two cores, `jnp.argmax` takes 4.7 ms (this module 0.2), `lax.top_k`
of 20 takes 1.2 ms (this module 0.5), and a sort of 8 rows takes 21 ms. A row with a NaN gives some
index in range and affects no other row."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 128


def blocks_of(x_BV: jax.Array, fill: float = -np.inf) -> jax.Array:
    """Reshapes [B, V] to [B, blocks, 128]: a view if 128 divides V, else padded with `fill` at the
    end."""
    rows, width = x_BV.shape
    if width % BLOCK:
        x_BV = jnp.pad(x_BV, ((0, 0), (0, -width % BLOCK)), constant_values=fill)
    return x_BV.reshape(rows, -1, BLOCK)


def argmax_blocks(arrays: tuple[jax.Array, ...], value: Callable[..., jax.Array]) -> jax.Array:
    """Returns the index over the last two axes of the largest `value(*arrays)`, int32 [B]. `arrays`
    are [B, blocks, 128], or [B, 1, 1]. The elementwise function `value` is computed twice, over all
    entries and then over the winning block, so that its results [B, V] are never written to
    memory."""
    block_B = _first_largest(jnp.max(value(*arrays), axis=-1))
    winner = tuple(
        x if x.shape[1] == 1 else jnp.take_along_axis(x, block_B[:, None, None], axis=1)
        for x in arrays
    )
    return block_B * BLOCK + _first_largest(value(*winner)[:, 0])


def argmax(x_BV: jax.Array, *, in_blocks: bool = True) -> jax.Array:
    """Returns the index of each row's largest entry, int32 [B]. Ties go to the smallest index.
    `in_blocks`: whether to search in blocks, instead of by XLA's argmax
    (`PlatformTraits.argmax_in_blocks`)."""
    if not in_blocks:
        return _first_largest(x_BV)
    return argmax_blocks((blocks_of(x_BV),), lambda x: x)


def largest(x_BV: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the `count` largest entries of each row in descending order, and their indices int32
    [B, count], ties by index."""
    x_BV = jnp.where(x_BV == 0, 0, x_BV)  # top_k puts -0 below 0
    x_BnS = blocks_of(x_BV)
    rows, blocks, _ = x_BnS.shape
    if blocks <= 2 * count:
        return lax.top_k(x_BV, count)
    _, block_BK = lax.top_k(jnp.max(x_BnS, axis=-1), count)
    # Sorted, so that the order of candidates is the order of their indices.
    block_BK = lax.sort(block_BK, dimension=1)
    candidates_BC = jnp.take_along_axis(x_BnS, block_BK[:, :, None], axis=1).reshape(
        rows, count * BLOCK
    )
    values_BK, place_BK = lax.top_k(candidates_BC, count)
    ids_BK = jnp.take_along_axis(block_BK, place_BK // BLOCK, axis=1) * BLOCK + place_BK % BLOCK
    return values_BK, ids_BK


def separating_value(x_BV: jax.Array, count_B: jax.Array, wanted_B: jax.Array) -> jax.Array:
    """Returns a threshold t for each row, float32 [B]: the entries x >= t are the `count` largest
    and all ties with the smallest of these.

    Exact bisection over the ordered float32 numbers, in at most 32 passes, which stops once the
    count is met. Rows where `wanted` is False give -inf. `count` must be at least 1, and wanted
    rows must not contain NaN."""
    low_B = jnp.where(wanted_B, order_key(np.float32(-np.inf)), 0)
    high_B = jnp.where(wanted_B, order_key(jnp.max(x_BV, axis=-1)), 0)

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_B, high_B = bounds
        middle_B = mean_key(low_B, high_B)
        reached_B = jnp.sum((x_BV >= from_order_key(middle_B)[:, None]).astype(jnp.int32), axis=-1)
        open_B = low_B < high_B
        enough_B = open_B & (reached_B >= count_B)
        high_B = jnp.where(open_B & (reached_B < count_B), middle_B - 1, high_B)
        return jnp.where(enough_B, middle_B, low_B), jnp.where(
            enough_B & (reached_B == count_B), middle_B, high_B
        )

    low_B, _ = lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), halve, (low_B, high_B))
    return jnp.where(wanted_B, from_order_key(low_B), -jnp.inf)


def last_value(holds: Callable[[Sequence[jax.Array]], Sequence[jax.Array]], rows: int) -> jax.Array:
    """Returns the largest number t, float32 [rows], for which a monotone condition holds. The
    condition must hold for -inf, and for all numbers below any number for which it holds. `holds`
    tests a list of arrays, float32 [rows], and returns one bool [rows] for each array."""
    key_B = jnp.zeros((rows,), jnp.uint32)
    for shift in range(28, -1, -4):
        asked = [_number(key_B + np.uint32(digit << shift)) for digit in range(1, 16)]
        digit_B = sum(answer.astype(jnp.uint32) for answer in holds(asked))
        key_B = key_B + digit_B * np.uint32(1 << shift)
    return _number(key_B)


def _number(key_B: jax.Array) -> jax.Array:
    """Keys below the key of -inf, which would be NaN, give -inf."""
    x_B = from_order_key(lax.bitcast_convert_type(key_B ^ np.uint32(1 << 31), jnp.int32))
    low = lax.bitcast_convert_type(order_key(np.float32(-np.inf)), jnp.uint32) ^ np.uint32(1 << 31)
    # A CPU treats denormal numbers as zero in comparisons.
    x_B = jnp.where(jnp.abs(x_B) < np.finfo(np.float32).tiny, 0, x_B)
    return jnp.where(key_B < low, -jnp.inf, x_B)


def _first_largest(x_BN: jax.Array) -> jax.Array:
    return jnp.argmax(x_BN, axis=-1).astype(jnp.int32)


def mean_key(low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns the mean of two keys, rounded up, computed without overflow."""
    return (low | high) - ((low ^ high) >> 1)


def order_key(x: jax.Array | np.float32) -> jax.Array:
    """Returns int32 keys with the order of the numbers.

    The bits of a negative number are inverted, because as integers negative numbers have the
    reverse order."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))


def from_order_key(key: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(key ^ ((key >> 31) & np.int32(0x7FFFFFFF)), jnp.float32)

"""Quantized weight matrices: how they are stored and multiplied with activations.

A matrix w [in, out] is stored as q and one float32 scale per output, symmetric: scale = max|w| over
the inputs / (127, 7 or 448), q = w / scale rounded to int8, int4 or fp8 (e4m3). So |w - q * scale|
is at most max|w| / 254 (int8), max|w| / 14 (int4), and max(|w| / 16, scale / 1024) (fp8).

On an accelerator q is an array of XLA's int8, int4 or fp8 type, and XLA converts it to a wider type
inside the product. XLA:CPU would write the widened matrices of a whole program to memory at once.
On a CPU the product therefore runs over tiles of columns, fp8 is stored as bytes, and two adjacent
int4 inputs share a byte (the first in its low half), because XLA:CPU copies whole arrays of its own
narrow types before it cuts a tile. int4 experts on a GPU are packed in the same way, because the
expert kernels do not support int4."""

from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from jdisagg.errors import ConfigError
from jdisagg.layout.platforms import traits_of
from jdisagg.ops.optional_kernels import BLOCK_EXPERTS, usable
from jdisagg.ops.parameters import Role

Weights = Literal["", "int8", "int4", "fp8"]
LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
# Number of values of a tile that is widened at once: 4 MB in float32.
_TILE_VALUES = 1 << 20


def checked_weights(text: str) -> Weights:
    """Parses the name of a quantized type, such as "int8". Raises ConfigError for an unknown
    name."""
    for weights in get_args(Weights):
        if text == weights:
            return weights
    raise ConfigError(f"weights must be {', '.join(LARGEST)} or empty, got {text!r}")


@dataclass(frozen=True, slots=True)
class KernelForm:
    """How matrices are stored: [out, in] if `transposed` (never for experts), and as int8, int4 or
    fp8, or in the model's type if `weights` is ""."""

    transposed: bool = False
    weights: Weights = ""
    platform: str = "cpu"

    def plain(self) -> "KernelForm":
        return KernelForm(self.transposed, "", self.platform)

    def packed(self, *, experts: bool = False) -> bool:
        traits = traits_of(self.platform)
        by_kernels = experts and traits.kernels == "gpu" and usable(BLOCK_EXPERTS)
        return self.weights == "int4" and (traits.stores_bits or by_kernels)

    def role(self, *, experts: bool = False) -> Role:
        if self.packed(experts=experts):
            return "uint8"
        if self.weights == "fp8":
            return "uint8" if traits_of(self.platform).stores_bits else "float8_e4m3fn"
        return self.weights or "matrix"


def quantized(values: np.ndarray, axis: int, weights: str) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes along `axis`, the inputs. Returns the quantized values in their own type, and
    float32 scales, whose shape lacks `axis`. Outputs with only zero weights stay zero."""
    wide, largest = values.astype(np.float32), np.float32(LARGEST[weights])
    scale = np.max(np.abs(wide), axis=axis) / largest
    divisor = np.expand_dims(np.where(scale > 0, scale, np.float32(1)), axis)
    wide /= divisor
    if weights == "fp8":
        return np.clip(wide, -largest, largest).astype(ml_dtypes.float8_e4m3fn), scale
    whole = np.clip(np.rint(wide), -largest, largest).astype(np.int8)
    return (whole.astype(ml_dtypes.int4) if weights == "int4" else whole), scale


def pack_pairs(whole: np.ndarray, axis: int) -> np.ndarray:
    """Packs pairs of int4 neighbours along `axis` into bytes. The first of each pair is the low
    half."""
    nibbles = np.moveaxis(whole.astype(np.int8), axis, -1).view(np.uint8) & 15
    return np.moveaxis(nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), -1, axis)


def scaled_product(
    x_TD: jax.Array,
    kernel: jax.Array,
    scale_O: jax.Array,
    *,
    transposed: bool = False,
    platform: str = "cpu",
) -> jax.Array:
    """Multiplies x [T, in] with a stored matrix: [T, out] in x's type. A uint8 matrix holds int4
    pairs if it has half as many entries as inputs, and fp8 otherwise."""
    if traits_of(platform).stores_bits:
        y_TO = _by_tiles(x_TD, kernel, transposed)
    else:
        y_TO = _sums(x_TD, kernel, transposed)
    return (y_TO * scale_O[None, :]).astype(x_TD.dtype)


def widened(kernel: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Converts quantized values exactly to the activations' type. Packed pairs of int4 are not
    supported."""
    if kernel.dtype == jnp.uint8:
        kernel = lax.bitcast_convert_type(kernel, jnp.float8_e4m3fn)
    return kernel.astype(dtype)


def halves(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unpacks bytes into their low halves and their high halves, as int8."""
    both, four = lax.bitcast_convert_type(packed, jnp.int8), jnp.int8(4)
    return (both << four) >> four, both >> four


def _sums(x_TD: jax.Array, kernel: jax.Array, transposed: bool) -> jax.Array:
    inputs = kernel.shape[1 if transposed else 0]
    if kernel.dtype == jnp.uint8 and 2 * inputs == x_TD.shape[1]:
        low, high = (half.astype(x_TD.dtype) for half in halves(kernel))
        return _dot(x_TD[:, 0::2], low, transposed) + _dot(x_TD[:, 1::2], high, transposed)
    return _dot(x_TD, widened(kernel, x_TD.dtype), transposed)


def _dot(x_TD: jax.Array, kernel: jax.Array, transposed: bool) -> jax.Array:
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(x_TD, kernel, contracted, preferred_element_type=jnp.float32)


def _by_tiles(x_TD: jax.Array, kernel: jax.Array, transposed: bool) -> jax.Array:
    rows, depth = x_TD.shape
    if rows == 1:  # see `linear._bfloat16_on_cpu`
        two_rows = lax.optimization_barrier(jnp.concatenate((x_TD, x_TD)))
        return _by_tiles(two_rows, kernel, transposed)[:1]
    axis = 0 if transposed else 1
    columns, wide = kernel.shape[axis], max(1, _TILE_VALUES // depth)
    if wide >= columns:
        return _sums(x_TD, kernel, transposed)

    def one_tile(tile: jax.Array, y_TO: jax.Array) -> jax.Array:
        first = jnp.minimum(tile * wide, columns - wide)
        part = _sums(x_TD, lax.dynamic_slice_in_dim(kernel, first, wide, axis), transposed)
        return lax.dynamic_update_slice(y_TO, part, (0, first))

    empty = jnp.zeros((rows, columns), jnp.float32)
    return lax.fori_loop(0, -(-columns // wide), one_tile, empty)

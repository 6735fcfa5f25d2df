"""How arrays lie in device memory: the order of their axes, for weights and pages, and where an
array of the host must begin.

XLA chooses an order by an array's shape. Where a head is narrower than a TPU's 128 lanes it makes
the page number the innermost axis, and each program would copy the pool into another order and
back. On such platforms (`PlatformTraits.row_major`) weights and pages are row-major at the border
of every program, and must be created in this order: a program rejects an array of another one."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding

from jdisagg.layout.platforms import traits_of

ALIGNMENT = 64  # bytes; XLA:CPU aliases a buffer that begins at a multiple of it


def axis_order(axes: int) -> tuple[int, ...]:
    """Returns the axes of an array of this rank from the outermost to the innermost."""
    return tuple(range(axes))


def kept_format(axes: int, sharding: NamedSharding, platform: str) -> Any:
    """Returns the sharding of a weight or a page array, with the order of its axes where the
    platform needs one. JAX accepts the result wherever it accepts a sharding."""
    if axes < 2 or not traits_of(platform).row_major:
        return sharding
    return Format(Layout(axis_order(axes)), sharding)


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns an array of memory that XLA:CPU can use without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(nbytes + ALIGNMENT, np.uint8)
    first = -buffer.ctypes.data % ALIGNMENT
    return buffer[first : first + nbytes].view(dtype).reshape(shape)

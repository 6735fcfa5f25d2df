"""Memory layout of arrays: the order of the axes of weights and pages in device memory, and the
alignment of host arrays.

For heads narrower than a TPU's 128 lanes it makes the page number the innermost axis, and each
program would copy the pool into another order and back. On such platforms
(`PlatformTraits.row_major`) weights and pages are row-major at the border of every program. They
must be created in this order, because a program rejects arrays in another order."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding

from jdisagg.layout.platforms import traits_of

ALIGNMENT = 64  # bytes; XLA:CPU aliases a buffer that begins at a multiple of it


def axis_order(axes: int) -> tuple[int, ...]:
    return tuple(range(axes))


def kept_format(axes: int, sharding: NamedSharding, platform: str) -> Any:
    """Returns the sharding of a weight or page array, with the order of its axes on platforms that
    need it."""
    if axes < 2 or not traits_of(platform).row_major:
        return sharding
    return Format(Layout(axis_order(axes)), sharding)


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialised host array, aligned so that XLA:CPU can use it without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(nbytes + ALIGNMENT, np.uint8)
    first = -buffer.ctypes.data % ALIGNMENT
    return buffer[first : first + nbytes].view(dtype).reshape(shape)

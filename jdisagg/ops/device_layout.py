"""The order in which an array's axes lie in device memory, for weights and pages.

XLA chooses an order by an array's shape. Where a head is narrower than a TPU's 128 lanes it makes
the page number the innermost axis, and each program would copy the pool into another order and
back. On such platforms (`PlatformTraits.row_major`) weights and pages are row-major at the border
of every program, and must be created in this order: a program rejects an array of another one."""

from typing import Any

from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding

from jdisagg.layout.platforms import traits_of


def axis_order(axes: int) -> tuple[int, ...]:
    """Returns the axes of an array of this rank from the outermost to the innermost."""
    return tuple(range(axes))


def kept_format(axes: int, sharding: NamedSharding, platform: str) -> Any:
    """Returns the sharding of a weight or a page array, with the order of its axes where the
    platform needs one. JAX accepts the result wherever it accepts a sharding."""
    if axes < 2 or not traits_of(platform).row_major:
        return sharding
    return Format(Layout(axis_order(axes)), sharding)

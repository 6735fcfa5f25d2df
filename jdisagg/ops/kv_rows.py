"""Converts between components of the KV cache (such as keys and values) and the uniform rows of the
blocks in which KV is transferred. `layout/kv_spec.py` defines both. Works on local shards inside
`shard_map` over the mesh axes ("dp", "kv", "rep").

A component [k, T, w] holds a device's k heads of w values for T tokens. If other components have
heads, a component without heads is divided along its values: each kv shard sends one part of the
values, and `from_rows` gathers the parts."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jdisagg.layout.kv_spec import KVComponent, KVLayer, KVSpec


def to_rows(
    part_KTH: jax.Array, part: KVComponent, spec: KVSpec, *, scatter: bool = True
) -> jax.Array:
    """Returns the rows [R, K, T, H] of one component on this device. `scatter` matters only for a
    component that is divided among kv shards: it means that `part_KTH` holds all values, of which
    this device's part is selected. Without `scatter`, `part_KTH` holds this device's part only."""
    values = _retyped(part_KTH, spec.row_dtype)
    rows, width, tokens = spec.rows_of(part), spec.row_width, values.shape[1]
    if spec.is_cut(part):
        if scatter:
            size = values.shape[2] // lax.axis_size("kv")
            values = lax.dynamic_slice_in_dim(values, lax.axis_index("kv") * size, size, axis=2)
        cut = values.reshape(tokens, -1, rows, width)
        return cut.transpose(2, 1, 0, 3)
    if rows == 1:
        return values[None]
    parts = values.shape[2] // width
    cut = values.reshape(-1, rows // parts, tokens, parts, width)
    return cut.transpose(1, 3, 0, 2, 4).reshape(rows, -1, tokens, width)


def from_rows(
    rows_RKTH: jax.Array, part: KVComponent, spec: KVSpec, *, gather: bool = True
) -> jax.Array:
    """Returns the component [k, T, w] of these rows, in the component's type. For a component that
    is divided among kv shards, `gather` collects the parts of all devices. Without `gather`, this
    device's part is returned."""
    rows, heads, tokens, width = rows_RKTH.shape
    if spec.is_cut(part):
        whole = lax.all_gather(rows_RKTH, "kv", axis=1, tiled=True) if gather else rows_RKTH
        values = whole.transpose(2, 1, 0, 3).reshape(1, tokens, -1)
    elif rows == 1:
        values = rows_RKTH[0]
    else:
        each = max(1, part.heads) // spec.row_heads  # component heads per row head
        cut = rows_RKTH.reshape(each, rows // each, heads, tokens, width)
        values = cut.transpose(2, 0, 3, 1, 4).reshape(heads * each, tokens, -1)
    return _retyped(values, spec.dtype_of(part))


def block_of(
    layers: Sequence[KVLayer],
    parts: Sequence[Sequence[jax.Array]],
    spec: KVSpec,
    *,
    scatter: bool = True,
) -> jax.Array:
    """Returns one block [R, K, T, H]: the rows of all KV components of `layers`. `parts` has the
    arrays of each layer's components."""
    return jnp.concatenate(
        [
            to_rows(array, part, spec, scatter=scatter)
            for layer, arrays in zip(layers, parts, strict=True)
            for part, array in zip(layer.components, arrays, strict=True)
        ]
    )


def components_of(
    block_RKTH: jax.Array, layers: Sequence[KVLayer], spec: KVSpec, *, gather: bool = True
) -> Iterator[jax.Array]:
    """Yields the KV components of `layers`, in order, from a block with all of their rows. Inverse
    of `block_of`."""
    first = 0
    for layer in layers:
        for part in layer.components:
            rows = spec.rows_of(part)
            yield from_rows(block_RKTH[first : first + rows], part, spec, gather=gather)
            first += rows


def _retyped(values: jax.Array, dtype: str) -> jax.Array:
    wanted, size = jnp.dtype(dtype), values.dtype.itemsize
    if values.dtype == wanted:
        return values
    if wanted.itemsize > size:
        values = values.reshape(*values.shape[:2], -1, wanted.itemsize // size)
    return lax.bitcast_convert_type(values, wanted).reshape(*values.shape[:2], -1)

"""Reshards a loaded model on the same or other devices of this process.

No checkpoint file is read. Parameters are copied one after the other from their old sharding to
their new sharding, device to device. Each old array is freed before the next parameter is copied,
so extra memory is at most twice the size of one parameter. Padding of the vocabulary depends on the
tensor-parallel size, so it is removed and recreated as zeros."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jdisagg.errors import LayoutError
from jdisagg.layout.axes import Layout
from jdisagg.model_api import Device
from jdisagg.ops.parameters import layout_mesh, weight_formats
from models.checkpoint import LoadedModel
from models.decoder import abstract_model
from models.parameter_tree import with_arrays


def relayout(loaded: LoadedModel, layout: Layout, devices: Sequence[Device]) -> LoadedModel:
    """Reshards the weights to `layout`, on exactly as many `devices`. Blocks until done.

    Donates `loaded`, which must not be used afterwards. Other references to its arrays keep their
    memory in use. Raises `LayoutError` before anything is transferred."""
    config, dtype = loaded.model.config, loaded.model.kv_spec.dtype
    config.check(layout)
    if layout.pp > 1 or loaded.later:
        raise LayoutError(
            f"layout {layout}: weights of pipeline stages are not resharded in place; load them"
        )
    mesh = layout_mesh(layout, config.kv_heads, devices)
    model = abstract_model(
        config,
        dtype=dtype,
        platform=devices[0].platform,
        tp=layout.tp,
        weights=loaded.model.weights,
    )
    targets = [leaf.shape for leaf in jax.tree.leaves(nnx.state(model))]
    old = jax.tree.leaves(nnx.state(loaded.model))
    nnx.update(
        loaded.model,
        jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), nnx.state(loaded.model)
        ),
    )
    old.reverse()
    moved: list[jax.Array] = []
    for shape, sharding in zip(targets, weight_formats(model, mesh, layout), strict=True):
        array = _resized(old.pop(), shape, config.vocabulary)
        moved.append(jax.device_put(array, sharding))
        del array
        moved[-1].block_until_ready()
    return LoadedModel(with_arrays(model, moved), mesh, layout)


def _resized(array: jax.Array, shape: tuple[int, ...], vocabulary: int) -> jax.Array:
    """The array is first replicated on the old mesh, because the new padded size may not be
    divisible by the old number of shards."""
    if array.shape == shape:
        return array
    assert isinstance(array.sharding, NamedSharding)
    padded = [
        at
        for at, (ours, theirs) in enumerate(zip(array.shape, shape, strict=True))
        if ours != theirs
    ]
    assert len(padded) == 1, "only the vocabulary is padded"
    at = padded[0]

    def resize(values: jax.Array) -> jax.Array:
        real = jax.lax.slice_in_dim(values, 0, vocabulary, axis=at)
        return jnp.pad(
            real, [(0, size - have) for size, have in zip(shape, real.shape, strict=True)]
        )

    return jax.jit(resize, out_shardings=NamedSharding(array.sharding.mesh, PartitionSpec()))(array)

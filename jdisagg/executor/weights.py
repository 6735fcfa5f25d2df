"""A model's weights as arguments of programs: a flat tuple of arrays for each part, merged back
into modules while tracing.

A part is the stem or one layer. Layers of the same structure have equal `structure`, so that one
compiled program serves every layer group of that structure. No weight is copied."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jdisagg.layout.axes import MESH_AXES, TP_AXES, Layout
from jdisagg.model_api import Model, Shards
from jdisagg.ops.parameters import param_specs


@dataclass(frozen=True)
class Part:
    """One module: its arrays in leaf order, their partitioning, and its structure without
    arrays."""

    leaves: tuple[jax.Array, ...]
    specs: tuple[PartitionSpec, ...]
    graphdef: object
    treedef: object

    @property
    def structure(self) -> tuple[object, ...]:
        """A key that is equal for parts that one program can serve."""
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in self.leaves)
        return (self.graphdef, self.treedef, shapes, self.specs)

    def merge(self, leaves: Sequence[jax.Array]) -> nnx.Module:
        """Returns the module around `leaves`, which may be local or traced."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Weights:
    """The parts of a model, and the `width` and `dtype` of activations between layers."""

    stem: Part
    layers: tuple[Part, ...]
    width: int
    dtype: jnp.dtype


def split_model(model: Model, layout: Layout) -> Weights:
    """Splits a loaded model into parts that share its arrays."""
    stem, layers = _part(model.stem, layout), tuple(_part(layer, layout) for layer in model.layers)
    x = jax.eval_shape(
        lambda leaves, tokens: stem.merge(leaves).embed(tokens, Shards()),  # type: ignore[attr-defined]
        stem.leaves,
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    return Weights(stem, layers, x.shape[-1], x.dtype)


def _part(module: object, layout: Layout) -> Part:
    assert isinstance(module, nnx.Module)
    graphdef, state = nnx.split(module)
    leaves, treedef = jax.tree.flatten(state)
    return Part(tuple(leaves), param_specs(module, layout), graphdef, treedef)


def mesh_shards(mesh: Mesh, layout: Layout, platform: str) -> Shards:
    """Returns the axis names that programs on this mesh use. Axes of one device are left out, so
    that they need no collective."""

    def real(axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if mesh.shape[axis] > 1)

    assert mesh.axis_names == MESH_AXES
    return Shards(
        tp=real(TP_AXES),
        dp=real(("dp",)),
        ep=real(layout.expert_axes()),
        platform=platform,
        device_kind=str(mesh.devices.flat[0].device_kind),
    )

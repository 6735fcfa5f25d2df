"""Passes a model's weights to programs. Each part of the model is passed as a flat tuple of arrays,
which is merged into a module again when the program is traced.

A part is one layer, or the rest of the model outside the layers (stem). Layers of the same form
have equal `structure`, so that they can share a compiled program. No weight is copied."""

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
    """One module of the model: its arrays, their PartitionSpecs, and the module's structure without
    arrays."""

    leaves: tuple[jax.Array, ...]
    specs: tuple[PartitionSpec, ...]
    graphdef: object
    treedef: object

    @property
    def structure(self) -> tuple[object, ...]:
        """Returns a key that is equal for parts that can share a program."""
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in self.leaves)
        return (self.graphdef, self.treedef, shapes, self.specs)

    def merge(self, leaves: Sequence[jax.Array]) -> nnx.Module:
        """Rebuilds the module around `leaves`, which may be a device's shards or traced arrays."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Weights:
    """All parts of a model, and the `width` and `dtype` of the activations between its layers."""

    stem: Part
    layers: tuple[Part, ...]
    width: int
    dtype: jnp.dtype


def split_model(model: Model, layout: Layout) -> Weights:
    """Splits a loaded model into its parts. The parts share the model's arrays."""
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
    """Returns the names of the mesh axes that programs on this mesh use. Axes of size one are
    omitted, so that they cause no collective."""

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

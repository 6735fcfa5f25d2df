"""Passes a model's weights to programs. Each part of the model is passed as a flat tuple of arrays,
which is merged into a module again when the program is traced.

A part is one layer, or the rest of the model outside the layers (stem). Layers of the same form
have equal `structure`, so that they can share a compiled program. No weight is copied."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jdisagg.layout.axes import MESH_AXES, TP_AXES, Layout
from jdisagg.model_api import AdapterSize, Model, ModulePath, Shards
from jdisagg.ops.parameters import param_specs


class StackPlace(NamedTuple):
    """One stack of adapter factors among the leaves of a part.

    Attributes:
        factor: "a" or "b".
        slot_axis: Dimension of the slots.
    """

    leaf: int
    module: ModulePath
    factor: str
    slot_axis: int


@dataclass
class Part:
    """`stacks` are the leaves that hold adapters. Only these leaves change."""

    leaves: tuple[jax.Array, ...]
    specs: tuple[PartitionSpec, ...]
    graphdef: object
    treedef: object
    stacks: tuple[StackPlace, ...] = ()

    @cached_property
    def structure(self) -> "Structure":
        """Key by which programs are shared: parts with the same key run in the same program."""
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in self.leaves)
        return _structure((self.graphdef, self.treedef, shapes, self.specs))

    def merge(self, leaves: Sequence[jax.Array]) -> nnx.Module:
        """Rebuilds the module around `leaves`, which may be a device's shards or traced arrays."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Structure:
    """Everything of a part on which its programs depend. Equal structures share one object and are
    compared by identity, because to hash a structure takes 0.1 ms, for each layer of each chunk."""

    made_of: tuple[object, ...]


_structure = cache(Structure)


Zeros = Callable[[tuple[int, ...], jnp.dtype, PartitionSpec], jax.Array]
ADAPTER = "adapter"  # end of the names of modules with stacks (`Model.adapted_layers`)
NO_ADAPTERS = AdapterSize()


class VisionParts(NamedTuple):
    patches: Part
    blocks: tuple[Part, ...]
    merger: Part
    deep_mergers: tuple[Part, ...]
    deep_after: tuple[int, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for part in jax.tree.leaves(self) if isinstance(part, Part))


@dataclass(frozen=True)
class Weights:
    """All parts of a model, and the `width` and `dtype` of the activations between its layers.

    Attributes:
        stem: Embedding, and final norm and head if the instance has one pipeline stage.
        held: Indices of the layers on the mesh that uses these weights. With one pipeline stage,
            these are all layers.
        next_token: The layer that drafts tokens. KV of its own comes after the KV of `layers`.
        reads_tokens: Whether layers read the step's tokens and their embeddings.
    """

    stem: Part
    head: Part
    layers: tuple[Part, ...]
    width: int
    dtype: jnp.dtype
    held: range
    next_token: Part | None = None
    vision: VisionParts | None = None
    reads_tokens: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        head = () if self.head is self.stem else (self.head,)
        next_token = () if self.next_token is None else (self.next_token,)
        vision = () if self.vision is None else self.vision.parts
        return (self.stem, *head, *self.layers, *next_token, *vision)

    @property
    def begins(self) -> bool:
        return self.held.start == 0

    @property
    def ends(self) -> bool:
        return self.held.stop == len(self.layers)

    @property
    def edge(self) -> Part | None:
        """None on a mesh between the first and the last stage."""
        return self.stem if self.begins else self.head if self.ends else None

    @cached_property
    def taps(self) -> tuple[int, ...]:
        """Layers before which the activations are kept for the layer that drafts tokens."""
        part = self.next_token
        return () if part is None else part.merge(part.leaves).taps  # type: ignore[attr-defined]

    @cached_property
    def draft_layers(self) -> range:
        """Layers of the KV spec to whose KV the layer that drafts tokens attends: its own layer,
        which it also writes, or those of the model from the first that it reads to the last."""
        count, part = len(self.layers), self.next_token
        reads = () if part is None else part.merge(part.leaves).reads  # type: ignore[attr-defined]
        return range(min(reads), max(reads) + 1) if reads else range(count, count + 1)

    def of_stage(self, held: range) -> "Weights":
        return replace(self, held=held)

    def __getitem__(self, group: range) -> list[Part]:
        """A layer that drafts tokens and has KV has the index after the last layer."""
        every = self.layers if self.next_token is None else (*self.layers, self.next_token)
        return [every[index] for index in group]


class LayerCalls:
    """Computes the layers of one program. Layers of equal structure and form are traced and lowered
    once. XLA inlines the calls before it optimizes, so the compiled program is the same as that of
    unrolled layers.

    Args:
        compute: Function of a layer's part, a form (static) and arrays. It must return all that it
            computes, and may read arrays of the surrounding program.
        unrolled: Whether `compute` also passes arrays from layer to layer in other ways, so that
            each layer must be traced.
    """

    def __init__(self, compute: Callable[..., Any], unrolled: bool) -> None:
        self._compute, self._unrolled = compute, unrolled
        self._traced: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, part: Part, form: Hashable, *arrays: Any) -> Any:
        if self._unrolled:
            return self._compute(part, form, *arrays)
        key = part.structure, form
        if key not in self._traced:
            self._traced[key] = jax.jit(partial(self._compute, part, form))
        return self._traced[key](*arrays)


def split_model(
    model: Model, layout: Layout, adapters: AdapterSize = NO_ADAPTERS, zeros: Sequence[Zeros] = ()
) -> Weights:
    """Splits a loaded model into its parts. The parts share the model's arrays.

    Args:
        zeros: Creates the arrays of each layer's adapter slots from shape, dtype and PartitionSpec.
            None makes shapes only.
    """
    stem, modules = _part(model.stem, layout), model.layers
    x = jax.eval_shape(
        lambda leaves, tokens: stem.merge(leaves).embed(tokens, Shards()),  # type: ignore[attr-defined]
        stem.leaves,
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    if adapters.slots:
        modules = model.adapted_layers(
            adapters, lambda shape, _: jax.ShapeDtypeStruct(shape, x.dtype)
        )
    layers = tuple(_part(layer, layout) for layer in modules)
    for part, make in zip(layers, zeros, strict=False):
        leaves = list(part.leaves)
        for place in part.stacks:
            leaf = leaves[place.leaf]
            leaves[place.leaf] = make(leaf.shape, leaf.dtype, part.specs[place.leaf])
        part.leaves = tuple(leaves)
    next_token = None if model.next_token is None else _part(model.next_token, layout)
    head = stem if model.head is model.stem else _part(model.head, layout)
    held = range(len(layers))
    vision = None
    if (eyes := model.vision) is not None:
        blocks = tuple(_part(block, layout) for block in eyes.blocks)
        deep = tuple(_part(merger, layout) for merger in eyes.deep_mergers)
        patches, merger = _part(eyes.patches, layout), _part(eyes.merger, layout)
        vision = VisionParts(patches, blocks, merger, deep, eyes.deep_after)
    more = (held, next_token, vision, model.reads_tokens)
    return Weights(stem, head, layers, x.shape[-1], x.dtype, *more)


def _part(module: object, layout: Layout) -> Part:
    assert isinstance(module, nnx.Module)
    graphdef, state = nnx.split(module)
    leaves, treedef = jax.tree.flatten(state)
    paths = [tuple(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    stacks = [
        StackPlace(leaf, path[:-1], path[-1], leaves[leaf].ndim - (2 if path[-1] == "a" else 3))
        for leaf, path in enumerate(paths)
        if len(path) > 1 and path[-2].endswith(ADAPTER)
    ]
    return Part(tuple(leaves), param_specs(module, layout), graphdef, treedef, tuple(stacks))


def mesh_shards(mesh: Mesh, layout: Layout, platform: str) -> Shards:
    """Axes of size one are omitted, so that they cause no collective."""

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

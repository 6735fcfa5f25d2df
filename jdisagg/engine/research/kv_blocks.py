"""The blocks of which a KV cache in the hand is made: cut along the tokens, put together, and made
from arrays that somebody brings.

A block is what a channel offers: a global array [dp, rows, K, T, H] of one layer's components (see
`layout/kv_spec.py`), of which dp rank `rank` counts. It knows arrays and where they lie; nothing of
token ids, executors, channels or pages.

Everything works on each device's own shard, by one program a shape. Nothing moves between devices,
but for what `put_layer` is given elsewhere."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdisagg.engine.limits import GRANULE_TOKENS
from jdisagg.layout.kv_spec import KVComponent, KVLayer, KVSpec
from jdisagg.model_api import Device
from jdisagg.ops.kv_rows import block_of, components_of
from jdisagg.scheduler.blocks import split_blocks
from jdisagg.transfer.channel import block_sharding

# A component of one layer [K, T, H], [1, T, H] where it has no heads.
LayerArray = jax.Array | np.ndarray
# of a block of one rank, on the mesh of its devices alone
_RANK_BLOCK = PartitionSpec(None, None, "kv")


@dataclass(frozen=True, slots=True, eq=False)
class KVBlock:
    """`array` [dp, rows, K, T, H]: layer `layer`, positions [start, start + valid_tokens); the rest
    of T is padding."""

    layer: int
    start: int
    valid_tokens: int
    array: jax.Array

    @property
    def block_tokens(self) -> int:
        return self.array.shape[3]

    @property
    def stop(self) -> int:
        return self.start + self.valid_tokens

    def within(self, start: int, stop: int) -> "Iterator[KVBlock]":
        """What of it is of positions [start, stop): itself, where that is all; else in blocks of
        the lengths that channels know."""
        first, last = max(start, self.start), min(stop, self.stop)
        if (first, last) == (self.start, self.stop):
            yield self
            return
        for offset, size, valid in split_blocks(max(0, last - first), GRANULE_TOKENS):
            at = first - self.start + offset
            yield KVBlock(
                self.layer, first + offset, valid, _cut(self.array, at, size, self.array.sharding)
            )


@dataclass(frozen=True, slots=True)
class KVPlace:
    """Where a sequence's blocks lie: dp rank `rank` of `mesh` ("dp", "kv", "rep")."""

    mesh: Mesh
    rank: int
    spec: KVSpec

    @property
    def devices(self) -> list[Device]:
        """Of the rank."""
        return list(self.mesh.devices[self.rank].flat)

    @property
    def rank_mesh(self) -> Mesh:
        return Mesh(self.mesh.devices[self.rank], ("kv", "rep"))

    def spec_of(self, part: KVComponent) -> PartitionSpec:
        """How a component [K, T, H] lies on the rank's devices: heads over "kv"; one that is cut
        lies in parts of its values."""
        if self.spec.is_cut(part):
            return PartitionSpec(None, None, "kv")
        return PartitionSpec("kv" if part.heads else None)

    def shape(self, part: KVComponent, tokens: int) -> tuple[int, int, int]:
        return max(1, part.heads), tokens, part.width

    def read_layer(self, layer: int, blocks: Sequence[KVBlock]) -> dict[str, jax.Array]:
        """The components of a layer by name, [K, T, H], of the tokens of these blocks, which are in
        order."""
        kind = self.spec.layers[layer]
        here = tuple(self._of_rank(block.array) for block in blocks)
        arrays = _read(here, tuple(block.valid_tokens for block in blocks), kind, self)
        return {part.name: array for part, array in zip(kind.components, arrays, strict=True)}

    def put_layer(
        self, layer: int, start: int, components: Mapping[str, LayerArray]
    ) -> list[KVBlock]:
        """Blocks of a layer, positions from `start` on, from all its components [K, T, H] in their
        types, which may lie anywhere."""
        kind, mesh = self.spec.layers[layer], self.rank_mesh
        placed = tuple(
            jax.device_put(components[part.name], NamedSharding(mesh, self.spec_of(part)))
            for part in kind.components
        )
        cuts = split_blocks(placed[0].shape[1], GRANULE_TOKENS)
        return [
            KVBlock(layer, start + offset, valid, self._among_ranks(array))
            for (offset, _, valid), array in zip(cuts, _put(placed, kind, self), strict=True)
        ]

    def _of_rank(self, block: jax.Array) -> jax.Array:
        """Of a block, the rank's own part [1, R, K, T, H], as it lies."""
        shards = {shard.device: shard.data for shard in block.addressable_shards}
        sharding = NamedSharding(self.rank_mesh, _RANK_BLOCK)
        return jax.make_array_from_single_device_arrays(
            (1, *block.shape[1:]), sharding, [shards[device] for device in self.devices]
        )

    def _among_ranks(self, block: jax.Array) -> jax.Array:
        """The other way round; of other ranks there are zeros."""
        sharding = block_sharding(self.mesh)
        shape = (self.mesh.shape["dp"], *block.shape[1:])
        nothing = sharding.shard_shape(shape)
        shards = {shard.device: shard.data for shard in block.addressable_shards}
        arrays = [
            shards[device] if device in shards else jnp.zeros(nothing, block.dtype, device=device)
            for device in self.mesh.devices.flat
        ]
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


@partial(jax.jit, static_argnames=("valid_tokens", "kind", "place"))
def _read(
    blocks: tuple[jax.Array, ...], valid_tokens: tuple[int, ...], kind: KVLayer, place: KVPlace
) -> tuple[jax.Array, ...]:
    """A layer's components [K, T, H], each device its own part, from a rank's blocks."""

    def body(*blocks_1RKTH: jax.Array) -> tuple[jax.Array, ...]:
        valid = [
            block[0, :, :, :count] for block, count in zip(blocks_1RKTH, valid_tokens, strict=True)
        ]
        rows_RKTH = jnp.concatenate(valid, axis=2)
        return tuple(components_of(rows_RKTH, [kind], place.spec, gather=False))

    return jax.shard_map(
        body,
        mesh=place.rank_mesh,
        in_specs=(_RANK_BLOCK,) * len(blocks),
        out_specs=tuple(place.spec_of(part) for part in kind.components),
        check_vma=False,
    )(*blocks)


@partial(jax.jit, static_argnames=("kind", "place"))
def _put(components: tuple[jax.Array, ...], kind: KVLayer, place: KVPlace) -> tuple[jax.Array, ...]:
    """The other way round: blocks [1, R, K, T, H], of which the last is padded."""
    cuts = tuple(split_blocks(components[0].shape[1], GRANULE_TOKENS))

    def body(*parts_KTH: jax.Array) -> tuple[jax.Array, ...]:
        rows_RKTH = block_of([kind], [parts_KTH], place.spec, scatter=False)
        return tuple(
            jnp.pad(
                rows_RKTH[None, :, :, offset : offset + valid],
                ((0, 0),) * 3 + ((0, size - valid), (0, 0)),
            )
            for offset, size, valid in cuts
        )

    return jax.shard_map(
        body,
        mesh=place.rank_mesh,
        in_specs=tuple(place.spec_of(part) for part in kind.components),
        out_specs=(_RANK_BLOCK,) * len(cuts),
        check_vma=False,
    )(*components)


@partial(jax.jit, static_argnames=("tokens", "sharding"))
def _cut(block: jax.Array, start: int, tokens: int, sharding: NamedSharding) -> jax.Array:
    """`tokens` tokens of a block [dp, R, K, T, H] from `start` on; beyond its end, zeros."""
    padded = jnp.pad(block, ((0, 0),) * 3 + ((0, tokens), (0, 0)))
    part = lax.dynamic_slice_in_dim(padded, start, tokens, axis=3)
    return lax.with_sharding_constraint(part, sharding)

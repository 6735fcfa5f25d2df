"""Operations on the blocks of a KV cache: slices blocks by tokens, joins blocks, and builds blocks
from a caller's arrays.

A block has the form in which channels transfer KV: a global array [dp, rows, kv heads K, tokens T,
head size H] of one layer's components (see `layout/kv_spec.py`).

Each operation runs on each device's own shard, as one program per shape."""

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

# Dimensions of one layer's component [K, T, H], or [1, T, H] without heads.
LayerArray = jax.Array | np.ndarray
# Sharding of one dp rank's block on a mesh of only this rank's devices.
_RANK_BLOCK = PartitionSpec(None, None, "kv")


@dataclass(frozen=True, slots=True, eq=False)
class KVBlock:
    """The KV of one layer at positions [start, start + valid_tokens). `array` is [dp, rows, K, T,
    H]; tokens of T beyond `valid_tokens` are padding."""

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
        """Yields blocks with this block's tokens in positions [start, stop). Yields the block
        itself if all its tokens are in this range. Otherwise yields copies, in the lengths that
        channels support."""
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
    """Where the blocks of a sequence are: dp rank `rank` of `mesh`, which has axes ("dp", "kv",
    "rep")."""

    mesh: Mesh
    rank: int
    spec: KVSpec

    @property
    def devices(self) -> list[Device]:
        return list(self.mesh.devices[self.rank].flat)

    @property
    def rank_mesh(self) -> Mesh:
        return Mesh(self.mesh.devices[self.rank], ("kv", "rep"))

    def spec_of(self, part: KVComponent) -> PartitionSpec:
        """Returns the sharding of a component [K, T, H] over the devices of the dp rank. Heads are
        sharded over "kv". Components that are split along H are sharded along H instead."""
        if self.spec.is_cut(part):
            return PartitionSpec(None, None, "kv")
        return PartitionSpec("kv" if part.heads else None)

    def shape(self, part: KVComponent, tokens: int) -> tuple[int, int, int]:
        return max(1, part.heads), tokens, part.width

    def read_layer(self, layer: int, blocks: Sequence[KVBlock]) -> dict[str, jax.Array]:
        """Returns a layer's components [K, T, H] by name, joined from blocks in order."""
        kind = self.spec.layers[layer]
        here = tuple(self._of_rank(block.array) for block in blocks)
        arrays = _read(here, tuple(block.valid_tokens for block in blocks), kind, self)
        return {part.name: array for part, array in zip(kind.components, arrays, strict=True)}

    def put_layer(
        self, layer: int, start: int, components: Mapping[str, LayerArray]
    ) -> list[KVBlock]:
        """Returns blocks of a layer at positions from `start` on. `components` are all components
        [K, T, H] of the layer, in the layer's dtypes and on any device."""
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
        shards = {shard.device: shard.data for shard in block.addressable_shards}
        sharding = NamedSharding(self.rank_mesh, _RANK_BLOCK)
        return jax.make_array_from_single_device_arrays(
            (1, *block.shape[1:]), sharding, [shards[device] for device in self.devices]
        )

    def _among_ranks(self, block: jax.Array) -> jax.Array:
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
    padded = jnp.pad(block, ((0, 0),) * 3 + ((0, tokens), (0, 0)))
    part = lax.dynamic_slice_in_dim(padded, start, tokens, axis=3)
    return lax.with_sharding_constraint(part, sharding)

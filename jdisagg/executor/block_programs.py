"""Programs that move blocks of KV in and out of a mesh's arrays: cut what is offered, insert what was pulled, extract, copy pages.

All are one program on the whole mesh (`shard_map`, equal explicit shardings, pages donated), so that no per-device executable is
built and no shard is donated on its own. Token ranges are cut to power-of-two lengths, so that shapes, and programs, are few.
Ranks that take no part get coordinates "nowhere" and write nothing.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jdisagg.executor.block_sums import first_component, first_head, over, rank_stamps, total
from jdisagg.executor.page_pool import PAGES_SPEC, LayerPages, PagePool
from jdisagg.executor.programs import BLOCK_SPEC, RANK, Programs
from jdisagg.layout.axes import MESH_AXES
from jdisagg.ops.checksum import bits_of
from jdisagg.ops.kv_pages import copy_pages, gather_tokens, insert_block
from jdisagg.scheduler.commands import ExtractBlock, InsertBlock
from jdisagg.transfer.channel import BlockStamp
from jdisagg.transfer.codec import Codec, codec

COPIES_PER_CALL = 8


class BlockPrograms:
    """Used by the dispatch thread alone."""

    def __init__(self, programs: Programs, pool: PagePool, groups: tuple[range, ...]) -> None:
        self._programs, self._pool, self._groups = programs, pool, groups
        self._ranks = programs.mesh.shape["dp"]

    def cut(self, block: jax.Array, rank: int, offset: int, tokens: int) -> jax.Array:
        """Tokens [offset, offset + tokens) of rank `rank` out of a chunk's block [ranks, C, K, T, H]; the other ranks' part is unspecified.

        A block that is wanted whole is returned as it is.
        """
        if block.shape[3] == tokens:
            return block

        def body(block: jax.Array, offset: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(block, offset[0], tokens, axis=3)

        offsets = np.zeros((self._ranks,), np.int32)
        offsets[rank] = offset
        on_mesh = self._programs.put(offsets)
        build = lambda: self._programs.compile(body, (block, on_mesh), (BLOCK_SPEC, RANK), BLOCK_SPEC)  # noqa: E731
        return self._programs.get(("cut", block.shape, str(block.dtype), tokens), build)(block, on_mesh)

    def insert(self, command: InsertBlock, arrays: tuple[jax.Array, ...]) -> jax.Array:
        """Writes a pulled block (`Pull.arrays()`: the block's heads in parts, each as its codec's leaves) into its pages and sums what
        then lies there. Returns uint32 [3], alike on all devices: the sum's two lanes, and how many found that something is broken."""
        group, how = self._groups[command.group], codec(command.codec)
        held = self._pool.layers[group.start : group.stop]
        stamp = self._stamp(group, command.checksum_key, command.start, command.valid_tokens)
        if how.lossy:
            stamp = stamp.of_offer(command.offer_id)
        inputs = (held, arrays, *self._place(command, stamp))
        key = ("insert", len(group), command.block_tokens, command.codec, len(arrays), arrays[0].shape)
        program = self._programs.get(key, lambda: self._build_insert(how, inputs))
        pages, found = program(*inputs)
        self._pool.put(group.start, pages)
        return found

    def _build_insert(self, how: Codec, inputs: tuple[Any, ...]) -> Any:
        programs, held, arrays = self._programs, inputs[0], inputs[1]

        def body(
            pages: list[LayerPages], arrays: tuple[jax.Array, ...], coordinates: jax.Array, stamps: jax.Array
        ) -> tuple[list[LayerPages], jax.Array]:
            page_T, slot_T, stamp_5 = coordinates[0, 0], coordinates[0, 1], stamps[0]
            block_CKTH, intact = _unpack(how, arrays, stamp_5, pages[0][0].shape[1], pages[0][0].dtype)
            # Senders' values are finite. Damaged ones may not be, and would outlive the pages' return: others multiply them by zero.
            block_CKTH = jnp.where(jnp.isfinite(block_CKTH), block_CKTH, jnp.zeros((), block_CKTH.dtype))
            parts = iter(block_CKTH)
            pages = [tuple(insert_block(part, next(parts), page_T, slot_T) for part in layer) for layer in pages]
            read_CKTH = jnp.stack([gather_tokens(part, page_T, slot_T) for layer in pages for part in layer])
            if how.lossy:
                valid_T = jnp.arange(read_CKTH.shape[2], dtype=jnp.uint32) < stamp_5[4]
                same = bits_of(read_CKTH) == bits_of(block_CKTH)
                intact &= jnp.all(same | ~valid_T[None, None, :, None])
            return pages, _found(programs, total(programs, read_CKTH, stamp_5), intact)

        page_specs = [tuple(PAGES_SPEC for _ in layer) for layer in held]
        in_specs = (page_specs, tuple(BLOCK_SPEC for _ in arrays), RANK, RANK)
        return self._programs.compile(body, inputs, in_specs, (page_specs, PartitionSpec()), donate=(0,))

    def extract(self, command: ExtractBlock) -> tuple[jax.Array, jax.Array, BlockStamp]:
        """A block [ranks, C, K, T, H] out of pages, zero where no token is valid (other sequences' KV stays here); its sum, as
        `insert` gives it; and its stamp."""
        group = self._groups[command.group]
        stamp = self._stamp(group, command.checksum_key, command.start, command.valid_tokens)
        held = self._pool.layers[group.start : group.stop]
        inputs = (held, *self._place(command, stamp))
        program = self._programs.get(("extract", len(group), command.block_tokens), lambda: self._build_extract(inputs))
        block, found = program(*inputs)
        return block, found, stamp

    def _build_extract(self, inputs: tuple[Any, ...]) -> Any:
        programs = self._programs

        def body(pages: list[LayerPages], coordinates: jax.Array, stamps: jax.Array) -> tuple[jax.Array, jax.Array]:
            page_T, slot_T, stamp_5 = coordinates[0, 0], coordinates[0, 1], stamps[0]
            read_CKTH = jnp.stack([gather_tokens(part, page_T, slot_T) for layer in pages for part in layer])
            valid_T = jnp.arange(read_CKTH.shape[2], dtype=jnp.uint32) < stamp_5[4]
            read_CKTH = jnp.where(valid_T[None, None, :, None], read_CKTH, jnp.zeros((), read_CKTH.dtype))
            return read_CKTH[None], _found(programs, total(programs, read_CKTH, stamp_5), jnp.bool_(True))

        page_specs = [tuple(PAGES_SPEC for _ in layer) for layer in inputs[0]]
        return self._programs.compile(body, inputs, (page_specs, RANK, RANK), (BLOCK_SPEC, PartitionSpec()))

    def _stamp(self, group: range, key: int, start: int, valid_tokens: int) -> BlockStamp:
        return BlockStamp(key, first_component(self._pool, group), start, valid_tokens)

    def _place(self, command: InsertBlock | ExtractBlock, stamp: BlockStamp) -> tuple[jax.Array, jax.Array]:
        """Page and slot of a block's tokens, and its stamp; nowhere, and no valid token, on the ranks that take no part."""
        tokens, start, valid, size = command.block_tokens, command.start, command.valid_tokens, self._pool.page_size
        coordinates = np.full((self._ranks, 2, tokens), self._pool.rank_rows, np.int32)
        coordinates[command.rank, 0, :valid] = np.asarray(command.pages, np.int32)[np.arange(start, start + valid) // size]
        coordinates[command.rank, 1] = (start + np.arange(tokens)) % size
        return self._programs.put((coordinates, rank_stamps(self._ranks, command.rank, stamp)))

    def copy(self, copies: tuple[tuple[int, int, int], ...]) -> None:
        """Copies pages (rank, source, destination) in all layers, a fixed number a call."""
        for first in range(0, len(copies), COPIES_PER_CALL):
            pairs = np.full((self._ranks, 2, COPIES_PER_CALL), self._pool.rank_rows, np.int32)
            pairs[:, 0] = 0
            for column, (rank, source, destination) in enumerate(copies[first : first + COPIES_PER_CALL]):
                pairs[rank, :, column] = source, destination
            on_mesh = self._programs.put(pairs)
            program = self._programs.get(("copy",), lambda on_mesh=on_mesh: self._build_copy(on_mesh))
            self._pool.put(0, program(self._pool.layers, on_mesh))

    def _build_copy(self, pairs: jax.Array) -> Any:
        def body(layers: list[LayerPages], pairs: jax.Array) -> list[LayerPages]:
            return [tuple(copy_pages(part, pairs[0, 0], pairs[0, 1]) for part in layer) for layer in layers]

        specs = [tuple(PAGES_SPEC for _ in layer) for layer in self._pool.layers]
        return self._programs.compile(body, (self._pool.layers, pairs), (specs, RANK), specs, donate=(0,))


def _unpack(how: Codec, arrays: Sequence[jax.Array], stamp_5: jax.Array, local_heads: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Inside a program: this device's heads of a block [C, K, T, H] from its parts, and whether all are what was packed."""
    parts = local_heads // arrays[0].shape[2]
    per_part = len(arrays) // parts
    head, blocks, intact = first_head(local_heads), [], jnp.bool_(True)
    for index in range(parts):
        leaves = arrays[index * per_part : (index + 1) * per_part]
        intact &= how.verify(leaves, stamp_5, head + index * arrays[0].shape[2])
        blocks.append(how.decode(leaves, dtype)[0])
    return jnp.concatenate(blocks, axis=1), intact


def _found(programs: Programs, sum_2: jax.Array, intact: jax.Array) -> jax.Array:
    """Inside a program: uint32 [3], alike on all devices. Replicas that differ are broken, for only one of them is read by the host."""
    if programs.mesh.shape["rep"] > 1:
        intact &= jnp.all(lax.pmax(sum_2, "rep") == lax.pmin(sum_2, "rep"))
    broken = over(programs, (~intact).astype(jnp.uint32), MESH_AXES)
    return jnp.concatenate([sum_2, broken[None]])

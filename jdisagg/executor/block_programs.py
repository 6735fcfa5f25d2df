"""Programs that move blocks of KV in and out of a mesh's arrays: cut what is offered, insert what
was pulled, extract, copy pages.

All are one program on the whole mesh (`shard_map`, equal explicit shardings, pages donated), so
that no per-device executable is built and no shard is donated on its own. Token ranges are cut to
power-of-two lengths, so that shapes, and programs, are few. Ranks that take no part get coordinates
"nowhere" and write nothing."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdisagg.executor.block_sums import STAMP_WORDS, found_in, found_spec, local_sum, rank_stamps
from jdisagg.executor.insert_program import BlockForm, Places, write_and_read, write_whole
from jdisagg.executor.page_pool import LayerPages, PagePool, PageView
from jdisagg.executor.programs import BLOCK_SPEC, RANK, Programs
from jdisagg.layout.kv_spec import KVLayer
from jdisagg.messages.step_commands import ExtractBlock, InsertBlock
from jdisagg.ops.kv_pages import copy_pages, gather_tokens
from jdisagg.ops.kv_rows import block_of
from jdisagg.transfer.channel import BlockStamp
from jdisagg.transfer.codec import Codec, codec

COPIES_PER_CALL = 8


class BlockPrograms:
    """Of one pool: of pages, of states, or of the pages of layers with a window. Used by the
    dispatch thread alone."""

    def __init__(
        self,
        programs: Programs,
        pool: PagePool | PageView,
        groups: tuple[range, ...],
        name: str = "kv",
    ) -> None:
        """`name`: of the pool, whose programs are its own."""
        self._programs, self._pool, self._groups = programs, pool, groups
        self._name = name
        self._ranks = programs.mesh.shape["dp"]

    def cut(self, blocks: Sequence[jax.Array], rank: int, offset: int, tokens: int) -> jax.Array:
        """Tokens [offset, offset + tokens) of rank `rank` out of a chunk's blocks [ranks, C, K, T,
        H] of consecutive layer groups, as one block with all their components; the other ranks'
        part is unspecified.

        A block that is wanted whole is returned as it is."""
        if len(blocks) == 1 and blocks[0].shape[3] == tokens:
            return blocks[0]

        def body(blocks: Sequence[jax.Array], offset: jax.Array) -> jax.Array:
            return jnp.concatenate(
                [lax.dynamic_slice_in_dim(block, offset[0], tokens, axis=3) for block in blocks],
                axis=1,
            )

        offsets = np.zeros((self._ranks,), np.int32)
        offsets[rank] = offset
        on_mesh, shapes = self._programs.put(offsets), tuple(block.shape for block in blocks)
        inputs = (list(blocks), on_mesh)
        build = lambda: self._programs.compile(  # noqa: E731
            body, inputs, ([BLOCK_SPEC] * len(blocks), RANK), BLOCK_SPEC
        )
        return self._programs.get(("cut", shapes, str(blocks[0].dtype), tokens), build)(*inputs)

    def insert(self, command: InsertBlock, arrays: tuple[jax.Array, ...]) -> jax.Array:
        """Writes a pulled block (`Pull.arrays()`: the block's heads in parts, each as its codec's
        leaves) into its pages and sums what then lies there. Returns what `block_sums.Found` reads.
        """
        layers, how = self.layers(command.group, command.groups), codec(command.codec)
        kinds = self._kinds(layers)
        held = self._pool.layers[layers.start : layers.stop]
        stamp = self._stamp(layers, command.checksum_key, command.start, command.valid_tokens)
        if how.lossy:
            stamp = stamp.of_offer(command.offer_id)
        inputs = (held, arrays, self._place(command, stamp))
        key = (
            "insert",
            self._name,
            kinds,
            command.block_tokens,
            command.codec,
            len(arrays),
            arrays[0].shape,
        )
        program = self._programs.get(key, lambda: self._build_insert(how, inputs, layers))
        pages, found = program(*inputs)
        self._pool.put(layers.start, pages)
        return found

    def layers(self, group: int, groups: int) -> range:
        """The layers of so many layer groups from `group` on."""
        return range(self._groups[group].start, self._groups[group + groups - 1].stop)

    def _kinds(self, layers: range) -> tuple[KVLayer, ...]:
        return self._pool.spec.layers[layers.start : layers.stop]

    def _build_insert(self, how: Codec, inputs: tuple[Any, ...], layers: range) -> Any:
        programs, arrays, spec = self._programs, inputs[1], self._pool.spec
        kinds = self._kinds(layers)
        # what is gathered over kv is gathered once, not in a loop
        gathers = any(spec.is_cut(part) for layer in kinds for part in layer.components)
        write = write_whole if programs.platform == "gpu" or gathers else write_and_read

        def body(
            pages: list[LayerPages], arrays: tuple[jax.Array, ...], words: jax.Array
        ) -> tuple[list[LayerPages], jax.Array]:
            form = BlockForm(spec, kinds, how)
            pages, sum_2, intact = write(pages, arrays, self._places(words), form)
            return pages, found_in(programs, sum_2, intact)

        page_specs = self._pool.specs(layers)
        in_specs = (page_specs, tuple(BLOCK_SPEC for _ in arrays), RANK)
        return self._programs.compile(
            body, inputs, in_specs, (page_specs, found_spec(programs)), donate=(0,)
        )

    def extract(self, command: ExtractBlock) -> tuple[jax.Array, jax.Array, BlockStamp]:
        """A block [ranks, C, K, T, H] out of pages, zero where no token is valid (other sequences'
        KV stays here); its sum, as `insert` gives it; and its stamp."""
        layers = self.layers(command.group, command.groups)
        stamp = self._stamp(layers, command.checksum_key, command.start, command.valid_tokens)
        held = self._pool.layers[layers.start : layers.stop]
        inputs = (held, self._place(command, stamp))
        tokens = command.block_tokens
        program = self._programs.get(
            ("extract", self._name, self._kinds(layers), tokens),
            lambda: self._build_extract(inputs, tokens, layers),
        )
        block, found = program(*inputs)
        return block, found, stamp

    def _build_extract(self, inputs: tuple[Any, ...], tokens: int, layers: range) -> Any:
        programs, kinds, spec = self._programs, self._kinds(layers), self._pool.spec

        def body(pages: list[LayerPages], words: jax.Array) -> tuple[jax.Array, jax.Array]:
            places, token_T = self._places(words), jnp.arange(tokens, dtype=jnp.int32)
            valid_T = token_T < places.valid
            page_T, slot_T = places.some(token_T, valid_T)
            read_CKTH = block_of(
                kinds,
                [[gather_tokens(part, page_T, slot_T) for part in layer] for layer in pages],
                spec,
            )
            read_CKTH = jnp.where(
                valid_T[None, None, :, None], read_CKTH, jnp.zeros((), read_CKTH.dtype)
            )
            return read_CKTH[None], found_in(
                programs, local_sum(read_CKTH, places.stamp_5, token_T, valid_T), jnp.bool_(True)
            )

        return self._programs.compile(
            body, inputs, (self._pool.specs(layers), RANK), (BLOCK_SPEC, found_spec(programs))
        )

    def _stamp(self, layers: range, key: int, start: int, valid_tokens: int) -> BlockStamp:
        return BlockStamp(key, self._pool.spec.first_row(layers.start), start, valid_tokens)

    def _place(
        self, command: InsertBlock | ExtractBlock, stamp: BlockStamp
    ) -> jax.Array | np.ndarray:
        """Where a block's tokens lie, as `_places` reads it: uint32 [ranks, words]. No token is
        valid on the ranks that take no part."""
        first, last = (
            at // self._pool.page_size
            for at in (command.start, command.start + command.valid_tokens - 1)
        )
        pages = command.pages[first : last + 1] if command.valid_tokens else ()
        # Else page 0, which is somebody's, would be written, read back and found right.
        assert command.valid_tokens <= command.block_tokens and len(pages) == (
            last - first + 1 if command.valid_tokens else 0
        ), command
        assert len(set(pages)) == len(pages), (
            f"the pages of a block must differ, and they are {pages}"
        )
        words = np.zeros(
            (self._ranks, STAMP_WORDS + 2 + (command.block_tokens - 1) // self._pool.page_size),
            np.uint32,
        )
        words[:, :STAMP_WORDS] = rank_stamps(self._ranks, command.rank, stamp)
        words[command.rank, STAMP_WORDS : STAMP_WORDS + len(pages)] = pages
        # The program takes them from the host itself: to put them there first would take half as
        # long again as calling it.
        return self._programs.put(words) if self._programs.spans_processes else words

    def _places(self, words: jax.Array) -> Places:
        """Inside a program."""
        return Places.of(words[0], self._pool.page_size, self._pool.rank_rows)

    def copy(self, copies: tuple[tuple[int, int, int], ...]) -> None:
        """Copies pages (rank, source, destination) in all layers, a fixed number a call."""
        for first in range(0, len(copies), COPIES_PER_CALL):
            pairs = np.full((self._ranks, 2, COPIES_PER_CALL), self._pool.rank_rows, np.int32)
            pairs[:, 0] = 0
            for column, (rank, source, destination) in enumerate(
                copies[first : first + COPIES_PER_CALL]
            ):
                pairs[rank, :, column] = source, destination
            on_mesh = self._programs.put(pairs)
            program = self._programs.get(
                ("copy", self._name), lambda on_mesh=on_mesh: self._build_copy(on_mesh)
            )
            self._pool.put(0, program(self._pool.layers, on_mesh))

    def _build_copy(self, pairs: jax.Array) -> Any:
        def body(layers: list[LayerPages], pairs: jax.Array) -> list[LayerPages]:
            return [
                tuple(copy_pages(part, pairs[0, 0], pairs[0, 1]) for part in layer)
                for layer in layers
            ]

        specs = self._pool.specs()
        return self._programs.compile(
            body, (self._pool.layers, pairs), (specs, RANK), specs, donate=(0,)
        )

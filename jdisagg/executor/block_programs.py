"""Programs that move blocks of KV in and out of a mesh's arrays: cut what is offered, insert what was pulled, copy pages.

All are one program on the whole mesh (`shard_map`, equal explicit shardings, pages donated), so that no per-device executable is
built and no shard is donated on its own. Token ranges are cut to power-of-two lengths, so that shapes, and programs, are few.
Ranks that take no part get coordinates "nowhere" and write nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdisagg.executor.page_pool import PAGES_SPEC, LayerPages, PagePool
from jdisagg.executor.prefill_program import BLOCK_SPEC, RANK
from jdisagg.executor.programs import Programs
from jdisagg.ops.kv_pages import copy_pages, insert_block

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

    def insert(self, group: int, pieces: tuple[jax.Array, ...], rank: int, start: int, valid_tokens: int, pages: tuple[int, ...]) -> None:
        """Writes the first `valid_tokens` tokens of a pulled block into `pages` of `rank`, from position `start` on.

        `pieces`: the block's heads in parts, each [ranks, C, K / parts, Lb, H] sharded like the pages.
        """
        layers = self._groups[group]
        held = self._pool.layers[layers.start : layers.stop]
        tokens = pieces[0].shape[3]
        coordinates = np.full((self._ranks, 2, tokens), self._pool.rank_rows, np.int32)
        positions = np.arange(start, start + valid_tokens)
        coordinates[rank, 0, :valid_tokens] = np.asarray(pages, np.int32)[positions // self._pool.page_size]
        coordinates[rank, 1] = (start + np.arange(tokens)) % self._pool.page_size
        on_mesh = self._programs.put(coordinates)
        key = ("insert", len(layers), tokens, len(pieces), pieces[0].shape)
        program = self._programs.get(key, lambda: self._build_insert(held, pieces, on_mesh))
        self._pool.put(layers.start, program(held, pieces, on_mesh))

    def _build_insert(self, held: list[LayerPages], pieces: tuple[jax.Array, ...], coordinates: jax.Array) -> Any:
        def body(pages: list[LayerPages], pieces: tuple[jax.Array, ...], coordinates: jax.Array) -> list[LayerPages]:
            block_CKTH = jnp.concatenate([piece[0] for piece in pieces], axis=1)
            page_T, slot_T = coordinates[0, 0], coordinates[0, 1]
            parts = iter(block_CKTH)
            return [tuple(insert_block(part, next(parts), page_T, slot_T) for part in layer) for layer in pages]

        page_specs = [tuple(PAGES_SPEC for _ in layer) for layer in held]
        in_specs = (page_specs, tuple(BLOCK_SPEC for _ in pieces), RANK)
        return self._programs.compile(body, (held, pieces, coordinates), in_specs, page_specs, donate=(0,))

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

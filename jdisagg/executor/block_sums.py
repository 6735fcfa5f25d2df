"""Checksums on a mesh: what a block's values add up to under a key (ops/checksum.py), over kv shards, for the host to read.

The sums of a prefilled block are taken by a program of their own that reads the finished block, not inside the program that computes
it: there, XLA may compute a value once for the block and once more for its sum, and the two may be rounded differently. (The cost is
that of reading the block once more; benchmarks/LOG.md.) The same body sums what an insert reads back from pages and what an extract reads.

A stamp is uint32 [5] a rank, as `transfer.codec.stamp_array`. Replicas ("rep") hold equal values and are counted once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdisagg.executor.page_pool import PagePool
from jdisagg.executor.programs import BLOCK_SPEC, RANK, Programs
from jdisagg.ops.checksum import fold, granule_sums, key_words, row_sums
from jdisagg.scheduler.commands import BlockChecksum, PrefillChunk
from jdisagg.transfer.channel import BlockStamp
from jdisagg.transfer.codec import stamp_array


def first_head(local_heads: int) -> jax.Array:
    """Inside a program: the global number of this device's first kv head."""
    return lax.axis_index("kv") * local_heads


def total(programs: Programs, block_CKTH: jax.Array, stamp_5: jax.Array) -> jax.Array:
    """Inside a program: the sum of a block's valid tokens, alike on all devices: uint32 [2]. `block_CKTH`: this device's heads;
    ranks that take no part have a stamp of no valid tokens."""
    token_T = jnp.arange(block_CKTH.shape[2], dtype=jnp.uint32)
    head = first_head(block_CKTH.shape[1])
    rows_KT2 = row_sums((block_CKTH,), stamp_5[:2], stamp_5[2], head, stamp_5[3] + token_T, token_T < stamp_5[4])
    return over(programs, jnp.sum(rows_KT2, axis=(0, 1), dtype=jnp.uint32), ("dp", "kv"))


def over(programs: Programs, value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Inside a program: the sum over those of the axes that have several devices."""
    real = tuple(axis for axis in axes if programs.mesh.shape[axis] > 1)
    return lax.psum(value, real) if real else value


def rank_stamps(ranks: int, rank: int, stamp: BlockStamp) -> np.ndarray:
    """A stamp for one rank; nothing is valid on the others."""
    stamps = np.zeros((ranks, 5), np.uint32)
    stamps[:, :3] = stamp_array(stamp)[:3]
    stamps[rank] = stamp_array(stamp)
    return stamps


class PrefillSums:
    """Sums of a chunk's blocks, a granule of tokens at a time, so that they fit whatever the chunk is cut into. On the dispatch thread."""

    def __init__(self, programs: Programs, pool: PagePool, groups: tuple[range, ...], granule_tokens: int) -> None:
        self._programs, self._granule = programs, granule_tokens
        ranks = programs.mesh.shape["dp"]
        self._components = [first_component(pool, group) for group in groups]
        self._places = [programs.put(np.full((ranks, 1), component, np.uint32)) for component in self._components]

    def key(self, key: int) -> np.ndarray:
        """The key as `run` takes it, once it is on the mesh: uint32 [ranks, 2]."""
        return np.tile(key_words(key), (self._programs.mesh.shape["dp"], 1))

    def run(self, group: int, block: jax.Array, positions: jax.Array, segment: jax.Array, key: jax.Array) -> jax.Array:
        """uint32 [ranks, T / granule, 2] of a block [ranks, C, K, T, H]; tokens of segment -1 do not count."""
        programs, granule = self._programs, self._granule

        def body(block: jax.Array, positions: jax.Array, segment: jax.Array, key: jax.Array, component: jax.Array) -> jax.Array:
            head = first_head(block.shape[2])
            rows_KT2 = row_sums((block[0],), key[0], component[0, 0], head, positions[0], segment[0] >= 0)
            return programs.readable(over(programs, granule_sums(rows_KT2, granule), ("kv",))[None])

        arguments = (block, positions, segment, key, self._places[group])
        specs = (BLOCK_SPEC, RANK, RANK, RANK, RANK)
        build = lambda: programs.compile(body, arguments, specs, programs.readable_spec)  # noqa: E731
        return programs.get(("sums", block.shape, str(block.dtype)), build)(*arguments)

    def stamp(self, group: int, key: int, start: int, valid_tokens: int) -> BlockStamp:
        return BlockStamp(key, self._components[group], start, valid_tokens)


def first_component(pool: PagePool, group: range) -> int:
    """The index over all layers of a group's first component."""
    return sum(len(layer) for layer in pool.layers[: group.start])


@dataclass(frozen=True)
class ChunkSums:
    """The sums of one chunk on their way to the host: one array a group."""

    command: PrefillChunk
    granule_tokens: int
    groups: Sequence[jax.Array]

    def read(self) -> tuple[BlockChecksum, ...]:
        """One for each offer. Blocks until they are computed."""
        offers = [(row.rank, offer) for row in self.command.rows for offer in row.offers]
        if not offers:
            return ()
        sums = jax.device_get(list(self.groups))
        granule = self.granule_tokens
        return tuple(
            BlockChecksum(
                offer.offer_id, fold(sums[offer.group][rank, offer.offset // granule : (offer.offset + offer.block_tokens) // granule])
            )
            for rank, offer in offers
        )

"""Computes keyed checksums of KV blocks on a mesh (ops/checksum.py). Each device computes a share
of a checksum, for the KV that it holds. The checksum is the sum of all shares.

A separate program computes the checksum of a prefilled block. If the prefill program computed it,
XLA might compute a value twice with different rounding, once for the block and once for the
checksum.

Replicas (mesh axis "rep") hold equal values and are counted once. If one process holds the mesh,
each device's share is read by the host directly, because adding the shares on the devices would
synchronise all devices."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jdisagg.executor.programs import Programs
from jdisagg.layout.axes import MESH_AXES
from jdisagg.layout.kv_spec import KVSpec
from jdisagg.messages.step_commands import BlockChecksum, OfferSpec, PrefillChunk
from jdisagg.ops.checksum import fold, granule_sums, key_words, row_sums
from jdisagg.transfer.channel import BlockStamp
from jdisagg.transfer.codec import stamp_array

STAMP_WORDS = 5


def first_head(local_heads: int) -> jax.Array:
    """Returns the index, within the model, of this device's first KV head."""
    return lax.axis_index("kv") * local_heads


def local_sum(
    block_CKTH: jax.Array, stamp_5: jax.Array, token_T: jax.Array, counts_T: jax.Array
) -> jax.Array:
    """Returns this device's share of a block's checksum as uint32 [2]. `token_T` has the index of
    each token, `counts_T` whether the token is included. Called inside a program."""
    positions_T = stamp_5[3] + token_T.astype(jnp.uint32)
    rows_KT2 = row_sums(
        (block_CKTH,),
        stamp_5[:2],
        stamp_5[2],
        first_head(block_CKTH.shape[1]),
        positions_T,
        counts_T,
    )
    return jnp.sum(rows_KT2, axis=(0, 1), dtype=jnp.uint32)


def found_in(programs: Programs, sum_2: jax.Array, intact: jax.Array) -> jax.Array:
    """Returns this device's result for `Found` as uint32 [1, 1, 1, 3]: its share of the checksum,
    and 1 if the block is damaged. If the mesh spans processes, the result is summed over all
    devices, so that each process can read the total. Called inside a program."""
    broken = (~intact).astype(jnp.uint32)[None]
    if not programs.spans_processes:
        return jnp.concatenate([sum_2, broken])[None, None, None]
    if programs.mesh.shape["rep"] > 1:
        broken |= jnp.any(lax.pmax(sum_2, "rep") != lax.pmin(sum_2, "rep")).astype(jnp.uint32)
    found_3 = jnp.concatenate(
        [_over(programs, sum_2, ("dp", "kv")), _over(programs, broken, MESH_AXES)]
    )
    return found_3[None, None, None]


def found_spec(programs: Programs) -> PartitionSpec:
    """The global shape is uint32 [dp, kv, rep, 3], or [1, 1, 1, 3] if the mesh spans processes."""
    return PartitionSpec() if programs.spans_processes else PartitionSpec(*MESH_AXES)


@dataclass(frozen=True, slots=True)
class Found:
    """The checksum counts each replicated value once. A block whose replicas hold different values
    is not intact."""

    checksum: int
    intact: bool

    @staticmethod
    def read(found: jax.Array) -> "Found":
        """Converts the result of `found_in` to a `Found`. Blocks until it is computed."""
        found_DKR3 = jax.device_get(found)
        sums = found_DKR3[..., :2]
        return Found(
            fold(sums[:, :, 0]),
            not found_DKR3[..., 2].any() and bool((sums == sums[:, :, :1]).all()),
        )


def _over(programs: Programs, value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    real = tuple(axis for axis in axes if programs.mesh.shape[axis] > 1)
    return lax.psum(value, real) if real else value


def rank_stamps(ranks: int, rank: int, stamp: BlockStamp) -> np.ndarray:
    """Returns one stamp for each dp rank: `stamp` for `rank`, and for the others a stamp without
    valid tokens."""
    stamps = np.zeros((ranks, STAMP_WORDS), np.uint32)
    stamps[:, :3] = stamp_array(stamp)[:3]
    stamps[rank] = stamp_array(stamp)
    return stamps


class PrefillSums:
    """Computes the checksums of a prefill chunk's blocks, separately for every `granule_tokens`
    tokens. The checksum of any part of the chunk is a sum of these."""

    def __init__(
        self, programs: Programs, spec: KVSpec, groups: tuple[range, ...], granule_tokens: int
    ) -> None:
        self.spec = spec
        self._programs, self._granule = programs, granule_tokens
        ranks = programs.mesh.shape["dp"]
        self._components = [spec.first_row(group.start) for group in groups]
        self._places = [
            programs.put(np.full((ranks, 1), component, np.uint32))
            for component in self._components
        ]

    def key(self, key: int) -> np.ndarray:
        """Returns the checksum key as uint32 [ranks, 2]. The caller puts the array on the mesh."""
        return np.tile(key_words(key), (self._programs.mesh.shape["dp"], 1))

    def place(self, group: int) -> jax.Array:
        return self._places[group]

    @property
    def spec_of_shares(self) -> PartitionSpec:
        programs = self._programs
        return programs.readable_spec if programs.spans_processes else PartitionSpec("dp", "kv")

    def shares(
        self,
        block_CKTH: jax.Array,
        positions_T: jax.Array,
        segment_T: jax.Array,
        key_2: jax.Array,
        place: jax.Array,
    ) -> jax.Array:
        """Computes the checksums of a block inside a group's program: this device's shares, uint32
        [1, 1, T / granule, 2]. Tokens with segment -1 are padding and are not counted."""
        head = first_head(block_CKTH.shape[1])
        rows_KT2 = row_sums((block_CKTH,), key_2, place, head, positions_T, segment_T >= 0)
        sums_G2 = granule_sums(rows_KT2, self._granule)
        if self._programs.spans_processes:
            sums_G2 = _over(self._programs, sums_G2, ("kv",))
        return self._programs.readable(sums_G2[None, None])

    def stamp(self, group: int, key: int, start: int, valid_tokens: int) -> BlockStamp:
        return BlockStamp(key, self._components[group], start, valid_tokens)


@dataclass(frozen=True)
class ChunkSums:
    """The arrays are being copied to the host."""

    command: PrefillChunk
    granule_tokens: int
    groups: Sequence[jax.Array]

    def read(self) -> tuple[BlockChecksum, ...]:
        """Returns one checksum for each offered block. Blocks until all are computed."""
        offers = [(row.rank, offer) for row in self.command.rows for offer in row.offers]
        if not offers:
            return ()
        sums = jax.device_get(list(self.groups))
        granule = self.granule_tokens

        def checksum(rank: int, offer: OfferSpec) -> int:
            tokens = slice(offer.offset // granule, (offer.offset + offer.block_tokens) // granule)
            return fold(
                np.stack(
                    [
                        group[rank, :, tokens]
                        for group in sums[offer.group : offer.group + offer.groups]
                    ]
                )
            )

        return tuple(BlockChecksum(offer.offer_id, checksum(rank, offer)) for rank, offer in offers)

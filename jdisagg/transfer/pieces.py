"""What every channel does to a block before it moves: the offer's shards, the check that both sides fit, the cut into pieces.

Knows JAX and the shapes of `channel.py`; knows no way to move anything.
"""

import functools
from dataclasses import dataclass

import jax

from jdisagg.errors import IncompatiblePeerError
from jdisagg.transfer.boxes import HEAD_DIMENSION, rank_placement
from jdisagg.transfer.channel import BlockStamp


@dataclass(frozen=True, slots=True, eq=False)
class OfferedBlock:
    """One rank's shards on this process's devices, by device id. The block's other ranks are not kept alive."""

    shards: dict[int, jax.Array]
    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    rank: int
    stamp: BlockStamp

    @staticmethod
    def of(block: jax.Array, rank: int, stamp: BlockStamp) -> "OfferedBlock":
        devices = rank_placement(block.sharding, block.shape, rank)
        shards = {shard.device.id: shard.data for shard in block.addressable_shards if shard.device.id in devices}
        return OfferedBlock(shards, block.shape, block.sharding, rank, stamp)

    @property
    def dtype(self) -> str:
        return str(next(iter(self.shards.values())).dtype)

    @property
    def local_heads(self) -> int:
        """Heads of one shard."""
        return self.sharding.shard_shape(self.shape)[HEAD_DIMENSION]

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards.values())


def check_geometry(offer: OfferedBlock, dtype: str, shape: tuple[int, ...], granule: int) -> None:
    """`shape` is that of a `PullTarget`'s zeros. Raises IncompatiblePeerError naming the field and both values; the hand-shake should
    have refused such a peer before. A process without shards of the rank leaves the dtype to those that have some."""
    pairs: list[tuple[str, object, object]] = [("dtype", offer.dtype, dtype)] if offer.shards else []
    pairs.append(("dimensions", len(offer.shape), len(shape)))
    pairs += [(f"size of dimension {axis}", offer.shape[axis], shape[axis]) for axis in (1, 3, 4) if len(offer.shape) == len(shape) == 5]
    for name, offered, wanted in pairs:
        if offered != wanted:
            raise IncompatiblePeerError(f"a block's {name} is {offered!r} at the sender and {wanted!r} at the receiver; they must be equal")
    heads, local, wanted_heads = offer.shape[HEAD_DIMENSION], offer.local_heads, shape[HEAD_DIMENSION]
    if heads % wanted_heads or local % granule:
        raise IncompatiblePeerError(
            f"pieces of {granule} heads ({wanted_heads} over the receiver's mesh) do not divide "
            f"the sender's {heads} kv heads and its {local} a shard; use head_granule"
        )


@functools.partial(jax.jit, static_argnames="parts")
def cut(shard_1CKTH: jax.Array, parts: int) -> tuple[jax.Array, ...]:
    """A shard in `parts` pieces along its heads, by one program on its own device."""
    size = shard_1CKTH.shape[HEAD_DIMENSION] // parts
    return tuple(jax.lax.slice_in_dim(shard_1CKTH, part * size, part * size + size, axis=HEAD_DIMENSION) for part in range(parts))


def add_counts(total: dict[tuple[int, int], int], more: dict[tuple[int, int], int]) -> None:
    for pair, count in more.items():
        total[pair] = total.get(pair, 0) + count

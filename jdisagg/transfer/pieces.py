"""What every channel does to a block before it moves: the offer's shards, the check that both sides fit, the cut into pieces.

Knows JAX and the shapes of `channel.py`; knows no way to move anything.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jdisagg.errors import IncompatiblePeerError
from jdisagg.layout.reshard_plan import Box
from jdisagg.transfer.boxes import HEAD_DIMENSION, plan_handoff, rank_placement
from jdisagg.transfer.channel import BlockStamp
from jdisagg.transfer.codec import codec, stamp_array
from jdisagg.transfer.kv_messages import PullRequest, Wanted


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


@dataclass(frozen=True, slots=True)
class PlannedPiece:
    """Granule `source_part` of the shard on device `source` goes to the `place`-th wanted device, as its granule `part`. `first_head`
    is the global number of its first head."""

    source: int
    source_part: int
    place: int
    part: int
    first_head: int


def plan_of_request(offer: OfferedBlock, request: PullRequest) -> tuple[PlannedPiece, ...]:
    """The pieces that this process holds and that the request's process wants."""
    turn = request.turn % _replicas(offer.sharding, offer.shape, offer.rank)
    pieces = _plan(offer.sharding, offer.shape, offer.rank, request.wanted, request.head_shards, request.granule, turn)
    return tuple(piece for piece in pieces if piece.source in offer.shards and request.wanted[piece.place].process == request.process)


@functools.lru_cache(maxsize=1024)
def _replicas(sharding: jax.sharding.Sharding, shape: tuple[int, ...], rank: int) -> int:
    return max(collections.Counter(rank_placement(sharding, shape, rank).values()).values())


@functools.lru_cache(maxsize=1024)
def _plan(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], rank: int, wanted: tuple[Wanted, ...], shards: int, granule: int, turn: int
) -> tuple[PlannedPiece, ...]:
    source = rank_placement(sharding, shape, rank)
    whole = ((0, 1), *((0, size) for size in shape[1:]))
    local = shape[HEAD_DIMENSION] // shards
    destination: dict[int, Box] = {}
    for place, device in enumerate(wanted):
        heads = (device.head_shard * local, device.head_shard * local + local)
        # Negative: both jobs count their devices from 0, and the plan would take equal numbers for one device.
        destination[-1 - place] = (*whole[:HEAD_DIMENSION], heads, *whole[HEAD_DIMENSION + 1 :])
    return tuple(
        PlannedPiece(
            piece.source,
            piece.source_slice[HEAD_DIMENSION][0] // granule,
            -1 - piece.destination,
            piece.destination_slice[HEAD_DIMENSION][0] // granule,
            piece.box[HEAD_DIMENSION][0],
        )
        for piece in plan_handoff(source, destination, granule, turn).pieces
    )


def encoded_pieces(offer: OfferedBlock, pieces: Sequence[PlannedPiece], granule: int, codec_name: str) -> list[jax.Array]:
    """The leaves of each piece in turn, on the devices that hold them; returns before they are computed. A piece that several devices
    want is made once; one that is a whole shard and has no codec is the shard itself."""
    made: dict[tuple[int, int], tuple[jax.Array, ...]] = {}
    cuts: dict[int, tuple[jax.Array, ...]] = {}
    parts = offer.local_heads // granule
    stamp = stamp_array(offer.stamp)
    leaves: list[jax.Array] = []
    for piece in pieces:
        key = (piece.source, piece.source_part)
        if key not in made:
            if piece.source not in cuts:
                shard = offer.shards[piece.source]
                cuts[piece.source] = cut(shard, parts) if parts > 1 else (shard,)
            part = cuts[piece.source][piece.source_part]
            made[key] = encoder(codec_name)(part, stamp, np.int32(piece.first_head)) if codec_name != "none" else (part,)
        leaves += made[key]
    return leaves


@functools.cache
def encoder(codec_name: str) -> Callable[[jax.Array, np.ndarray, np.int32], tuple[jax.Array, ...]]:
    """(piece, stamp, first head) -> leaves: one program a piece, on the piece's own device."""
    return jax.jit(codec(codec_name).encode)


def leaf_avals(codec_name: str, piece: jax.ShapeDtypeStruct) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What a piece [1, C, G, T, H] travels as."""
    return codec(codec_name).leaves(piece)

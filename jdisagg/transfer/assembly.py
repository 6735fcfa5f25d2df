"""Assembles the pieces of one pull into global arrays. Tracks which pieces the devices of this
process need, and which of them the senders have announced.

Transfers no data itself. Checks the senders' announcements: each device of this process in the
receiving dp rank must get each of its pieces exactly once, and no other piece."""

import functools
from collections.abc import Sequence

import jax

from jdisagg.errors import HandoffError
from jdisagg.layout.reshard_plan import HEAD_DIMENSION
from jdisagg.messages.kv_plane import PostedPiece, Wanted
from jdisagg.transfer.backend import Leaf
from jdisagg.transfer.channel import PullTarget, rank_placement
from jdisagg.transfer.pieces import check_leaves


class Assembly:
    """Assembles the pieces of one pull into global arrays. Not thread-safe. `wanted`: all devices
    of the receiving dp rank, on all processes."""

    def __init__(self, target: PullTarget, wanted: tuple[Wanted, ...]) -> None:
        self.wanted = wanted
        self.assembled = False
        self.bytes_per_pair: dict[tuple[int, int], int] = {}
        self._target = target
        process = jax.process_index()
        self._own = {device.device for device in wanted if device.process == process}
        self._devices = {device.id: device for device in target.zeros.sharding.addressable_devices}
        self._leaves = check_leaves(target)
        self._parts: int | None = None
        self._announced: set[tuple[int, int]] = set()
        self._coming: dict[tuple[int, int], Sequence[jax.Array | Leaf]] = {}

    @staticmethod
    def of(target: PullTarget) -> "Assembly":
        return Assembly(target, _wanted(target.zeros.sharding, target.zeros.shape, target.rank))

    def expect(self, heads: int, pieces: tuple[PostedPiece, ...]) -> list[jax.ShapeDtypeStruct]:
        """Accepts announced pieces and returns the shapes of their leaves, in the sender's order.
        Raises HandoffError if a piece was not requested, or was announced twice."""
        parts, rest = divmod(heads, self._target.zeros.shape[HEAD_DIMENSION])
        if rest or not parts or self._parts not in (None, parts):
            raise HandoffError(f"a sender announced {heads} kv heads, which do not fit the pull")
        self._parts = parts
        avals: list[jax.ShapeDtypeStruct] = []
        for piece in pieces:
            key = (piece.part, piece.destination)
            if (
                piece.destination not in self._own
                or not 0 <= piece.part < parts
                or key in self._announced
            ):
                raise HandoffError(
                    f"a sender announced the piece {piece}, which was not requested or was"
                    " announced before"
                )
            self._announced.add(key)
            place = jax.sharding.SingleDeviceSharding(self._devices[piece.destination])
            avals += [
                jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
                for leaf in self._leaves
            ]
        return avals

    def coming(self, pieces: tuple[PostedPiece, ...], arrays: Sequence[jax.Array | Leaf]) -> None:
        """The arrays may still be in transfer."""
        count = len(self._leaves)
        for index, piece in enumerate(pieces):
            leaves = arrays[index * count : index * count + count]
            self._coming[piece.part, piece.destination] = leaves
            pair = (piece.source, piece.destination)
            self.bytes_per_pair[pair] = self.bytes_per_pair.get(pair, 0) + sum(
                leaf.nbytes for leaf in leaves
            )

    @property
    def complete(self) -> bool:
        """Returns whether the arrays of all needed pieces were added. A process that needs no piece
        must still wait for one sender's answer, which contains the number of arrays per piece."""
        return self._parts is not None and len(self._coming) == self._parts * len(self._own)

    @property
    def flat(self) -> tuple[jax.Array | Leaf, ...]:
        return tuple(leaf for key in sorted(self._coming) for leaf in self._coming[key])

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_per_pair.values())

    def assemble(self, arrived: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Returns the global arrays, in the order of parts and then of leaves."""
        assert self._parts is not None
        count = len(self._leaves)
        pieces = {
            key: arrived[index * count : index * count + count]
            for index, key in enumerate(sorted(self._coming))
        }
        made: list[jax.Array] = []
        for part in range(self._parts):
            for leaf, zeros in enumerate(self._target.resident):
                shards = [pieces[part, device][leaf] for device in sorted(self._own)]
                if len(shards) < len(self._devices):
                    shards += [
                        shard.data
                        for shard in zeros.addressable_shards
                        if shard.device.id not in self._own
                    ]
                made.append(
                    jax.make_array_from_single_device_arrays(zeros.shape, zeros.sharding, shards)
                )
        self._coming.clear()
        self.assembled = True
        return tuple(made)


@functools.lru_cache(maxsize=1024)
def _wanted(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], rank: int
) -> tuple[Wanted, ...]:
    process = {device.id: device.process_index for device in sharding.device_set}
    granule = sharding.shard_shape(shape)[HEAD_DIMENSION]
    boxes = rank_placement(sharding, shape, rank)
    return tuple(
        Wanted(device, process[device], boxes[device][HEAD_DIMENSION][0] // granule)
        for device in sorted(boxes)
    )

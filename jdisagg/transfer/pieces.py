"""The pieces of a KV block, for all channels: checks that the two meshes are compatible, plans the
pieces, cuts and packs them, and assembles them to global arrays. A piece is the part of a block,
`granule` KV heads, that one device sends to another."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.errors import HandoffError, IncompatiblePeerError
from jdisagg.layout.reshard_plan import HEAD_DIMENSION, Box, Placement, plan_handoff
from jdisagg.messages.kv_plane import PostedPiece, PullRequest, Wanted
from jdisagg.transfer.channel import BlockStamp, Leaf, PullTarget, rank_placement, resident_zeros
from jdisagg.transfer.codec import codec, stamp_array

NO_CODEC = "none"


@dataclass(frozen=True, slots=True, eq=False)
class OfferedBlock:
    """One dp rank's shards of an offered block on this process's devices, by device id. Holds no
    other rank's shards, so that their memory can be freed. `number` is the index of the offer in
    the order in which the mesh computes offered blocks."""

    shards: dict[int, jax.Array]
    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    rank: int
    stamp: BlockStamp
    number: int = 0

    @staticmethod
    def of(
        block: jax.Array,
        rank: int,
        stamp: BlockStamp,
        number: int = 0,
        card: jax.sharding.Mesh | None = None,
    ) -> "OfferedBlock":
        """Returns one dp rank's part of a block. `card`: mesh that peers know, if the block is on
        the mesh of another pipeline stage. Each device is then numbered like the device at the same
        place of `card`."""
        devices = rank_placement(block.sharding, block.shape, rank)
        shards = {
            shard.device.id: shard.data
            for shard in block.addressable_shards
            if shard.device.id in devices
        }
        sharding = block.sharding
        if card is not None and isinstance(sharding, jax.sharding.NamedSharding):
            own = [device.id for device in sharding.mesh.devices.flat]  # type: ignore[union-attr]
            known = dict(zip(own, [device.id for device in card.devices.flat], strict=True))
            shards = {known[device]: array for device, array in shards.items()}
            sharding = jax.sharding.NamedSharding(card, sharding.spec)
        return OfferedBlock(shards, block.shape, sharding, rank, stamp, number)

    @property
    def dtype(self) -> str:
        return str(next(iter(self.shards.values())).dtype)

    @property
    def local_heads(self) -> int:
        return self.sharding.shard_shape(self.shape)[HEAD_DIMENSION]

    @property
    def replicas(self) -> int:
        boxes = rank_placement(self.sharding, self.shape, self.rank).values()
        return max(Counter(boxes).values())

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards.values())


def check_geometry(offer: OfferedBlock, dtype: str, shape: tuple[int, ...], granule: int) -> None:
    """Raises IncompatiblePeerError if an offered block does not match the dtype and shape of a
    `PullTarget`. The dtype is not checked in a process that holds no shard of the offer."""
    pairs: list[tuple[str, object, object]] = (
        [("dtype", offer.dtype, dtype)] if offer.shards else []
    )
    pairs.append(("dimensions", len(offer.shape), len(shape)))
    pairs += [
        (f"size of dimension {axis}", offer.shape[axis], shape[axis])
        for axis in (1, 3, 4)
        if len(offer.shape) == len(shape) == 5
    ]
    for name, offered, wanted in pairs:
        if offered != wanted:
            raise IncompatiblePeerError(
                f"a block's {name} is {offered!r} at the sender and {wanted!r} at the receiver;"
                " they must be equal"
            )
    heads, local, wanted_heads = (
        offer.shape[HEAD_DIMENSION],
        offer.local_heads,
        shape[HEAD_DIMENSION],
    )
    if heads % wanted_heads or local % granule:
        raise IncompatiblePeerError(
            f"pieces of {granule} heads ({wanted_heads} over the receiver's mesh) do not divide "
            f"the sender's {heads} kv heads and its {local} a shard; use head_granule"
        )


@functools.partial(jax.jit, static_argnames="parts")
def cut(shard_1CKTH: jax.Array, parts: int) -> tuple[jax.Array, ...]:
    """Runs as one program on the shard's device."""
    size = shard_1CKTH.shape[HEAD_DIMENSION] // parts
    return tuple(
        jax.lax.slice_in_dim(shard_1CKTH, part * size, part * size + size, axis=HEAD_DIMENSION)
        for part in range(parts)
    )


@dataclass(frozen=True, slots=True)
class PlannedPiece:
    """One planned copy of a piece. Piece number `source_part` of the shard on device `source`
    becomes piece number `part` on the receiving device `receiver`, which is its id, or its index in
    the request's list. `first_head` is the global index of the piece's first head."""

    source: int
    source_part: int
    receiver: int
    part: int
    first_head: int


def plan_pieces(
    source: Placement, destination: Placement, granule: int, turn: int
) -> tuple[PlannedPiece, ...]:
    """Receivers are numbered as in `destination`. `plan_reshard` describes the other
    parameters."""
    return tuple(
        PlannedPiece(
            piece.source,
            piece.source_slice[HEAD_DIMENSION][0] // granule,
            piece.destination,
            piece.destination_slice[HEAD_DIMENSION][0] // granule,
            piece.box[HEAD_DIMENSION][0],
        )
        for piece in plan_handoff(source, destination, granule, turn)
    )


def plan_of_request(offer: OfferedBlock, request: PullRequest) -> tuple[PlannedPiece, ...]:
    turn = request.turn % offer.replicas
    pieces = _plan(
        offer.sharding,
        offer.shape,
        offer.rank,
        request.wanted,
        request.head_shards,
        request.granule,
        turn,
    )
    return tuple(
        piece
        for piece in pieces
        if piece.source in offer.shards
        and request.wanted[piece.receiver].process == request.process
    )


@functools.lru_cache(maxsize=1024)
def _plan(
    sharding: jax.sharding.Sharding,
    shape: tuple[int, ...],
    rank: int,
    wanted: tuple[Wanted, ...],
    shards: int,
    granule: int,
    turn: int,
) -> tuple[PlannedPiece, ...]:
    source = rank_placement(sharding, shape, rank)
    whole = ((0, 1), *((0, size) for size in shape[1:]))
    local = shape[HEAD_DIMENSION] // shards
    destination: dict[int, Box] = {}
    for place, device in enumerate(wanted):
        heads = (device.head_shard * local, device.head_shard * local + local)
        # Destination devices get negative numbers. Both jobs number their devices from 0, and the
        # plan would take devices with equal numbers for the same device.
        destination[-1 - place] = (*whole[:HEAD_DIMENSION], heads, *whole[HEAD_DIMENSION + 1 :])
    return tuple(
        replace(piece, receiver=-1 - piece.receiver)
        for piece in plan_pieces(source, destination, granule, turn)
    )


@dataclass(frozen=True, slots=True, eq=False)
class HostLeaves:
    """The arrays of a pull in host memory. Equal arrays are stored once.

    Attributes:
        cuts: For each distinct array, the index of its source in `sources` and the slice of its
            heads, or None for all heads.
        order: For each array that the receiver expects, in order, the index of the array in `cuts`.
    """

    sources: tuple[jax.Array, ...]
    cuts: tuple[tuple[int, slice | None], ...]
    order: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        return [
            self.sources[source].nbytes
            if heads is None
            else self.sources[source].nbytes
            // self.sources[source].shape[HEAD_DIMENSION]
            * (heads.stop - heads.start)
            for source, heads in self.cuts
        ]

    def arrays(self) -> list[np.ndarray]:
        """Blocks until the sources are computed. On CPU the arrays are views of the sources."""
        read = [np.asarray(source) for source in self.sources]
        return [
            read[source] if heads is None else read[source][:, :, heads]
            for source, heads in self.cuts
        ]


@dataclass(frozen=True, slots=True, eq=False)
class RequestedPieces:
    offer: OfferedBlock
    pieces: Sequence[PlannedPiece]
    granule: int
    codec_name: str

    def on_devices(self) -> list[jax.Array]:
        """Returns the packed arrays of all pieces, in order, on their source devices. Does not wait
        until they are computed. A piece for several receiving devices is packed once. An unpacked
        piece that is a whole shard is returned without a copy."""
        offer, granule = self.offer, self.granule
        made: dict[tuple[int, int], tuple[jax.Array, ...]] = {}
        cuts: dict[int, tuple[jax.Array, ...]] = {}
        parts = offer.local_heads // granule
        leaves: list[jax.Array] = []
        for piece in self.pieces:
            key = (piece.source, piece.source_part)
            if key not in made:
                if piece.source not in cuts:
                    shard = offer.shards[piece.source]
                    cuts[piece.source] = cut(shard, parts) if parts > 1 else (shard,)
                part = cuts[piece.source][piece.source_part]
                made[key] = encode(part, self.codec_name, offer.stamp, piece.first_head)
            leaves += made[key]
        return leaves

    def in_host(self) -> HostLeaves:
        """Does not wait until the pieces are computed. Unpacked pieces are views of their shard, so
        that no program needs to cut them."""
        if self.codec_name != NO_CODEC:
            encoded = self.on_devices()
            once = tuple({id(leaf): leaf for leaf in encoded}.values())
            order = {id(leaf): place for place, leaf in enumerate(once)}
            cuts = tuple((place, None) for place in range(len(once)))
            return HostLeaves(once, cuts, tuple(order[id(leaf)] for leaf in encoded))
        granule = self.granule
        places: dict[tuple[int, int], int] = {}
        for piece in self.pieces:
            places.setdefault((piece.source, piece.source_part), len(places))
        sources = {source: place for place, source in enumerate(sorted({key[0] for key in places}))}
        return HostLeaves(
            tuple(self.offer.shards[source] for source in sources),
            tuple(
                (sources[source], slice(part * granule, (part + 1) * granule))
                for source, part in places
            ),
            tuple(places[piece.source, piece.source_part] for piece in self.pieces),
        )


def encode(
    piece_1CGTH: jax.Array, codec_name: str, stamp: BlockStamp, first_head: int
) -> tuple[jax.Array, ...]:
    """Packs a piece by the codec, in one program on the piece's device. Returns the packed arrays,
    or the piece itself without a codec."""
    if codec_name == NO_CODEC:
        return (piece_1CGTH,)
    return _encoder(codec_name)(piece_1CGTH, stamp_array(stamp), np.int32(first_head))


@functools.cache
def _encoder(codec_name: str) -> Callable[[jax.Array, np.ndarray, np.int32], tuple[jax.Array, ...]]:
    return jax.jit(codec(codec_name).encode)


def check_leaves(target: PullTarget) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shapes and dtypes of the arrays into which a piece for this target is packed.
    Raises IncompatiblePeerError if they do not match the target's zeros."""
    _, components, _, tokens, head_size = target.zeros.shape
    shape = (1, components, target.granule, tokens, head_size)
    leaves = _leaves(target.codec, shape, target.zeros.dtype)
    wanted = [(leaf.shape, leaf.dtype) for leaf in leaves]
    found = [(zeros.sharding.shard_shape(zeros.shape), zeros.dtype) for zeros in target.resident]
    if found != wanted:
        raise IncompatiblePeerError(
            f"pull target: codec {target.codec!r} packs a piece into {wanted}, but its leaves on a"
            f" device are {found}; give it zeros of these shapes and dtypes"
        )
    return leaves


@functools.lru_cache(maxsize=1024)
def _leaves(
    codec_name: str, shape: tuple[int, ...], dtype: jnp.dtype
) -> tuple[jax.ShapeDtypeStruct, ...]:
    return codec(codec_name).leaves(jax.ShapeDtypeStruct(shape, dtype))


class Assembly:
    """Assembles the pieces of one pull into global arrays: tracks which pieces the devices of this
    process need, and which of them the senders have announced. Each device of this process in the
    receiving dp rank must get each of its pieces exactly once, and no other piece. Transfers no
    data itself. Not thread-safe.

    Attributes:
        wanted: All devices of the receiving dp rank, on all processes.
    """

    def __init__(self, target: PullTarget) -> None:
        self.wanted = wanted = _wanted(target.zeros.sharding, target.zeros.shape, target.rank)
        self.assembled = False
        self.bytes_per_pair: Counter[tuple[int, int]] = Counter()
        self._target = target
        process = jax.process_index()
        self._own = {device.device for device in wanted if device.process == process}
        self._devices = {device.id: device for device in target.zeros.sharding.addressable_devices}
        self._leaves = check_leaves(target)
        self._parts: int | None = None
        self._announced: set[tuple[int, int]] = set()
        self._coming: dict[tuple[int, int], Sequence[jax.Array | Leaf]] = {}

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
            nbytes = sum(leaf.nbytes for leaf in leaves)
            self.bytes_per_pair[piece.source, piece.destination] += nbytes

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
        return self.bytes_per_pair.total()

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


def warm_pieces(
    mesh: jax.sharding.Mesh,
    shape: tuple[int, int, int, int],
    dtype: jnp.dtype,
    granule: int,
    codec_name: str,
) -> None:
    """Compiles the programs that cut a shard [1, *shape] into pieces and pack the pieces, for this
    process's devices of `mesh`. The call blocks."""
    components, local, tokens, head_size = shape
    if local == granule and codec_name == NO_CODEC:
        return
    # On a mesh of one device, a shard that a program has made keeps the mesh's sharding, but a
    # shard that was put on the device does not. Each of the two forms needs a program of its own.
    made = resident_zeros(mesh, components, local, tokens, head_size, dtype)
    shards = [shard.data for shard in made.addressable_shards]
    shards += [
        jax.device_put(np.zeros((1, *shape), dtype), shard.device)
        for shard in made.addressable_shards
    ]
    for shard in shards:
        parts = cut(shard, local // granule) if local > granule else (shard,)
        jax.block_until_ready([encode(part, codec_name, BlockStamp(), 0) for part in parts])

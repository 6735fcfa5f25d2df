"""Interface of KV transfers between two meshes. The sending mesh offers a block of KV, the
receiving mesh pulls the block, and the sender then releases the block.

A block is a global array [dp, C, K, T, H] for T tokens and head size H. C counts the cached
components of the layers in a layer group (see `layout/kv_spec.py`). The K heads are sharded over
mesh axis "kv" and replicated over "rep". An offer contains one dp rank's part of a block. A pull
returns n = local heads / granule global arrays [dp, C, granule * kv, T, H] with `granule` heads per
kv shard. On the receiving rank, array i of kv shard j begins with head j * n * granule + i *
granule, so concatenating the n local shards along heads gives the shard's heads in order. The other
ranks hold the target's resident zeros, and no byte is sent to them.

A target names the mesh that sends the block. Between processes, `connect` must have been called for
the sending mesh. With a lossy codec, the received arrays are the packed arrays of each piece
(transfer/codec.py), not KV heads.

Rules:
- Offer ids are random 64-bit numbers, each used once.
- No method blocks. A pull is a future to poll. It fails at its deadline even if it is not polled.
- A pull may start before its block is offered, because the two sides' threads are not synchronised.
  The pull then waits until its deadline.
- A failed pull raises a typed error itself. No later JAX call fails because of it.
- Offered blocks are never donated. Pulled arrays may share memory with the block or the zeros, so
  they are never donated either.
- All methods are thread-safe."""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp

from jdisagg.clock import Clock
from jdisagg.errors import HandoffError, JdisaggError, LayoutError
from jdisagg.layout.axes import MESH_AXES
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.layout.reshard_plan import HEAD_DIMENSION, RANK_DIMENSION, Box, box_of
from jdisagg.transfer.sender_errors import sender_error

REMEMBERED_IDS = 65536


def block_sharding(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    """Returns the sharding of a block on a mesh with axes ("dp", "kv", "rep"). Dimension 0 is
    sharded over dp, KV heads over kv. The block is replicated over rep."""
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp", None, "kv"))


def mesh_card(mesh: jax.sharding.Mesh) -> MeshCard:
    """Returns the description of a mesh with axes ("dp", "kv", "rep"). The worker adds the
    endpoints of its processes to the description."""
    dp, kv, rep = mesh.devices.shape
    devices = tuple(mesh.devices.flat)
    return MeshCard(
        (dp, kv, rep),
        tuple(device.id for device in devices),
        tuple(device.process_index for device in devices),
    )


@functools.lru_cache(maxsize=1024)
def rank_placement(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], rank: int
) -> Mapping[int, Box]:
    """Returns, by device id, the box that each device of one dp rank holds. Boxes are relative to
    the rank (dimension 0 becomes (0, 1)). Raises LayoutError if there is no such rank, or if a
    device holds several ranks."""
    if not 0 <= rank < shape[RANK_DIMENSION]:
        raise LayoutError(
            f"rank {rank} is not one of the block's {shape[RANK_DIMENSION]} dp ranks (shape"
            f" {shape})"
        )
    boxes = {
        device.id: box_of(index, shape)
        for device, index in sharding.devices_indices_map(shape).items()
    }
    for device, ((start, stop), *_) in boxes.items():
        if stop - start != 1:
            raise LayoutError(
                f"device {device} holds dp ranks [{start}, {stop}) of a block of shape {shape}; "
                "shard dimension 0 so that each device holds one"
            )
    return {
        device: ((0, 1), *rest) for device, ((start, _), *rest) in boxes.items() if start == rank
    }


def resident_zeros(
    mesh: jax.sharding.Mesh,
    components: int,
    granule: int,
    tokens: int,
    head_size: int,
    dtype: jnp.dtype,
) -> jax.Array:
    """Makes the `zeros` of a `PullTarget`: [dp, components, granule * kv, tokens, head_size].
    Callers keep one such array for each shape, reuse it, and never donate it."""
    ranks, shards, _ = (mesh.shape[axis] for axis in MESH_AXES)
    shape = (ranks, components, granule * shards, tokens, head_size)
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=block_sharding(mesh))()


@dataclass(frozen=True, slots=True, eq=False)
class PullTarget:
    """The destination of a block.

    Attributes:
        zeros: Array of zeros [dp, C, granule * kv, T, H] with `block_sharding`. Gives the shape,
            dtype and sharding of each received array, and provides the shards of the ranks that
            receive no data. If all its devices receive, a shape with dtype and sharding
            (`jax.ShapeDtypeStruct`) is enough.
        rank: Index of the dp rank that receives the block, on the mesh of `zeros`.
        peer: Name of the sending mesh. "" if only one mesh can send.
        codec: Name of the codec that packs the block's values for the transfer.
        leaves: Arrays of zeros like `zeros` for each array that the codec packs a piece into, [dp,
            C', granule * kv, T', x] with `block_sharding`. () without a codec.
    """

    zeros: jax.Array
    rank: int
    peer: str = ""
    codec: str = "none"
    leaves: tuple[jax.Array, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.zeros.shape[RANK_DIMENSION]:
            raise LayoutError(
                f"pull target: rank {self.rank} must be in [0, {self.zeros.shape[RANK_DIMENSION]})"
            )

    @property
    def resident(self) -> tuple[jax.Array, ...]:
        """Zeros in the form of the transferred arrays: `leaves` with a codec, else `zeros`."""
        return self.leaves or (self.zeros,)

    @property
    def granule(self) -> int:
        return self.zeros.sharding.shard_shape(self.zeros.shape)[HEAD_DIMENSION]


@dataclass(frozen=True, slots=True)
class Offered:
    """Number of offers that a channel holds, and the device bytes of their blocks, including
    replicas."""

    offers: int
    bytes: int


Assemble = Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]]


class Leaf:
    """An array that a backend other than the JAX transfer engine is transferring. The receiver
    polls this object until the array has arrived."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Returns whether the array has arrived or has failed. Never blocks."""
        raise NotImplementedError

    @property
    def error(self) -> str | None:
        """Returns the reason why the transfer failed. Valid once `is_ready()` returns True."""
        raise NotImplementedError

    def array(self) -> jax.Array:
        """Returns the array on its device. Valid once `is_ready()` returns True. Raises
        HandoffError if the transfer failed."""
        raise NotImplementedError


def is_ready(array: jax.Array | Leaf) -> bool:
    # The method is public but missing in the type stub.
    return array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]


class Pull:
    """A future of one pull, to be polled. A pull is in progress until it ends: it has arrived,
    failed, been cancelled or passed its deadline. Once `is_ready()` returns True, `arrays()`
    returns the block or raises the error that `failed()` returns.

    A dispatch thread may deliver, cancel or revoke while the completion thread polls. Every change
    is made under the lock, which is never held while blocking. An ended pull that has not arrived
    keeps no array alive."""

    def __init__(self, offer_id: int, clock: Clock, deadline_seconds: float) -> None:
        self._offer_id = offer_id
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._deadline = clock.now() + deadline_seconds
        self._lock = threading.Lock()
        self._coming: Sequence[jax.Array | Leaf] | None = None
        self._arrays: tuple[jax.Array, ...] | None = None
        self._assemble: Assemble | None = None
        self._error: JdisaggError | None = None
        self._bytes_moved = 0

    @property
    def bytes_moved(self) -> int:
        """Number of bytes that this pull has transferred between devices so far."""
        return self._bytes_moved

    @property
    def deadline(self) -> float:
        """Time of the deadline on the channel's clock."""
        return self._deadline

    def is_ready(self) -> bool:
        """Returns whether the pull has ended. Never blocks."""
        with self._lock:
            if not self._has_ended():
                self._look()
            return self._has_ended()

    def failed(self) -> JdisaggError | None:
        """Returns the error: HandoffError (unknown, released, revoked, late, cancelled, broken) or
        IncompatiblePeerError. None while the pull is in progress and after it has arrived."""
        self.is_ready()
        return self._error

    def arrays(self) -> tuple[jax.Array, ...]:
        """Returns the arrays of the block. Valid once `is_ready()` returns True. If the pull
        failed, raises the error that `failed()` returns."""
        self.is_ready()
        with self._lock:
            if self._error:
                raise self._error
            assert self._arrays is not None, (
                "arrays() of a pull that is under way; poll is_ready() first"
            )
            return self._arrays

    def cancel(self) -> None:
        """Cancels the pull and deletes its arrays, also if they have arrived. Idempotent."""
        with self._lock:
            if not self._error:
                self._end(HandoffError(f"the pull of offer {self._offer_id:#x} was cancelled"))

    # The methods below are for the channel.

    def extend(self, seconds: float) -> None:
        with self._lock:
            self._deadline = max(self._deadline, self._clock.now() + seconds)

    def deliver(
        self, arrays: Sequence[jax.Array | Leaf], bytes_moved: int, assemble: Assemble | None = None
    ) -> None:
        """Sets the arrays of the pull, which may still be in transfer. Only the first call has an
        effect. If the pull has ended, the arrays are dropped. `assemble` converts the arrived
        arrays to the result of `arrays()`. It runs under the lock, after all arrays have
        arrived."""
        with self._lock:
            if self._coming is not None:
                return
            self._bytes_moved = bytes_moved
            if not self._error:
                self._coming, self._assemble = arrays, assemble

    def fail(self, error: JdisaggError) -> None:
        """Has no effect on an ended pull."""
        with self._lock:
            if not self._has_ended():
                self._end(error)

    def _has_ended(self) -> bool:
        return self._error is not None or self._arrays is not None

    def _look(self) -> None:
        """Ends the pull if its arrays have arrived or its deadline has passed."""
        if not self._take() and self._clock.now() >= self._deadline:
            state = (
                "was not made (or its id is unknown)" if self._coming is None else "has not arrived"
            )
            self._end(
                HandoffError(
                    f"offer {self._offer_id:#x} {state} within the deadline of"
                    f" {self._deadline_seconds} s; pull again"
                )
            )

    def _take(self) -> bool:
        """Returns whether all arrays have arrived or failed."""
        try:
            if self._coming is None or not all(map(is_ready, self._coming)):
                return False
            arrays = tuple(
                leaf.array() if isinstance(leaf, Leaf) else leaf for leaf in self._coming
            )
            self._coming = arrays
            if not all(map(is_ready, arrays)):
                return False  # being copied to the devices
            # All arrays are ready, so this call does not block. It raises an error if the
            # computation or the copy has failed.
            jax.block_until_ready(arrays)
            self._arrays = self._assemble(arrays) if self._assemble is not None else arrays
            self._coming, self._assemble = (), None
        except Exception as error:
            broken = HandoffError(
                f"offer {self._offer_id:#x}: its block could not be computed or moved: {error}"
            )
            self._end(sender_error(str(error)) or broken)
        return True

    def _end(self, error: JdisaggError) -> None:
        self._error = error
        self._coming = self._arrays = self._assemble = None


@dataclass(frozen=True, slots=True)
class BlockStamp:
    """Identifies the tokens and layers of a block in its checksums. A checksum that was computed
    with this stamp does not match the values of any other block.

    Attributes:
        key: Key of the checksums (ops/checksum.py).
        component: Index, within the model, of the block's first component.
        start: Position of the first token.
        valid_tokens: Number of tokens that the checksums cover.
    """

    key: int = 0
    component: int = 0
    start: int = 0
    valid_tokens: int = 0

    def of_offer(self, offer_id: int) -> "BlockStamp":
        """Returns this stamp with a key that is derived from the offer's id. If all offers shared a
        key, the block of another sequence would pass the check."""
        return replace(self, key=self.key ^ offer_id)


NO_STAMP = BlockStamp()


class Channel(Protocol):
    def connect(self, peer: str, card: MeshCard) -> None:
        """Registers a mesh to pull from, under the name `peer`. Does not block. If the connection
        fails, pulls from this mesh fail. A name must not be reused for another mesh."""
        ...

    def disconnect(self, peer: str) -> None:
        """Drops the connection to a mesh. Its pulls in progress fail. Idempotent."""
        ...

    def offer(
        self, offer_id: int, block: jax.Array, rank: int, stamp: BlockStamp = NO_STAMP
    ) -> None:
        """Holds one dp rank's shards of a block until `release` or `revoke` is called. The block
        may not be computed yet. If the id has been revoked already, the block is dropped at once.

        Args:
            offer_id: Random 64-bit id.
            block: Global array; not donated afterwards.
            rank: Index of the dp rank whose shards are offered.
            stamp: Stamp for the checksums that a lossy codec adds.

        Raises:
            HandoffError: The id is in use or was used before.
        """
        ...

    def pull(self, offer_id: int, target: PullTarget, deadline_seconds: float) -> Pull:
        """Starts to pull an offered block. Never blocks or raises. An offer may be pulled several
        times.

        Args:
            offer_id: Id of the offer. The sender may make the offer later than this call.
            deadline_seconds: Time from now after which the pull fails.
        """
        ...

    def release(self, offer_id: int) -> None:
        """Removes an offer. Later pulls of it fail; pulls in progress continue. Idempotent."""
        ...

    def revoke(self, offer_id: int, reason: str) -> None:
        """Withdraws an offer, even before it is made. All pulls of the offer fail with
        HandoffError(reason). Idempotent."""
        ...

    def offered(self) -> Offered: ...

    def bytes_per_pair(self) -> dict[tuple[int, int], int]:
        """Returns the bytes transferred since the start, by (source device id, destination device
        id). The receiving process counts them."""
        ...


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Block = TypeVar("Block", bound=_Sized)


class Offers(Generic[Block]):
    """The blocks that a channel offers, by offer id. Records how each offer ended (released or
    revoked): a pull of an ended offer fails with this record as its error text, and no id is
    offered twice. Keeps the records of the latest REMEMBERED_IDS ids. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[int, Block] = {}
        self._ended: OrderedDict[int, str] = OrderedDict()

    def add(self, offer_id: int, block: Block) -> bool:
        """Returns whether the block is offered now. Returns False if the id was revoked before.
        Raises HandoffError if the id is in use or was used before."""
        with self._lock:
            how = "is live already" if offer_id in self._live else self._ended.get(offer_id)
            if how is None:
                self._live[offer_id] = block
            elif not how.startswith("was revoked"):
                raise HandoffError(
                    f"offer {offer_id:#x} {how}; draw a fresh random id for each offer"
                )
            return how is None

    def get(self, offer_id: int) -> Block | None:
        """Returns None for a block that is not offered yet. Raises HandoffError for an ended
        offer."""
        with self._lock:
            if how := self._ended.get(offer_id):
                raise HandoffError(f"offer {offer_id:#x} {how}")
            return self._live.get(offer_id)

    def release(self, offer_id: int) -> None:
        with self._lock:
            if self._live.pop(offer_id, None) is not None:
                self._end(offer_id, "was released")

    def revoke(self, offer_id: int, reason: str) -> Block | None:
        """Ends an offer, even before it is made. Does not change an ended offer. Returns the block
        that was offered."""
        with self._lock:
            if offer_id not in self._ended:
                self._end(offer_id, f"was revoked: {reason}")
            return self._live.pop(offer_id, None)

    def offered(self) -> Offered:
        with self._lock:
            return Offered(len(self._live), sum(block.nbytes for block in self._live.values()))

    def clear(self) -> None:
        with self._lock:
            self._live.clear()

    def _end(self, offer_id: int, how: str) -> None:
        self._ended[offer_id] = how
        while len(self._ended) > REMEMBERED_IDS:
            self._ended.popitem(last=False)

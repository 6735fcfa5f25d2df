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

from dataclasses import dataclass, replace
from typing import Protocol

import jax
import jax.numpy as jnp

from jdisagg.errors import JdisaggError, LayoutError
from jdisagg.layout.axes import MESH_AXES
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.transfer.boxes import HEAD_DIMENSION, RANK_DIMENSION


def block_sharding(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    """Returns the sharding of a block on a mesh with axes ("dp", "kv", "rep"). Dimension 0 is
    sharded over dp, KV heads over kv. The block is replicated over rep."""
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp", None, "kv"))


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


class Pull(Protocol):
    """A future of one pull. Once `is_ready()` returns True, `arrays()` returns the block or raises
    the error that `failed()` returns."""

    @property
    def bytes_moved(self) -> int:
        """Number of bytes that this pull has transferred between devices so far."""
        ...

    def is_ready(self) -> bool:
        """Returns whether the pull has ended: it has arrived, failed, been cancelled or passed its
        deadline. Never blocks."""
        ...

    def failed(self) -> JdisaggError | None:
        """Returns the error: HandoffError (unknown, released, revoked, late, cancelled, broken) or
        IncompatiblePeerError. None while the pull is in progress and after it has arrived."""
        ...

    def arrays(self) -> tuple[jax.Array, ...]:
        """Returns the arrays of the block. Valid once `is_ready()` returns True. If the pull
        failed, raises the error that `failed()` returns."""
        ...

    def cancel(self) -> None:
        """Cancels the pull and deletes its arrays, also if they have arrived. Idempotent."""
        ...


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


_NO_STAMP = BlockStamp()


class Channel(Protocol):
    def connect(self, peer: str, card: MeshCard) -> None:
        """Registers a mesh to pull from, under the name `peer`. Does not block. If the connection
        fails, pulls from this mesh fail. A name must not be reused for another mesh."""
        ...

    def disconnect(self, peer: str) -> None:
        """Drops the connection to a mesh. Its pulls in progress fail. Idempotent."""
        ...

    def offer(
        self, offer_id: int, block: jax.Array, rank: int, stamp: BlockStamp = _NO_STAMP
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

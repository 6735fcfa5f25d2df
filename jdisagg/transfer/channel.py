"""The interface for transfers between two meshes: a block of KV is offered on one mesh, pulled by
the other, and released.

A block is a global array [dp, C, K, T, H]: C rows of a layer group's components (see
`layout/kv_spec.py`), K kv heads over mesh axis "kv", replicated over "rep". An offer contains the
part of one dp rank. A pull returns n = local heads / granule global arrays [dp, C, granule * kv, T,
H] with `granule` heads per kv shard. On the receiving rank, array i of kv shard j begins with head
j * n * granule + i * granule, so concatenating the n local shards along heads gives the shard's
heads in order. The other ranks hold the target's resident zeros; no byte is sent to them.

A target names the peer that its block comes from. Except within one process, `connect` must have
been called for that peer. With a lossy codec the received arrays are the codec's leaves of each
piece (transfer/codec.py), not its heads.

Rules:
- Ids are random 64-bit numbers, used once.
- No method blocks: a pull is a future to poll, and its deadline passes even if it is not polled.
- A pull may come before its offer, because the two sides' threads are not ordered. It then waits,
  within its deadline.
- A failed pull raises a typed error itself; no later JAX call fails because of it.
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
    """Returns the sharding of a block on a mesh ("dp", "kv", "rep"): ranks over dp, heads over kv,
    replicated over rep."""
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp", None, "kv"))


def resident_zeros(
    mesh: jax.sharding.Mesh,
    components: int,
    granule: int,
    tokens: int,
    head_size: int,
    dtype: jnp.dtype,
) -> jax.Array:
    """Makes the zeros [dp, components, granule * kv, tokens, head_size] of a `PullTarget`. Callers
    keep them for each shape and never donate them."""
    ranks, shards, _ = (mesh.shape[axis] for axis in MESH_AXES)
    shape = (ranks, components, granule * shards, tokens, head_size)
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=block_sharding(mesh))()


@dataclass(frozen=True, slots=True, eq=False)
class PullTarget:
    """The destination of a block.

    Attributes:
        zeros: [dp, C, granule * kv, T, H] under `block_sharding`. Gives the shape, dtype and
            sharding of each received array, and stands in for the ranks that receive nothing.
        rank: Receiving dp rank of the mesh of `zeros`.
        peer: Name of the sending mesh; "" if there is only one.
        codec: Encoding of the pieces.
        leaves: The codec's zeros of each leaf, [dp, C', granule * kv, T', x] under
            `block_sharding`; () without a codec.
        heads: KV heads of the whole block; 0 if unknown. With `source_rank`, the pieces can then be
            planned before the sender answers.
        source_rank: The peer's dp rank that offers the block.
    """

    zeros: jax.Array
    rank: int
    peer: str = ""
    codec: str = "none"
    leaves: tuple[jax.Array, ...] = ()
    heads: int = 0
    source_rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.zeros.shape[RANK_DIMENSION]:
            raise LayoutError(
                f"pull target: rank {self.rank} must be in [0, {self.zeros.shape[RANK_DIMENSION]})"
            )

    @property
    def resident(self) -> tuple[jax.Array, ...]:
        """Zeros of the transferred arrays: of the codec's leaves, or of the heads."""
        return self.leaves or (self.zeros,)

    @property
    def granule(self) -> int:
        """Heads of one piece."""
        return self.zeros.sharding.shard_shape(self.zeros.shape)[HEAD_DIMENSION]


@dataclass(frozen=True, slots=True)
class Offered:
    """Number of a channel's live offers, and their device bytes, including replicas."""

    offers: int
    bytes: int


class Pull(Protocol):
    """A pull in progress or ended. Once it is ready, `arrays()` returns the block or raises the
    error of `failed()`."""

    @property
    def bytes_moved(self) -> int:
        """Bytes that this pull has moved between devices so far."""
        ...

    def is_ready(self) -> bool:
        """Returns whether the pull has ended: arrived, failed, cancelled or late. Never blocks."""
        ...

    def failed(self) -> JdisaggError | None:
        """Returns the error: HandoffError (unknown, released, revoked, late, cancelled, broken) or
        IncompatiblePeerError. None while the pull is in progress and after it has arrived."""
        ...

    def arrays(self) -> tuple[jax.Array, ...]:
        """Returns the n arrays. Valid once ready; raises `failed()`."""
        ...

    def cancel(self) -> None:
        """Gives up and drops the arrays, also if they have arrived. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class BlockStamp:
    """Identifies the values of a block for its checksums.

    Attributes:
        key: Key of the sums (ops/checksum.py).
        component: Index, within the model, of the block's first component.
        start: Position of the first token.
        valid_tokens: Number of tokens that the checksums cover.
    """

    key: int = 0
    component: int = 0
    start: int = 0
    valid_tokens: int = 0

    def of_offer(self, offer_id: int) -> "BlockStamp":
        """Returns the stamp with a key for one offer. With a common key, a block would pass the
        check with the stamp of another sequence's block."""
        return replace(self, key=self.key ^ offer_id)


_NO_STAMP = BlockStamp()


class Channel(Protocol):
    def connect(self, peer: str, card: MeshCard) -> None:
        """Registers a peer to pull from. Does not block; if the connection fails, its pulls fail. A
        name must not be reused for another mesh."""
        ...

    def disconnect(self, peer: str) -> None:
        """Drops the connection to a peer; its pulls in progress fail. Idempotent."""
        ...

    def offer(
        self, offer_id: int, block: jax.Array, rank: int, stamp: BlockStamp = _NO_STAMP
    ) -> None:
        """Holds one dp rank's shards of a block, which may still be computed, until release or
        revocation. An offer that was revoked before it was made is dropped.

        Args:
            offer_id: Random 64-bit id.
            block: Global array; not donated afterwards.
            rank: dp rank whose shards are offered.
            stamp: Identifies the values for checksums of a lossy codec.

        Raises:
            HandoffError: The id is in use or was used before.
        """
        ...

    def pull(self, offer_id: int, target: PullTarget, deadline_seconds: float) -> Pull:
        """Starts a pull. Never blocks or raises. An offer may be pulled several times.

        Args:
            offer_id: Id of the offer, which the sender may make later.
            target: Destination of the block.
            deadline_seconds: Time from now after which the pull fails.
        """
        ...

    def release(self, offer_id: int) -> None:
        """Removes an offer: later pulls fail, pulls in progress continue. Idempotent."""
        ...

    def revoke(self, offer_id: int, reason: str) -> None:
        """Withdraws an offer, also one that is not made yet: its pulls fail with
        HandoffError(reason). Idempotent."""
        ...

    def offered(self) -> Offered: ...

    def bytes_per_pair(self) -> dict[tuple[int, int], int]:
        """Returns the bytes moved since the start by (source device id, destination device id),
        counted where they arrive."""
        ...

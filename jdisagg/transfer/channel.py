"""The seam between two meshes: a block of KV is offered on one, pulled on the other, and released.

A block is a global array [dp, C, K, T, H] (C rows of a layer group's components, see
`layout/kv_spec.py`, K kv heads over mesh axis "kv", replicated over "rep"), of which one offer
concerns one dp rank. A pull gives the receiver n = local heads / granule global arrays [dp, C,
granule * kv, T, H], each `granule` heads a kv shard: on the receiving rank, array i of kv shard j
holds heads j * n * granule + i * granule and on, so that concatenating the n local shards along
heads gives the shard's heads in order. Ranks that do not receive hold the resident zeros that the
target brought; no byte moves to them.

Several peers: a target names the peer that its block comes from; `connect` must have introduced it
(a channel within one process needs no introduction). With a lossy codec what is received are the
codec's leaves of each piece (transfer/codec.py), not its heads.

Rules. Ids are random 64-bit numbers, used once. Nothing here waits: a pull is a future to poll, and
its deadline passes whoever polls. A pull may come before its offer, for the two sides' threads are
not ordered: it then waits, within its deadline. Failures come out of the pull, typed, never out of
a late JAX call. Offered blocks are never donated; pulled arrays may share memory with the block or
the zeros, so they are never donated either. All methods may be called from any thread. Whether
bytes pass through the host is the implementation's affair, not the seam's."""

from dataclasses import dataclass, replace
from typing import Protocol

import jax
import jax.numpy as jnp

from jdisagg.errors import JdisaggError, LayoutError
from jdisagg.layout.axes import MESH_AXES
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.transfer.boxes import HEAD_DIMENSION, RANK_DIMENSION


def block_sharding(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    """How a block lies on an instance's mesh ("dp", "kv", "rep"): ranks over dp, heads over kv,
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
    """The zeros [dp, components, granule * kv, tokens, head_size] of a `PullTarget`: made once for
    each shape, kept, never donated."""
    ranks, shards, _ = (mesh.shape[axis] for axis in MESH_AXES)
    shape = (ranks, components, granule * shards, tokens, head_size)
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=block_sharding(mesh))()


@dataclass(frozen=True, slots=True, eq=False)
class PullTarget:
    """Where a block goes: dp rank `rank` of the mesh on which `zeros` lies.

    zeros: [dp, C, granule * kv, T, H] under `block_sharding`; gives the shape, dtype and sharding
    of each received array, and stands
        in for the ranks that receive nothing.
    peer: whom it comes from; "" where there is only one. codec: how it travels. leaves: with a
    codec, the resident zeros of each of its leaves, [dp, C', granule * kv, T', x] under
    `block_sharding`; () for none. heads: kv heads of the whole block, and `source_rank`, the peer's
    dp rank that offers it: from these the pieces are known before
        the sender has said a word. 0 where they are not known: the sender is then asked first."""

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
        """The zeros of what travels: the codec's leaves, or the heads themselves."""
        return self.leaves or (self.zeros,)

    @property
    def granule(self) -> int:
        """Heads of one piece."""
        return self.zeros.sharding.shard_shape(self.zeros.shape)[HEAD_DIMENSION]


@dataclass(frozen=True, slots=True)
class Offered:
    """What a channel holds for others: live offers, and the device bytes that they keep (replicas
    counted)."""

    offers: int
    bytes: int


class Pull(Protocol):
    """A transfer under way. Once it is ready it stays so: either `arrays()` gives the block, or it
    raises what `failed()` names."""

    @property
    def bytes_moved(self) -> int:
        """Bytes that crossed from one device to another for this pull, so far."""
        ...

    def is_ready(self) -> bool:
        """Whether it is over: arrived, failed, cancelled or past its deadline. Never blocks."""
        ...

    def failed(self) -> JdisaggError | None:
        """Why it failed: HandoffError (unknown, released, revoked, late, cancelled, broken) or
        IncompatiblePeerError. None while it is under way and when it has arrived."""
        ...

    def arrays(self) -> tuple[jax.Array, ...]:
        """The n arrays; only once ready. Raises `failed()`."""
        ...

    def cancel(self) -> None:
        """Gives up and drops the arrays, also arrived ones. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class BlockStamp:
    """What the values of a block are, for the sums that travel with a lossy codec: the first of its
    tokens is position `start`, `valid_tokens` of them count, its components are `component`.. of
    the model's. `key` keys the sums (ops/checksum.py)."""

    key: int = 0
    component: int = 0
    start: int = 0
    valid_tokens: int = 0

    def of_offer(self, offer_id: int) -> "BlockStamp":
        """For this offer alone: sums that travel with a block would otherwise also vouch for
        another sequence's block of the same place."""
        return replace(self, key=self.key ^ offer_id)


_NO_STAMP = BlockStamp()


class Channel(Protocol):
    def connect(self, peer: str, card: MeshCard) -> None:
        """Introduces a peer to pull from. Returns at once; what does not work shows in its pulls. A
        name is never used for another mesh."""
        ...

    def disconnect(self, peer: str) -> None:
        """Drops the connection; pulls under way from it fail. Idempotent; an unknown name is
        fine."""
        ...

    def offer(
        self, offer_id: int, block: jax.Array, rank: int, stamp: BlockStamp = _NO_STAMP
    ) -> None:
        """Holds dp rank `rank`'s shards of `block` until release or revocation; does not wait for
        them to be computed.

        Raises HandoffError for an id in use or used before. An offer revoked before it was made is
        dropped."""
        ...

    def pull(self, offer_id: int, target: PullTarget, deadline_seconds: float) -> Pull:
        """Begins; returns at once and does not raise. The deadline counts from now. An offer may be
        pulled again."""
        ...

    def release(self, offer_id: int) -> None:
        """Forgets an offer: later pulls fail. A pull under way is not harmed. Idempotent; an
        unknown id is fine."""
        ...

    def revoke(self, offer_id: int, reason: str) -> None:
        """Withdraws an offer: later pulls and those under way fail with HandoffError(reason).
        Idempotent; also for offers not yet made."""
        ...

    def offered(self) -> Offered: ...

    def bytes_per_pair(self) -> dict[tuple[int, int], int]:
        """(source device id, destination device id) -> bytes moved since the start, counted where
        they were moved."""
        ...

"""The channel between two meshes of one process. It copies each piece by a `device_put` to a single
device.

This module must not depend on requests, pages or layers. Invariants:
- A piece that is a whole shard is sent without a copy on the sender. Otherwise one program cuts the
  shard into all its pieces, on the shard's own device.
- A piece that is already on its destination device is not copied. If the piece is a whole shard,
  the received array shares the shard's buffer.
- Nothing blocks: `device_put` of an array that is still being computed returns at once (on CPU half
  a millisecond for four pieces), and single-device work issued later on the destination does not
  wait for it. (XLA:CPU runs the multi-device programs of one process one after another, whatever
  their devices. This is another reason for cutting by single-device programs.)
- A global `device_put` between meshes is avoided: it can go through the host and block its caller
  for 100 ms."""

import functools
import math
import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field

import jax

from jdisagg.clock import Clock
from jdisagg.errors import HandoffError, JdisaggError
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.layout.reshard_plan import HEAD_DIMENSION
from jdisagg.transfer.channel import (
    NO_STAMP,
    BlockStamp,
    Offered,
    Offers,
    Pull,
    PullTarget,
    rank_placement,
)
from jdisagg.transfer.pieces import (
    OfferedBlock,
    PlannedPiece,
    RequestedPieces,
    check_geometry,
    check_leaves,
    plan_pieces,
    warm_pieces,
)


@dataclass(frozen=True, slots=True, eq=False)
class _Offer:
    block: OfferedBlock
    pulls: weakref.WeakSet[Pull] = field(default_factory=weakref.WeakSet)

    @property
    def nbytes(self) -> int:
        return self.block.nbytes


# sharding, shape and rank of the block and of the target's zeros
_Route = tuple[
    jax.sharding.Sharding, tuple[int, ...], int, jax.sharding.Sharding, tuple[int, ...], int
]


class InProcessChannel:
    """Implements `Channel` for two meshes of one process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._offers: Offers[_Offer] = Offers()
        self._waiting: dict[int, list[tuple[Pull, PullTarget]]] = {}
        self._turns: dict[_Route, int] = {}
        self._moved: Counter[tuple[int, int]] = Counter()
        self._planned: Counter[tuple[int, int]] = Counter()

    def connect(self, peer: str, card: MeshCard) -> None:
        """Does nothing: both meshes are in this process."""

    def disconnect(self, peer: str) -> None:
        """Does nothing."""

    def offer(
        self, offer_id: int, block: jax.Array, rank: int, stamp: BlockStamp = NO_STAMP
    ) -> None:
        offer = _Offer(OfferedBlock.of(block, rank, stamp))
        with self._lock:
            if not self._offers.add(offer_id, offer):
                return
            waiting = self._waiting.pop(offer_id, [])
            offer.pulls.update(pull for pull, _ in waiting)
        for pull, target in waiting:
            if not pull.is_ready():  # otherwise it is late or cancelled
                self._begin(pull, offer, target)

    def pull(self, offer_id: int, target: PullTarget, deadline_seconds: float) -> Pull:
        pull = Pull(offer_id, self._clock, deadline_seconds)
        try:
            with self._lock:
                self._forget_ended_waits()
                offer = self._offers.get(offer_id)
                if offer is not None:
                    offer.pulls.add(pull)
                else:
                    self._waiting.setdefault(offer_id, []).append((pull, target))
        except HandoffError as error:  # the offer has ended
            pull.fail(error)
            return pull
        if offer is not None:
            self._begin(pull, offer, target)
        return pull

    def release(self, offer_id: int) -> None:
        self._offers.release(offer_id)

    def revoke(self, offer_id: int, reason: str) -> None:
        with self._lock:
            offer = self._offers.revoke(offer_id, reason)
            pulls = list(offer.pulls) if offer else []
            pulls += [pull for pull, _ in self._waiting.pop(offer_id, [])]
        for pull in pulls:
            pull.fail(HandoffError(f"offer {offer_id:#x} was revoked: {reason}"))

    def warm_up(self, source_mesh: jax.sharding.Mesh, target: PullTarget, kv_heads: int) -> None:
        _, components, _, tokens, head_size = target.zeros.shape
        shape = (components, kv_heads // source_mesh.shape["kv"], tokens, head_size)
        warm_pieces(source_mesh, shape, target.zeros.dtype, target.granule, target.codec)

    def offered(self) -> Offered:
        return self._offers.offered()

    def bytes_per_pair(self) -> dict[tuple[int, int], int]:
        with self._lock:
            return dict(self._moved)

    def planned_bytes_per_pair(self) -> dict[tuple[int, int], int]:
        """Returns the same table as `bytes_per_pair`, computed from the transfer plans instead of
        the transferred arrays. Tests compare the two."""
        with self._lock:
            return dict(self._planned)

    def _begin(self, pull: Pull, offer: _Offer, target: PullTarget) -> None:
        """Called without holding the lock, because JAX calls may take a millisecond."""
        try:
            check_leaves(target)
            check_geometry(offer.block, str(target.zeros.dtype), target.zeros.shape, target.granule)
            plan = self._next_plan(offer.block, target)
            arrays, moved = _move(offer.block, target, plan)
        except JdisaggError as error:
            pull.fail(error)
            return
        except Exception as error:
            pull.fail(HandoffError(f"the copies of a pull could not be issued: {error}"))
            return
        with self._lock:
            self._moved.update(moved)
            self._planned.update(_planned_bytes(plan, target))
        pull.deliver(arrays, moved.total())

    def _next_plan(self, offer: OfferedBlock, target: PullTarget) -> tuple[PlannedPiece, ...]:
        """Successive pulls prefer different replicas of the source as senders, which balances the
        load."""
        zeros = target.zeros
        route = (offer.sharding, offer.shape, offer.rank, zeros.sharding, zeros.shape, target.rank)
        with self._lock:
            turn = self._turns[route] = self._turns.get(route, -1) + 1
        return _plan(route, turn % offer.replicas)

    def _forget_ended_waits(self) -> None:
        for offer_id in [
            key for key, waits in self._waiting.items() if all(pull.is_ready() for pull, _ in waits)
        ]:
            del self._waiting[offer_id]


@functools.lru_cache(maxsize=1024)
def _plan(route: _Route, turn: int) -> tuple[PlannedPiece, ...]:
    sharding, shape, rank, to_sharding, to_shape, to_rank = route
    source = rank_placement(sharding, shape, rank)
    destination = rank_placement(to_sharding, (to_shape[0], *shape[1:]), to_rank)
    granule = to_sharding.shard_shape(to_shape)[HEAD_DIMENSION]
    return plan_pieces(source, destination, granule, turn)


def _move(
    offer: OfferedBlock, target: PullTarget, pieces: tuple[PlannedPiece, ...]
) -> tuple[tuple[jax.Array, ...], Counter[tuple[int, int]]]:
    leaves = iter(RequestedPieces(offer, pieces, target.granule, target.codec).on_devices())
    devices = {device.id: device for device in target.zeros.sharding.addressable_devices}
    resident = [
        {shard.device.id: shard.data for shard in zeros.addressable_shards}
        for zeros in target.resident
    ]
    count = offer.shape[HEAD_DIMENSION] // target.zeros.shape[HEAD_DIMENSION]
    received = [[dict(shards) for shards in resident] for _ in range(count)]
    moved: Counter[tuple[int, int]] = Counter()
    for piece in pieces:
        for shards in received[piece.part]:
            leaf = next(leaves)
            if piece.source != piece.receiver:
                leaf = jax.device_put(leaf, devices[piece.receiver])
                moved[piece.source, piece.receiver] += leaf.nbytes
            shards[piece.receiver] = leaf
    arrays = (
        jax.make_array_from_single_device_arrays(zeros.shape, zeros.sharding, list(shards.values()))
        for part in received
        for zeros, shards in zip(target.resident, part, strict=True)
    )
    return tuple(arrays), moved


def _planned_bytes(
    pieces: tuple[PlannedPiece, ...], target: PullTarget
) -> Counter[tuple[int, int]]:
    weight = sum(
        math.prod(zeros.sharding.shard_shape(zeros.shape)) * zeros.dtype.itemsize
        for zeros in target.resident
    )
    planned: Counter[tuple[int, int]] = Counter()
    for piece in pieces:
        if piece.source != piece.receiver:
            planned[piece.source, piece.receiver] += weight
    return planned

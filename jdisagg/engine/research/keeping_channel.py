"""A channel whose offers stay in the hand: what a prefill of the research face offers is kept
instead of waiting for a peer."""

import jax

from jdisagg.layout.mesh_card import MeshCard
from jdisagg.transfer.channel import BlockStamp, Channel, Offered, Pull, PullTarget

_NO_STAMP = BlockStamp()


class KeepingChannel:
    """A `Channel` whose offers stay with the instance that makes them, until it takes them; all
    else is the real channel's."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._kept: dict[int, jax.Array] = {}

    def take(self, offer_id: int) -> jax.Array:
        return self._kept.pop(offer_id)

    def forget(self) -> None:
        """Drops what a failed prefill left."""
        self._kept.clear()

    def connect(self, peer: str, card: MeshCard) -> None:
        self._channel.connect(peer, card)

    def disconnect(self, peer: str) -> None:
        self._channel.disconnect(peer)

    def offer(
        self, offer_id: int, block: jax.Array, rank: int, stamp: BlockStamp = _NO_STAMP
    ) -> None:
        self._kept[offer_id] = block

    def pull(self, offer_id: int, target: PullTarget, deadline_seconds: float) -> Pull:
        return self._channel.pull(offer_id, target, deadline_seconds)

    def release(self, offer_id: int) -> None:
        self._kept.pop(offer_id, None)

    def revoke(self, offer_id: int, reason: str) -> None:
        self._kept.pop(offer_id, None)

    def offered(self) -> Offered:
        return Offered(len(self._kept), sum(block.nbytes for block in self._kept.values()))

    def bytes_per_pair(self) -> dict[tuple[int, int], int]:
        return self._channel.bytes_per_pair()

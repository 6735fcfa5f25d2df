"""The channel between processes: control messages over a `KvLink`, bytes by what the two have in
common: on one host their devices' memory where both lend it, else shared memory; else NIXL where
both have it, else `jax.experimental.transfer`.

One of these a process. Its sending half (kv_sender.py) holds offers and posts the pieces that are
asked for; its receiving half (kv_puller.py) asks, pulls and puts together; the engine itself is
called in transfer_engine.py alone. Each process of an instance moves only the shards that it holds.
The owner of the link gives what arrives to `handle`, and closes the channel at the end."""

import jax
import jax.numpy as jnp

from jdisagg.clock import Clock
from jdisagg.layout.mesh_card import KvEnd, MeshCard
from jdisagg.messages.kv_plane import KvMessage, Opened, Posted, Refused
from jdisagg.transfer.channel import BlockStamp, Offered, PullTarget
from jdisagg.transfer.kv_link import KvLink
from jdisagg.transfer.kv_puller import KvPuller
from jdisagg.transfer.kv_sender import KvSender
from jdisagg.transfer.memories import Memories
from jdisagg.transfer.pieces import warm_pieces
from jdisagg.transfer.polled_pull import PolledPull
from jdisagg.transfer.transfer_engine import EngineOptions

_NO_STAMP = BlockStamp()
_NO_MEMORIES = Memories()


class JaxTransferChannel:
    """`Channel`, and the `KvReceiver` of its link.

    end: this process's own, as its card shows it. host: the one interface on which the engine
    listens; never all, for it has no authentication. transports: as in the card; the same on all
    workers. memories: this process's, of which `end` tells (`Memories.end`); they are closed with
    the channel. Where it has none all goes through the engine."""

    def __init__(
        self,
        clock: Clock,
        end: KvEnd,
        link: KvLink,
        *,
        host: str = "127.0.0.1",
        transports: int = 4,
        memories: Memories = _NO_MEMORIES,
    ) -> None:
        options = EngineOptions(host, transports)
        self._memories = memories
        self._sender = KvSender(clock, end, link, options, memories)
        self._puller = KvPuller(clock, link, options, memories)

    def handle(self, sender: KvEnd, message: KvMessage) -> None:
        """What came over the link from `sender`. From any thread; never blocks."""
        if isinstance(message, Opened | Posted | Refused):
            self._puller.handle(sender, message)
        else:
            self._sender.handle(sender, message)

    def connect(self, peer: str, card: MeshCard) -> None:
        self._puller.connect(peer, card)

    def disconnect(self, peer: str) -> None:
        self._puller.disconnect(peer)

    def offer(
        self, offer_id: int, block: jax.Array, rank: int, stamp: BlockStamp = _NO_STAMP
    ) -> None:
        self._sender.offer(offer_id, block, rank, stamp)

    def pull(self, offer_id: int, target: PullTarget, deadline_seconds: float) -> PolledPull:
        return self._puller.pull(offer_id, target, deadline_seconds)

    def release(self, offer_id: int) -> None:
        self._sender.release(offer_id)

    def revoke(self, offer_id: int, reason: str) -> None:
        self._sender.revoke(offer_id, reason)

    def warm_up(
        self,
        mesh: jax.sharding.Mesh,
        shape: tuple[int, int, int, int],
        dtype: jnp.dtype,
        granule: int,
        codec_name: str,
    ) -> None:
        """Compiles what serving blocks of a shard's `shape` (C, local K, T, H) in pieces of
        `granule` heads will run. Waits for it."""
        warm_pieces(mesh, shape, dtype, granule, codec_name)

    def offered(self) -> Offered:
        return self._sender.offered()

    def postings(self) -> int:
        """Requests whose pieces wait in the engine to be pulled; 0 once all is quiet."""
        return self._sender.postings()

    def under_way(self) -> int:
        """Requests of this process's pulls that are neither answered to the end nor given up; 0
        once all is quiet."""
        return self._puller.under_way()

    def channels(self) -> tuple[str, ...]:
        """By what KV comes from each process that was asked for some: "address channel"."""
        return self._puller.channels()

    def bytes_per_pair(self) -> dict[tuple[int, int], int]:
        return self._puller.bytes_per_pair()

    def close(self) -> None:
        """Ends threads, connections and servers; pulls under way fail. Idempotent."""
        self._puller.close()
        self._sender.close()
        for memory in (self._memories.nixl, self._memories.device):
            if memory is not None:
                memory.close()

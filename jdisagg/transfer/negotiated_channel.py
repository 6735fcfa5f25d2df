"""The channel between processes, which negotiates a backend for each pair of processes.

Control messages are sent over a `KvLink`. KV is transferred by the first backend that both
processes support and that has not failed between them. The order is shared memory, NIXL, JAX
transfer engine. If the configuration names NIXL, NIXL comes first. Each process has one channel.
The sending half (kv_sender.py) holds offers and serves requested pieces. The receiving half
(kv_puller.py) requests, pulls and assembles pieces. Each process of a multi-process mesh transfers
only its own shards. The link's owner passes received messages to `handle`, and closes the channel
at the end."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jdisagg.clock import Clock
from jdisagg.layout.mesh_card import KvEnd, MeshCard
from jdisagg.messages.kv_plane import KvLink, KvMessage, Posted, Refused
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, TransferTimeouts
from jdisagg.transfer.backend import Backend
from jdisagg.transfer.channel import NO_STAMP, BlockStamp, Offered, Pull, PullTarget
from jdisagg.transfer.kv_puller import KvPuller
from jdisagg.transfer.kv_sender import KvSender
from jdisagg.transfer.nixl_memory import NixlMemory, nixl_memory
from jdisagg.transfer.pieces import warm_pieces
from jdisagg.transfer.shared_memory import SharedMemory
from jdisagg.transfer.transfer_engine import EngineBackend, EngineOptions


@dataclass(frozen=True, slots=True)
class Memories:
    """The memory of one process that other processes can read."""

    shared: SharedMemory | None = None
    nixl: NixlMemory | None = None

    @staticmethod
    def of_worker(channel: str, host: str) -> "Memories":
        """Allocates the memory from which other processes may read a worker's KV. Raises
        ConfigError if NIXL is configured by name and cannot be used."""
        return Memories(SharedMemory.of_host(), nixl_memory(channel, host))

    def end(self, control: str, boot_id: int) -> KvEnd:
        shared = self.shared.name if self.shared else ""
        return KvEnd(control, boot_id, shared, self.nixl is not None)

    def backends(self, options: EngineOptions) -> tuple[Backend, ...]:
        nixl_first = self.nixl is not None and self.nixl.first
        memories = (self.nixl, self.shared) if nixl_first else (self.shared, self.nixl)
        usable = (memory for memory in memories if memory is not None)
        return (*usable, EngineBackend(options))


_NO_MEMORIES = Memories()


class NegotiatedChannel:
    """Implements `Channel`, and `KvReceiver` for its link.

    Args:
        host: Address of the only interface on which the transfer engine listens. The engine has no
            authentication.
        transports: Number of parallel connections of the transfer engine. All workers must be
            configured with the same number.
        memories: Memory of this process that other processes can read. The channel closes it.
    """

    def __init__(
        self,
        clock: Clock,
        end: KvEnd,
        link: KvLink,
        *,
        host: str = "127.0.0.1",
        transports: int = 4,
        memories: Memories = _NO_MEMORIES,
        timeouts: TransferTimeouts = DEFAULT_TIMEOUTS.transfer,
    ) -> None:
        options = EngineOptions(host, transports, timeouts=timeouts)
        self._backends = memories.backends(options)
        self._sender = KvSender(clock, end, link, options, self._backends)
        self._puller = KvPuller(clock, link, options, self._backends)

    def handle(self, sender: KvEnd, message: KvMessage) -> None:
        if isinstance(message, Posted | Refused):
            self._puller.handle(sender, message)
        else:
            self._sender.handle(sender, message)

    def connect(self, peer: str, card: MeshCard) -> None:
        self._puller.connect(peer, card)

    def disconnect(self, peer: str) -> None:
        self._puller.disconnect(peer)

    def name_devices_by(self, mesh: jax.sharding.Mesh) -> None:
        """Sets the mesh whose card was published to peers, if the instance has several pipeline
        stages. Blocks of the other stages are announced with the device numbers of this mesh, which
        is possible because the meshes of all stages have equal shapes. Must be called before the
        first offer."""
        self._sender.card = mesh

    def offer(
        self, offer_id: int, block: jax.Array, rank: int, stamp: BlockStamp = NO_STAMP
    ) -> None:
        self._sender.offer(offer_id, block, rank, stamp)

    def pull(self, offer_id: int, target: PullTarget, deadline_seconds: float) -> Pull:
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
        """`shape` (C, local K, T, H) is the shape of one device's shard. Each piece has `granule`
        KV heads. The call blocks."""
        warm_pieces(mesh, shape, dtype, granule, codec_name)

    def offered(self) -> Offered:
        return self._sender.offered()

    def postings(self) -> int:
        return self._sender.postings()

    def under_way(self) -> int:
        return self._puller.under_way()

    def channels(self) -> tuple[str, ...]:
        """Returns "ADDRESS BACKEND" for each sender process."""
        return self._puller.channels()

    def bytes_per_pair(self) -> dict[tuple[int, int], int]:
        return self._puller.bytes_per_pair()

    def close(self) -> None:
        """Closes all threads, connections, servers and backends of the channel. Pulls in progress
        fail. Idempotent."""
        self._puller.close()
        self._sender.close()
        for backend in self._backends:
            backend.close()

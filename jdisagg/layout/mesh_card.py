"""A worker's mesh as plain data, exchanged in the hello before two workers transfer KV.

Every JAX job numbers its devices and processes from 0. The receiver uses the numbers of the
sender's mesh only to identify pieces."""

from dataclasses import dataclass

from jdisagg.errors import LayoutError
from jdisagg.layout.reshard_plan import Box


@dataclass(frozen=True, slots=True)
class KvEnd:
    """One process of an instance on the KV plane.

    Attributes:
        control: Address (host:port) that receives `KvPlane` messages.
        boot_id: Random number drawn at the process's start. Identifies a restart at the same
            address.
        memory: Name of the process's shared memory (transfer/shared_memory.py), or empty.
        nixl: Whether peers can read the process's memory over NIXL (transfer/nixl_memory.py).
        device: Name of the host on which the process exports device memory by CUDA IPC
            (transfer/device_memory.py), or empty.
    """

    control: str
    boot_id: int
    memory: str = ""
    nixl: bool = False
    device: str = ""


@dataclass(frozen=True, slots=True)
class MeshCard:
    """A mesh with the axes ("dp", "kv", "rep") as plain data.

    Attributes:
        shape: Sizes of the axes.
        devices, processes: Device and process number at each mesh position, row-major over `shape`.
        ends: KV-plane endpoints by process index. Empty if both sides are in one process.
        transports: Parallel connections of the transfer engine, which must be equal on both sides.
    """

    shape: tuple[int, int, int]
    devices: tuple[int, ...]
    processes: tuple[int, ...]
    ends: tuple[KvEnd, ...] = ()
    transports: int = 0

    def __post_init__(self) -> None:
        dp, kv, rep = self.shape
        if not len(self.devices) == len(self.processes) == dp * kv * rep:
            raise LayoutError(
                f"mesh card: {len(self.devices)} devices, {len(self.processes)} processes for shape"
                f" {self.shape}"
            )

    @property
    def ranks(self) -> int:
        return self.shape[0]

    @property
    def head_shards(self) -> int:
        return self.shape[1]

    def rank_boxes(self, rank: int, shape: tuple[int, ...]) -> dict[int, Box]:
        """Returns the box of each device of dp rank `rank` within a block [dp, C, K, T, H] of
        `shape`. Dimension 0 becomes (0, 1)."""
        _, shards, replicas = self.shape
        _, components, heads, tokens, width = shape
        if not 0 <= rank < self.ranks or heads % shards:
            raise LayoutError(
                f"mesh card: rank {rank} of {self.ranks}, {heads} heads over {shards} shards: one"
                " does not fit"
            )
        local = heads // shards
        return {
            self.devices[(rank * shards + shard) * replicas + replica]: (
                (0, 1),
                (0, components),
                (shard * local, shard * local + local),
                (0, tokens),
                (0, width),
            )
            for shard in range(shards)
            for replica in range(replicas)
        }

"""What one worker tells another about its mesh before KV moves between them. Plain data; travels in
the hello.

Device and process numbers are the sender's own (every JAX job counts from 0); they identify pieces,
they are not looked up here."""

from dataclasses import dataclass

from jdisagg.errors import LayoutError
from jdisagg.layout.reshard_plan import Box


@dataclass(frozen=True, slots=True)
class KvEnd:
    """One process of an instance on the KV plane. `control`: where it takes `KvPlane` messages
    (host:port); `boot_id`: random at each start, so that a process restarted at the same address is
    not taken for the old one. `memory`: the name of its shared memory
    (transfer/shared_memory.py), by which processes of its host reach it; "": it has none. `nixl`:
    whether its memory can be read over NIXL (transfer/nixl_memory.py). `device`: the host on which
    it lends its devices' memory (transfer/device_memory.py); "": it lends none."""

    control: str
    boot_id: int
    memory: str = ""
    nixl: bool = False
    device: str = ""


@dataclass(frozen=True, slots=True)
class MeshCard:
    """A mesh ("dp", "kv", "rep") as data. `devices` and `processes` are row-major over `shape`;
    `ends` by process index, empty where both sides live in one process. `transports`: parallel
    connections of the transfer engine, which must be equal on both sides."""

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
        """Device -> its box within dp rank `rank` of a block [dp, C, K, T, H] of `shape` (dimension
        0 becomes (0, 1))."""
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

"""A worker's mesh as plain data. Two workers exchange these descriptions before they transfer KV.

Every JAX job numbers its devices and processes from 0, so the same number means different devices
in sender and receiver. The receiver uses the sender's numbers only to identify pieces of a
block."""

from dataclasses import dataclass

from jdisagg.errors import LayoutError


@dataclass(frozen=True, slots=True)
class KvEnd:
    """Endpoint of one process for KV transfers.

    Attributes:
        control: Address (host:port) that receives the control messages of KV transfers.
        boot_id: Random number that the process draws at its start. It shows other processes that a
            process at the same address was restarted.
        memory: Name by which processes of the same host can read the process's shared memory
            (transfer/shared_memory.py). Empty if they cannot.
        nixl: Whether other processes can read the process's memory over NIXL
            (transfer/nixl_memory.py).
    """

    control: str
    boot_id: int
    memory: str = ""
    nixl: bool = False


@dataclass(frozen=True, slots=True)
class MeshCard:
    """A mesh with the axes ("dp", "kv", "rep") as plain data.

    Attributes:
        devices, processes: Number of the device, and of its process, at each mesh position,
            row-major over `shape`.
        ends: Endpoint of each process, by process index. Empty if sender and receiver are in one
            process.
        transports: Number of parallel connections of the transfer engine. Sender and receiver must
            be configured with the same number.
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
    def head_shards(self) -> int:
        return self.shape[1]

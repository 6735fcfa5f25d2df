"""Chooses the backend that transfers KV from each sender process to this process.

`Memories` owns the memory of this process that other processes can read. `BackendChoice` selects
the first backend that both processes support and that has not failed between these two processes.
The order is CUDA IPC, shared memory, NIXL, JAX transfer engine. If the configuration names NIXL,
NIXL comes first."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import KvBackend
from jdisagg.model_api import Device
from jdisagg.transfer.backend import Backend, Inlet
from jdisagg.transfer.device_memory import LentMemory, lent_memory
from jdisagg.transfer.nixl_memory import NixlMemory, nixl_memory
from jdisagg.transfer.shared_memory import SharedMemory
from jdisagg.transfer.transfer_engine import EngineBackend, EngineOptions

_log = logging.getLogger(__name__)
_TITLES = {
    KvBackend.CUDA: "CUDA memory",
    KvBackend.SHARED: "shared memory",
    KvBackend.NIXL: "NIXL",
    KvBackend.ENGINE: "transfer engine",
}


@dataclass(frozen=True, slots=True)
class Memories:
    """The memory of one process that other processes can read.

    Attributes:
        shared: Shared memory of this host, or None.
        nixl: Memory registered with NIXL, or None.
        device: Device memory exported over CUDA IPC, or None.
        no_device: Reason why CUDA IPC is unavailable although it is configured. "" otherwise.
    """

    shared: SharedMemory | None = None
    nixl: NixlMemory | None = None
    device: LentMemory | None = None
    no_device: str = ""

    @staticmethod
    def of_worker(channel: str, host: str, devices: Sequence[Device]) -> "Memories":
        """Allocates the memory from which other processes may read a worker's KV. `channel`
        (`ServiceConfig.kv_channel`) selects the kinds of memory. Raises ConfigError if NIXL is
        configured by name and cannot be used."""
        nixl = nixl_memory(channel, host)
        return Memories(SharedMemory.of_host(), nixl, *lent_memory(channel, devices))

    def end(self, control: str, boot_id: int) -> KvEnd:
        """Returns the endpoint record (`KvEnd`) of this process, which publishes its address and
        its backends to peers."""
        shared = self.shared.name if self.shared else ""
        lends = self.device.host if self.device else ""
        return KvEnd(control, boot_id, shared, self.nixl is not None, lends)

    def backends(self, options: EngineOptions) -> tuple[Backend, ...]:
        """Returns the backends of this process, the preferred one first."""
        nixl_first = self.nixl is not None and self.nixl.first
        found = (
            self.nixl if nixl_first else None,
            self.device,
            self.shared,
            None if nixl_first else self.nixl,
            EngineBackend(options),
        )
        return tuple(backend for backend in found if backend is not None)


class BackendChoice:
    """Chooses the backend for each sender process. Callers must hold the lock of `KvPuller`."""

    def __init__(self, memories: Memories, backends: Sequence[Backend]) -> None:
        self._memories, self._backends = memories, backends
        self._proven: set[tuple[KvEnd, KvBackend]] = set()
        self._failed: dict[tuple[KvEnd, KvBackend], str] = {}

    def inlet(self, end: KvEnd) -> Inlet:
        """Returns a new inlet for the process `end`."""
        return next(
            backend.inlet(end)
            for backend in self._backends
            if (end, backend.kind) not in self._failed and backend.reaches(end)
        )

    def describe(self, end: KvEnd, backend: KvBackend) -> str:
        """Returns "ADDRESS BACKEND" for logs. If CUDA IPC is configured but unavailable, the reason
        is appended."""
        own, why = self._memories, self._failed.get((end, KvBackend.CUDA), "")
        if backend is KvBackend.SHARED and not why:
            if own.no_device:
                why = own.no_device
            elif own.device is not None and not end.device:
                why = "the sender lends none"
        title = _TITLES[backend]
        return f"{end.control} {title}, no CUDA memory: {why}" if why else f"{end.control} {title}"

    def succeeded(self, end: KvEnd, backend: KvBackend) -> None:
        """Records that a pull from the process `end` by this backend succeeded."""
        self._proven.add((end, backend))

    def is_proven(self, end: KvEnd, backend: KvBackend) -> bool:
        return (end, backend) in self._proven

    def failed(self, end: KvEnd, backend: KvBackend, why: str) -> None:
        """Records that a pull from the process `end` failed. A backend that has never succeeded
        with this process is not used with it again."""
        if (end, backend) not in self._proven:
            self._failed[end, backend] = why
            _log.warning(
                "KV from %s cannot be read by %s; another backend is used from now on: %s",
                end.control,
                _TITLES[backend],
                why,
            )

    def forget(self, end: KvEnd) -> None:
        """Removes the records of a disconnected process."""
        self._proven = {key for key in self._proven if key[0] != end}
        self._failed = {key: why for key, why in self._failed.items() if key[0] != end}

"""Chooses the backend that transfers KV from each sender process to this process.

`Memories` owns the memory of this process that other processes can read. `BackendChoice` selects
the first backend that both processes support and that has not failed between these two processes.
The order is shared memory, NIXL, JAX transfer engine. If the configuration names NIXL, NIXL comes
first."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.kv_plane import KvBackend
from jdisagg.transfer.backend import Backend, Inlet
from jdisagg.transfer.nixl_memory import NixlMemory, nixl_memory
from jdisagg.transfer.shared_memory import SharedMemory
from jdisagg.transfer.transfer_engine import EngineBackend, EngineOptions

_log = logging.getLogger(__name__)
_TITLES = {
    KvBackend.SHARED: "shared memory",
    KvBackend.NIXL: "NIXL",
    KvBackend.ENGINE: "transfer engine",
}


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


class BackendChoice:
    """Chooses the backend for each sender process. Callers must hold the lock of `KvPuller`."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends
        self._proven: set[tuple[KvEnd, KvBackend]] = set()
        self._failed: dict[tuple[KvEnd, KvBackend], str] = {}

    def inlet(self, end: KvEnd) -> Inlet:
        return next(
            backend.inlet(end)
            for backend in self._backends
            if (end, backend.kind) not in self._failed and backend.reaches(end)
        )

    def describe(self, end: KvEnd, backend: KvBackend) -> str:
        """Returns "ADDRESS BACKEND" for logs."""
        return f"{end.control} {_TITLES[backend]}"

    def succeeded(self, end: KvEnd, backend: KvBackend) -> None:
        self._proven.add((end, backend))

    def is_proven(self, end: KvEnd, backend: KvBackend) -> bool:
        return (end, backend) in self._proven

    def failed(self, end: KvEnd, backend: KvBackend, why: str) -> None:
        """A backend that has never succeeded with this process is not used with it again."""
        if (end, backend) not in self._proven:
            self._failed[end, backend] = why
            _log.warning(
                "KV from %s cannot be read by %s; another backend is used from now on: %s",
                end.control,
                _TITLES[backend],
                why,
            )

    def forget(self, end: KvEnd) -> None:
        self._proven = {key for key in self._proven if key[0] != end}
        self._failed = {key: why for key, why in self._failed.items() if key[0] != end}

"""Registration: the card of a worker, and the port that a router offers to its workers."""

from typing import Protocol

from jdisagg.costs.hardware import Accelerator
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.layout.axes import Layout
from jdisagg.messages.kept_blocks import KeptMark, KeptNews, KeptScheme
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.plain import Message


class ModelCard(Message, frozen=True):
    """The model that a worker serves.

    Attributes:
        fingerprint: Hash of the weights, their dtype and the KV geometry.
        geometry: Input of the cost model, or None if no times are predicted.
    """

    name: str
    family: str
    vocabulary: int
    context_tokens: int
    dtype: str
    kv_bytes_per_token: int
    fingerprint: str = ""
    geometry: CostGeometry | None = None


class WorkerCard(Message, frozen=True):
    """A worker's registration.

    Attributes:
        boot_id: Random number of this start.
        address: host:port of its gRPC services.
        place: "rack/host/domain/process" of its devices, where any suffix may be missing. Two
            workers are as close as their common prefix of parts. If a fast domain spans hosts, name
            it as the host.
        hardware: Speed of each device, or None if unknown.
        stages: Pipeline stages of layout.devices each.
        kept: Naming of its cached KV blocks, or None without a prefix cache.
    """

    name: str
    boot_id: int
    role: WorkerRole
    address: str
    layout: Layout
    model: ModelCard
    place: str = ""
    hardware: Accelerator | None = None
    stages: int = 1
    kept: KeptScheme | None = None


class RegistryPort(Protocol):
    """A router's calls for workers that join and leave."""

    async def register(self, card: WorkerCard) -> None: ...
    async def heartbeat(self, boot_id: int, status: WorkerStatus) -> bool:
        """Returns False if the worker is unknown and must register again."""
        ...

    async def kept(self, boot_id: int, news: KeptNews) -> KeptMark:
        """Applies changes of the worker's cached blocks. Returns the last event that the router has
        processed, which may precede these changes."""
        ...

    async def deregister(self, name: str, boot_id: int) -> None: ...

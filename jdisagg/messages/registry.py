"""Registration of workers: a worker's card, and the router's port that workers call."""

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
        geometry: Sizes for the cost model, or None if the router predicts no times.
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
        boot_id: Random number drawn when the process starts.
        address: host:port of its gRPC services.
        place: Location of the devices as "rack/host/domain/process", where trailing parts may be
            missing. More equal leading parts mean a closer worker. If a fast domain spans hosts,
            use its name as the host.
        hardware: Speed of each device, or None if unknown.
        stages: Number of pipeline stages, each on layout.devices devices.
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
    """The router's calls by which workers register, report and leave."""

    async def register(self, card: WorkerCard) -> None: ...
    async def heartbeat(self, boot_id: int, status: WorkerStatus) -> bool:
        """Returns False if the worker is unknown and must register again."""
        ...

    async def kept(self, boot_id: int, news: KeptNews) -> KeptMark:
        """Applies changes of the worker's cached blocks. Returns the last event that the router has
        processed, which may be older than these changes."""
        ...

    async def deregister(self, name: str, boot_id: int) -> None: ...

"""How workers and routers find each other: a worker's card, and the port that a router offers to
its workers."""

from typing import Protocol

from jdisagg.costs.hardware import Accelerator
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.layout.axes import Layout
from jdisagg.messages.kept_blocks import KeptMark, KeptNews, KeptScheme
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.plain import Message


class ModelCard(Message, frozen=True):
    """The model that a worker serves. `fingerprint` is equal where the weights, their dtype and the
    KV's geometry are. `geometry`: what a cost model needs of it; None: seconds are not predicted.
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
    """What a worker says when it registers. `boot_id` is random at each start; `address`: host:port
    of its gRPC services.

    place: "rack/host/domain/process" of its devices, where any suffix may be missing: two workers
    are as close as the parts that they share from the first on; where a fast domain spans hosts,
    name it as the host. hardware: how fast each device is; None: not known. stages: pipeline stages
    of layout.devices each. kept: how the KV that it keeps is named; None: it keeps none."""

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
    """What a router does with workers that come and go."""

    async def register(self, card: WorkerCard) -> None: ...
    async def heartbeat(self, boot_id: int, status: WorkerStatus) -> bool:
        """False: not known; register again."""
        ...

    async def kept(self, boot_id: int, news: KeptNews) -> KeptMark:
        """What the worker keeps has changed. Returns how far the router knows it now, which is not
        always as far as these news go."""
        ...

    async def deregister(self, name: str, boot_id: int) -> None: ...

"""Registration of workers: the card that describes a worker, and the calls of a worker to its
router."""

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
        fingerprint: Hash of the files of the model and of its EAGLE head, and of their dtypes.
        geometry: Sizes of the model, from which the router predicts times. None if the router does
            not predict times.
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
    """Description of a worker, sent when the worker registers with a router.

    Attributes:
        boot_id: Random number drawn when the process starts.
        place: Location of the devices as "rack/host/domain/process". Trailing parts may be missing.
            The more leading parts two workers have in common, the closer they are. If a fast
            interconnect domain spans hosts, give the domain's name as the host.
        hardware: Speed of one device of the worker, or None if unknown.
        stages: `layout.pp`, for routers of protocol versions up to 33.
        kept: Parameters of the names of cached KV blocks. None without a prefix cache.
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


AnswerLength = tuple[str, int, int]
"""Tenant, prompt tokens and output tokens of an answer."""


class RouterUse(Message, frozen=True):
    """What clients with quotas have spent at one router, and the lengths of this router's last
    answers. Workers pass both on to other routers.

    Attributes:
        at: Time of this report on the router's own clock, in seconds.
        spent: Name of each recently used rate limit, and the total spent.
        streams: Name of each stream limit in use, and the number of running streams.
        again_seconds: Time after which a worker should call again.
        answers: Lengths of the router's last answers, the newest last.
    """

    router: int = 0
    at: float = 0.0
    spent: tuple[tuple[str, float], ...] = ()
    streams: tuple[tuple[str, int], ...] = ()
    again_seconds: float = 0.25
    answered: int = 0
    answers: tuple[AnswerLength, ...] = ()


class RegistryPort(Protocol):
    """Calls of a worker to its router: registration, status reports, deregistration."""

    async def register(self, card: WorkerCard) -> None: ...
    async def heartbeat(self, boot_id: int, status: WorkerStatus) -> bool:
        """Reports a worker's status. Returns False if the worker is not registered at this router
        and must register again."""
        ...

    async def kept(self, boot_id: int, news: KeptNews) -> KeptMark:
        """Applies changes of the worker's cached blocks to the router's index. Returns the last
        event that the router has processed. If earlier events were lost, this is an event before
        `news`, and the worker sends the events after it again."""
        ...

    async def share_use(self, uses: tuple[RouterUse, ...]) -> RouterUse:
        """Passes on the reports of other routers. Returns the report of this router."""
        ...

    async def deregister(self, name: str, boot_id: int) -> None: ...

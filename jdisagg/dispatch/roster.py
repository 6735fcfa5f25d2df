"""The roster: which workers there are, as a router knows them: who registered, what each last said of itself, how long ago.

Workers register, heartbeat with their status, and deregister; nothing is polled. By the age of its last word a worker is LIVE, SUSPECT
(gets no new requests; running ones go on) or gone: its ports are closed, which ends the calls that run
through them, and it is forgotten until it registers again. A new boot id under a known name is another process: one at the same
address has taken the old one's place, whose ports are closed at once; one at another address is refused as long as the old one is
heard of, so that two under one name do not displace each other for ever. The first worker's model is the roster's; workers of another
model are refused by name of the field that differs.

It knows time by its clock alone, and ports by the factory that it was given; neither JAX nor gRPC. `sweep` must be called now and then.
The mappings `prefill` and `decode` are live views; iterating one goes over a copy, so that workers may come and go meanwhile.
"""

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Generic, TypeVar

from jdisagg.clock import Clock
from jdisagg.dispatch.ports import DecodePort, PrefillPort, WorkerRole, WorkerStatus
from jdisagg.errors import IncompatiblePeerError, InvalidRequestError, NameTakenError
from jdisagg.layout.axes import Layout
from jdisagg.router.accounts import Accounts
from jdisagg.router.cluster_state import ClusterState, Description
from jdisagg.router.decision import GONE_SECONDS, SUSPECT_SECONDS
from jdisagg.router.hardware import Accelerator
from jdisagg.router.model_geometry import CostGeometry
from jdisagg.router.speeds import Kind

HEARTBEAT_SECONDS = 0.25

Port = TypeVar("Port")


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The model that a worker serves. `fingerprint` is equal where the weights, their dtype and the KV's geometry are. `geometry`: what
    a cost model needs of it; None: seconds are not predicted."""

    name: str
    family: str
    vocabulary: int
    context_tokens: int
    dtype: str
    kv_bytes_per_token: int
    fingerprint: str = ""
    geometry: CostGeometry | None = None


@dataclass(frozen=True, slots=True)
class WorkerCard:
    """What a worker says when it registers. `boot_id` is random at each start; `address`: host:port of its gRPC services.

    place: "rack/host/domain/process" of its devices, where any suffix may be missing: two workers are as close as the parts that they
    share from the first on; where a fast domain spans hosts, name it as the host. hardware: how fast each device is; None: not known.
    stages: pipeline stages of layout.devices each.
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

    def description(self) -> Description:
        """What placement needs of it. How fast it is can be told where both its model and its hardware are described."""
        if self.model.geometry is None or self.hardware is None:
            return Description(self.place)
        return Description(self.place, Kind(self.model.geometry, self.layout, self.hardware, max(1, self.stages), self.model.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class WorkerPorts:
    """A registered worker's ports, those that its role has. `close` ends all calls that run through them; idempotent."""

    prefill: PrefillPort | None = None
    decode: DecodePort | None = None
    close: Callable[[], None] = lambda: None


class Liveness(enum.Enum):
    LIVE = "live"
    SUSPECT = "suspect"


@dataclass(slots=True, eq=False)
class _Entry:
    card: WorkerCard
    ports: WorkerPorts
    heard_at: float
    status: WorkerStatus | None = None


class Roster:
    """`open_ports` makes the ports of a worker that registers. On one event loop; nothing here waits. `accounts`: the snapshot that
    placement decides on; kept up to date with every word that is heard."""

    def __init__(self, clock: Clock, open_ports: Callable[[WorkerCard], WorkerPorts]) -> None:
        self._clock = clock
        self._open_ports = open_ports
        self.accounts = Accounts(ClusterState())
        self._entries: dict[str, _Entry] = {}
        self._model: ModelCard | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.prefill: Mapping[str, PrefillPort] = _LivePorts(self._entries, lambda ports: ports.prefill)
        self.decode: Mapping[str, DecodePort] = _LivePorts(self._entries, lambda ports: ports.decode)

    @property
    def model(self) -> ModelCard | None:
        """The first worker's; all others must serve the same."""
        return self._model

    def register(self, card: WorkerCard) -> None:
        """Takes a worker in, or the same one again. Raises IncompatiblePeerError for another model, InvalidRequestError for no name,
        NameTakenError while another process of that name lives."""
        if not card.name or not card.address:
            raise InvalidRequestError(
                f"worker card: name {card.name!r} and address {card.address!r} must not be empty; set --name and --port"
            )
        self._check_model(card)
        known = self._entries.get(card.name)
        if known is not None and known.card == card:
            known.heard_at = self._clock.now()
            return
        if known is not None:
            self._check_displaced(known, card)
            self._close(known)
        self.accounts.state.describe(card.name, card.description())
        self._entries[card.name] = _Entry(card, self._open_ports(card), self._clock.now())
        self.on_change()

    def heartbeat(self, boot_id: int, status: WorkerStatus) -> bool:
        """False: this worker is not known (any more); it must register again."""
        entry = self._entries.get(status.name)
        if entry is None or entry.card.boot_id != boot_id:
            return False
        first = entry.status is None
        entry.heard_at, entry.status = self._clock.now(), status
        self.accounts.heard(status, entry.heard_at)
        if first:
            self.on_change()
        return True

    def deregister(self, name: str, boot_id: int) -> None:
        """The worker has ended its work and leaves. Idempotent; a newer process under the name stays."""
        entry = self._entries.get(name)
        if entry is not None and entry.card.boot_id == boot_id:
            self._forget(entry)

    def sweep(self) -> tuple[WorkerCard, ...]:
        """Forgets workers that have not been heard of for `GONE_SECONDS`, and returns their cards."""
        oldest = self._clock.now() - GONE_SECONDS
        gone = [entry for entry in self._entries.values() if entry.heard_at < oldest]
        for entry in gone:
            self._forget(entry)
        return tuple(entry.card for entry in gone)

    def excuse(self, seconds: float) -> None:
        """This process itself did not listen for so long (it was stopped, or busy): that is nobody's silence."""
        for entry in self._entries.values():
            entry.heard_at = min(self._clock.now(), entry.heard_at + seconds)
            self.accounts.excuse(entry.card.name, entry.heard_at)

    def close(self) -> None:
        for entry in list(self._entries.values()):
            self._forget(entry)

    def cards(self) -> tuple[WorkerCard, ...]:
        return tuple(entry.card for entry in self._entries.values())

    def address(self, name: str) -> str:
        """Where a worker's services listen; empty when it is not known (any more)."""
        entry = self._entries.get(name)
        return entry.card.address if entry else ""

    def boot_id(self, name: str) -> int:
        """Of the process that bears the name; 0 when it is not known (any more)."""
        entry = self._entries.get(name)
        return entry.card.boot_id if entry else 0

    def liveness(self, name: str) -> Liveness | None:
        """None: not known, or gone."""
        entry = self._entries.get(name)
        if entry is None or self._age(entry) > GONE_SECONDS:
            return None
        return Liveness.SUSPECT if self._age(entry) > SUSPECT_SECONDS else Liveness.LIVE

    def statuses(self) -> tuple[WorkerStatus, ...]:
        """What the workers last said of themselves; of those silent for a while, that they take no new requests."""
        said = [(entry, entry.status) for entry in self._entries.values() if entry.status is not None and self._age(entry) <= GONE_SECONDS]
        return tuple(replace(status, draining=True) if self._age(entry) > SUSPECT_SECONDS else status for entry, status in said)

    @property
    def ready(self) -> bool:
        """Whether there is a live worker for each half of a request, or one that does both."""
        roles = {status.role for status in self.statuses() if not status.draining}
        return WorkerRole.MIXED in roles or roles >= {WorkerRole.PREFILL, WorkerRole.DECODE}

    def _check_displaced(self, known: _Entry, card: WorkerCard) -> None:
        if known.card.address != card.address and self._age(known) <= SUSPECT_SECONDS:
            raise NameTakenError(
                f"worker {card.name!r} at {card.address}: a worker of that name lives at {known.card.address}; "
                "give each its own --name, or end the other",
                retry_after_seconds=SUSPECT_SECONDS,
            )

    def _check_model(self, card: WorkerCard) -> None:
        if self._model is None:
            self._model = card.model
            return
        for field in fields(ModelCard):
            ours, theirs = getattr(self._model, field.name), getattr(card.model, field.name)
            if field.name not in ("name", "geometry") and ours != theirs:
                raise IncompatiblePeerError(
                    f"worker {card.name!r}: its model's {field.name} is {theirs!r}, and this cluster serves {ours!r}: "
                    "start it with the same model and settings, or against another router"
                )

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.card.name]
        self._close(entry)
        self.on_change()

    def _close(self, entry: _Entry) -> None:
        self.accounts.forget(entry.card.name)
        entry.ports.close()

    def _age(self, entry: _Entry) -> float:
        return self._clock.now() - entry.heard_at


class _LivePorts(Mapping[str, Port], Generic[Port]):
    """The ports of one kind, by worker. Values are looked up when asked for; iteration goes over a copy of the names."""

    def __init__(self, entries: dict[str, _Entry], choose: Callable[[WorkerPorts], Port | None]) -> None:
        self._entries = entries
        self._choose = choose

    def __getitem__(self, name: str) -> Port:
        port = self._choose(self._entries[name].ports)
        if port is None:
            raise KeyError(name)
        return port

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, entry in self._entries.items() if self._choose(entry.ports) is not None])

    def __len__(self) -> int:
        return sum(self._choose(entry.ports) is not None for entry in self._entries.values())

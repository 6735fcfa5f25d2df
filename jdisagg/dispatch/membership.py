"""Membership: the registered workers of a router, with the last status of each and its age.

The age of a worker's last heartbeat decides its state. A SUSPECT worker gets no new requests, but
its running requests continue. A worker that stays silent for longer counts as gone: its ports are
closed, which ends their calls, and the worker must register again.

A new process at another address is refused while the old process is alive. A process that changes
its role registers again, with the same boot id; the ports of its old role stay open for a while.

Imports neither JAX nor gRPC; worker ports come from a factory. `sweep` must be called regularly,
because it removes the workers that are gone."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from jdisagg.clock import Clock
from jdisagg.costs.speeds import Kind
from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.errors import IncompatiblePeerError, InvalidRequestError, NameTakenError
from jdisagg.messages.kept_blocks import KeptMark, KeptNews
from jdisagg.messages.ports import DecodePort, PrefillPort
from jdisagg.messages.registry import ModelCard, WorkerCard
from jdisagg.messages.weights import WeightsPort
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.router.accounts import Accounts
from jdisagg.router.cluster_state import ClusterState, Description
from jdisagg.router.known_blocks import KnownBlocks
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, MembershipTimeouts

Port = TypeVar("Port")


@dataclass(frozen=True, slots=True, eq=False)
class WorkerPorts:
    """Ports through which the router calls a worker. `close` ends all calls and is idempotent."""

    prefill: PrefillPort | None = None
    decode: DecodePort | None = None
    close: Callable[[], None] = lambda: None
    weights: WeightsPort | None = None


@dataclass(slots=True, eq=False)
class _Entry:
    card: WorkerCard
    ports: WorkerPorts
    heard_at: float
    status: WorkerStatus | None = None


class Membership:
    """The workers of one router. Used on one event loop. No method waits.

    Args:
        on_change: Function that is called when a worker registers, sends its first status, or is
            removed.

    Attributes:
        accounts: Snapshot of the workers on which placement decides. Each heartbeat updates it.
    """

    def __init__(
        self,
        clock: Clock,
        open_ports: Callable[[WorkerCard], WorkerPorts],
        timeouts: MembershipTimeouts = DEFAULT_TIMEOUTS.membership,
        on_change: Callable[[], None] = lambda: None,
        known: KnownBlocks | None = None,
    ) -> None:
        self._known = known
        self._clock = clock
        self._open_ports = open_ports
        self._timeouts = timeouts
        self._on_change = on_change
        self.accounts = Accounts(ClusterState(), timeouts.settle_seconds)
        self._entries: dict[str, _Entry] = {}
        self._left: list[tuple[float, WorkerPorts]] = []
        self._model: ModelCard | None = None
        self.prefill: Mapping[str, PrefillPort] = _LivePorts(
            self._entries, lambda ports: ports.prefill
        )
        self.decode: Mapping[str, DecodePort] = _LivePorts(
            self._entries, lambda ports: ports.decode
        )
        self.weights: Mapping[str, WeightsPort] = _LivePorts(
            self._entries, lambda ports: ports.weights
        )

    @property
    def model(self) -> ModelCard | None:
        return self._model

    def has(self, card: WorkerCard) -> bool:
        known = self._entries.get(card.name)
        return known is not None and known.card == card

    def register(self, card: WorkerCard) -> None:
        """Adds a worker. Registering the same card again changes nothing.

        Raises:
            IncompatiblePeerError: The worker serves another model.
            InvalidRequestError: The worker's name or address is empty.
            NameTakenError: Another process with the worker's name is alive.
        """
        if not card.name or not card.address:
            raise InvalidRequestError(
                f"worker card: name {card.name!r} and address {card.address!r} must not be empty;"
                " set --name and --port"
            )
        self._check_model(card)
        known = self._entries.get(card.name)
        if known is not None and self.has(card):
            known.heard_at = self._clock.now()
            return
        if known is not None:
            self._check_displaced(known, card)
            if known.card.boot_id == card.boot_id:
                self._let_go(known)
            self._close(known)
        self.accounts.absences.came(card.name, self._clock.now())
        self.accounts.state.describe(card.name, _description(card))
        if self._known is not None:
            self._known.joined(card.name, card.kept)
        self._entries[card.name] = _Entry(card, self._open_ports(card), self._clock.now())
        self._on_change()

    def heartbeat(self, boot_id: int, status: WorkerStatus) -> bool:
        """Returns False if the worker is not registered under this boot id, so that it must
        register again."""
        entry = self._entries.get(status.name)
        if entry is None or entry.card.boot_id != boot_id:
            return False
        first = entry.status is None
        before = entry.status.weights if entry.status else ""
        if self._known is not None and before != status.weights and entry.card.kept is not None:
            self._known.joined(status.name, entry.card.kept.with_weights(status.weights))
        entry.heard_at, entry.status = self._clock.now(), status
        self.accounts.heard(status, entry.heard_at)
        if first:
            self._on_change()
        return True

    def told(self, status: WorkerStatus) -> None:
        """Stores a status that a registered worker has sent in its reply to a call."""
        self.heartbeat(self.boot_id(status.name), status)

    def kept(self, boot_id: int, news: KeptNews) -> KeptMark:
        """Applies a worker's report of cached blocks and returns the number of the last applied
        event. Reports of unknown workers are ignored. Raises InvalidRequestError for a malformed
        report."""
        entry = self._entries.get(news.worker)
        if entry is None or entry.card.boot_id != boot_id or self._known is None:
            return KeptMark(
                news.epoch, news.number + len(news.added)
            )  # acknowledged, so that the worker does not send it again
        return self._known.told(news)

    def deregister(self, name: str, boot_id: int) -> None:
        """Does nothing if another process has registered under its name, or if it was removed
        before. The worker's ports stay open for `gone_seconds`, because this process may not have
        read all tokens that the worker has sent."""
        entry = self._entries.get(name)
        if entry is not None and entry.card.boot_id == boot_id:
            self._let_go(entry)
            self._forget(entry)

    def _let_go(self, entry: _Entry) -> None:
        self._left.append((self._clock.now(), entry.ports))
        entry.ports = WorkerPorts()

    def sweep(self) -> tuple[WorkerCard, ...]:
        oldest = self._clock.now() - self._timeouts.gone_seconds
        gone = [entry for entry in self._entries.values() if entry.heard_at < oldest]
        for entry in gone:
            self._forget(entry)
        for left_at, ports in self._left:
            if left_at < oldest:
                ports.close()
        self._left = [one for one in self._left if one[0] >= oldest]
        return tuple(entry.card for entry in gone)

    def excuse(self, seconds: float) -> None:
        """Shortens the measured silence of every worker by `seconds`. In this time the router's
        process was stopped or busy and could not receive heartbeats."""
        for entry in self._entries.values():
            entry.heard_at = min(self._clock.now(), entry.heard_at + seconds)
            self.accounts.state.excuse(entry.card.name, entry.heard_at)

    def close(self) -> None:
        for entry in list(self._entries.values()):
            self._forget(entry)
        for _, ports in self._left:
            ports.close()

    def cards(self) -> tuple[WorkerCard, ...]:
        return tuple(entry.card for entry in self._entries.values())

    def address(self, name: str) -> str:
        entry = self._entries.get(name)
        return entry.card.address if entry else ""

    def boot_id(self, name: str) -> int:
        entry = self._entries.get(name)
        return entry.card.boot_id if entry else 0

    def statuses(self) -> tuple[WorkerStatus, ...]:
        """The status of a suspect worker is marked as draining."""
        said = [
            (entry, entry.status)
            for entry in self._entries.values()
            if entry.status is not None and self._age(entry) <= self._timeouts.gone_seconds
        ]
        return tuple(
            msgspec.structs.replace(status, draining=True)
            if self._age(entry) > self._timeouts.suspect_seconds
            else status
            for entry, status in said
        )

    @property
    def ready(self) -> bool:
        roles = {status.role for status in self.statuses() if status.serving}
        return WorkerRole.MIXED in roles or roles >= {WorkerRole.PREFILL, WorkerRole.DECODE}

    def _check_displaced(self, known: _Entry, card: WorkerCard) -> None:
        if (
            known.card.address != card.address
            and self._age(known) <= self._timeouts.suspect_seconds
        ):
            raise NameTakenError(
                f"worker {card.name!r} at {card.address}: a worker with that name is alive at"
                f" {known.card.address}; give each its own --name, or stop the other",
                retry_after_seconds=self._timeouts.suspect_seconds,
            )

    def _check_model(self, card: WorkerCard) -> None:
        if self._model is None:
            self._model = card.model
            return
        for field in msgspec.structs.fields(ModelCard):
            ours, theirs = getattr(self._model, field.name), getattr(card.model, field.name)
            if field.name not in ("name", "geometry") and ours != theirs:
                raise IncompatiblePeerError(
                    f"worker {card.name!r}: its model's {field.name} is {theirs!r}, and this"
                    f" cluster serves {ours!r}: start it with the same model and settings, or"
                    " against another router"
                )

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.card.name]
        role = "prefill" if entry.card.role is WorkerRole.PREFILL else "decode"
        self.accounts.absences.left(entry.card.name, role, self._clock.now())
        self._close(entry)
        self._on_change()

    def _close(self, entry: _Entry) -> None:
        self.accounts.forget(entry.card.name)
        if self._known is not None:
            self._known.forget(entry.card.name)
        entry.ports.close()

    def _age(self, entry: _Entry) -> float:
        return self._clock.now() - entry.heard_at


def cluster_ports(membership: Membership) -> ClusterPorts:
    return ClusterPorts(
        membership.prefill,
        membership.decode,
        membership.address,
        membership.boot_id,
        membership.statuses,
        membership.accounts,
        membership.weights,
        membership.told,
    )


class _LivePorts(Mapping[str, Port], Generic[Port]):
    def __init__(
        self, entries: dict[str, _Entry], choose: Callable[[WorkerPorts], Port | None]
    ) -> None:
        self._entries = entries
        self._choose = choose

    def __getitem__(self, name: str) -> Port:
        port = self._choose(self._entries[name].ports)
        if port is None:
            raise KeyError(name)
        return port

    def __iter__(self) -> Iterator[str]:
        return iter(
            [name for name, entry in self._entries.items() if self._choose(entry.ports) is not None]
        )

    def __len__(self) -> int:
        return sum(self._choose(entry.ports) is not None for entry in self._entries.values())


def _description(card: WorkerCard) -> Description:
    geometry = card.model.geometry
    if geometry is None:
        return Description(card.place)
    return Description(card.place, Kind(geometry, card.layout, card.hardware, card.model.dtype))

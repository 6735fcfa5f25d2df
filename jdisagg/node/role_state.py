"""Stores the role of a worker process (prefill or decode), and the progress of a role change.
Implements `RolePort`, by which a router requests role changes.

An impossible change is refused at once, and the worker continues to serve. A possible change sets
the event `asked`. On the same layout the worker then changes its role as it runs (worker.py). For
another layout, worker_process.py ends the worker's current run and starts a run in the new role.
`RoleState` records each completed phase of the change in a report."""

import asyncio
from dataclasses import dataclass

import msgspec

from jdisagg.clock import Clock
from jdisagg.errors import ConfigError, InvalidRequestError, LayoutError, UnavailableError
from jdisagg.layout.axes import Layout, ModelGeometry
from jdisagg.messages.roles import SwitchCall, SwitchReport, SwitchState
from jdisagg.messages.worker_status import WorkerRole


def fixed_because(processes: int, told_how: bool) -> str:
    """Returns the reason why a worker can never change its role, with a remedy. Returns "" if the
    worker can change its role."""
    if processes > 1:
        return (
            f"its instance has {processes} processes, and only instances of one process can"
            " change; end it and start it in the other role"
        )
    return "" if told_how else "it was started without a function that re-lays its weights"


@dataclass(frozen=True, slots=True)
class Role:
    """A worker's role with its layout. A role change replaces both."""

    role: WorkerRole
    layout: Layout


class RoleState:
    """The current role of a worker process, and the role change in progress, if any. `asked`: event
    that is set while a role change is requested and not yet begun. `fixed`: see `fixed_because`."""

    def __init__(self, name: str, now: Role, devices: int, clock: Clock, fixed: str = "") -> None:
        self.asked = asyncio.Event()
        self.now = now
        self._name = name
        self._devices = devices
        self._clock = clock
        self.fixed = fixed
        self._geometry: ModelGeometry | None = None
        self._wanted: SwitchCall | None = None
        self._began = 0.0
        self._told = 0.0
        self._report = SwitchReport(name, 0, now.role, now.layout)

    @property
    def changing(self) -> bool:
        """Whether a role change is in progress. It is in progress from the request until the worker
        serves again, in the new role or, after a failure, in the old role."""
        return self._report.state is SwitchState.DRAINING

    async def switch_role(self, call: SwitchCall) -> None:
        self._check(call)
        self._wanted = call
        self._began = self._told = self._clock.now()
        boot_id = self._report.boot_id
        self._report = SwitchReport(
            self._name,
            boot_id,
            self.now.role,
            self.now.layout,
            SwitchState.DRAINING,
            call.switch_id,
        )
        self.asked.set()

    async def switch_report(self) -> SwitchReport:
        return self._report

    @property
    def on_this_layout(self) -> bool:
        """Whether the requested change keeps the layout."""
        return self._wanted is not None and self._wanted.layout == self.now.layout

    def take(self) -> Role | None:
        call, self._wanted = self._wanted, None
        self.asked.clear()
        return Role(call.role, call.layout) if call is not None else None

    def drained(self) -> None:
        if self.changing:
            self._report = msgspec.structs.replace(self._report, drain_seconds=self._lap())

    def built(self) -> None:
        if self.changing:
            self._report = msgspec.structs.replace(
                self._report, build_seconds=self._report.build_seconds + self._lap()
            )

    def warm(self) -> None:
        if self.changing:
            self._report = msgspec.structs.replace(
                self._report, warm_up_seconds=self._report.warm_up_seconds + self._lap()
            )

    def failed(self, reason: str) -> None:
        """The worker then keeps its old role, or returns to it."""
        self._report = msgspec.structs.replace(self._report, reason=reason)

    def serves(self, boot_id: int, geometry: ModelGeometry) -> None:
        self._geometry = geometry
        self._report = msgspec.structs.replace(
            self._report, boot_id=boot_id, role=self.now.role, layout=self.now.layout
        )
        if self.changing:
            state = SwitchState.FAILED if self._report.reason else SwitchState.DONE
            self._report = msgspec.structs.replace(
                self._report, state=state, total_seconds=self._clock.now() - self._began
            )

    def _lap(self) -> float:
        before, self._told = self._told, self._clock.now()
        return self._told - before

    def _check(self, call: SwitchCall) -> None:
        if self.fixed:
            raise ConfigError(f"worker {self._name!r} cannot change its role: {self.fixed}")
        if self.changing:
            raise UnavailableError(
                f"worker {self._name!r} is changing its role already; try again when it has ended",
                retry_after_seconds=5.0,
            )
        if WorkerRole.MIXED in (call.role, self.now.role) or call.role is self.now.role:
            raise InvalidRequestError(
                f"worker {self._name!r} is {self.now.role.value} and was asked to be"
                f" {call.role.value}: only prefill and decode can be exchanged"
            )
        if max(call.layout.pp, self.now.layout.pp) > 1:
            raise LayoutError(
                f"worker {self._name!r} ({self.now.layout}) cannot become {call.role.value}"
                f" ({call.layout}): a role change needs layouts without pipeline stages (pp=1);"
                " start a worker in the other role"
            )
        if call.layout.devices > self._devices:
            raise LayoutError(
                f"layout {call.layout} needs {call.layout.devices} devices, and worker"
                f" {self._name!r} has {self._devices}; choose a smaller one"
            )
        if self._geometry is not None:
            call.layout.check(self._geometry)

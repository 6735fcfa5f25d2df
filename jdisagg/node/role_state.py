"""Stores a worker process's role and its changes. Implements `RolePort` for all the worker's runs.

Changes that cannot work are refused before the current run ends. The process is notified of a
requested change (`asked`); worker_process.py runs the worker and records each finished phase of the
change in the report."""

import asyncio
from dataclasses import dataclass

import msgspec

from jdisagg.clock import Clock
from jdisagg.errors import ConfigError, InvalidRequestError, LayoutError, UnavailableError
from jdisagg.layout.axes import Layout, ModelGeometry
from jdisagg.messages.roles import SwitchCall, SwitchReport, SwitchState
from jdisagg.messages.worker_status import WorkerRole


def fixed_because(processes: int, told_how: bool) -> str:
    """Returns the reason why a worker with `processes` processes cannot change its role, and the
    remedy; empty if it can."""
    if processes > 1:
        return (
            f"its instance has {processes} processes, and only instances of one process can"
            " change; end it and start it in the other role"
        )
    return "" if told_how else "it was started without a way to lay its weights out anew"


@dataclass(frozen=True, slots=True)
class Role:
    """A worker's role and layout, which change together."""

    role: WorkerRole
    layout: Layout


class RoleState:
    """The current role and the running change, if any.

    Args:
        fixed: The reason why this process can never change its role; empty if it can.
        devices: Number of devices of this process.
    """

    def __init__(self, name: str, now: Role, devices: int, clock: Clock, fixed: str = "") -> None:
        self.asked = asyncio.Event()
        self.now = now
        self._name = name
        self._devices = devices
        self._clock = clock
        self._fixed = fixed
        self._geometry: ModelGeometry | None = None
        self._wanted: SwitchCall | None = None
        self._began = 0.0
        self._told = 0.0
        self._report = SwitchReport(name, 0, now.role, now.layout)

    @property
    def changing(self) -> bool:
        """Whether a change is running: from its request until the worker serves in either role."""
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

    def take(self) -> Role | None:
        """Removes and returns the requested role, or returns None if no change was requested."""
        call, self._wanted = self._wanted, None
        self.asked.clear()
        return Role(call.role, call.layout) if call is not None else None

    def drained(self) -> None:
        if self._wanted is not None:
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
        """Records that the change failed, so that the worker returns to its old role."""
        self._report = msgspec.structs.replace(self._report, reason=reason)

    def serves(self, boot_id: int, geometry: ModelGeometry) -> None:
        """Records that the worker serves in the role `now`."""
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
        """Returns the seconds since the previous call."""
        before, self._told = self._told, self._clock.now()
        return self._told - before

    def _check(self, call: SwitchCall) -> None:
        if self._fixed:
            raise ConfigError(f"worker {self._name!r} cannot change its role: {self._fixed}")
        if self.changing:
            raise UnavailableError(
                f"worker {self._name!r} is changing its role already", retry_after_seconds=5.0
            )
        if WorkerRole.MIXED in (call.role, self.now.role) or call.role is self.now.role:
            raise InvalidRequestError(
                f"worker {self._name!r} is {self.now.role.value} and was asked to be"
                f" {call.role.value}: prefill and decode change places alone"
            )
        if call.layout.devices > self._devices:
            raise LayoutError(
                f"layout {call.layout} needs {call.layout.devices} devices, and worker"
                f" {self._name!r} has {self._devices}; choose a smaller one"
            )
        if self._geometry is not None:
            call.layout.check(self._geometry)

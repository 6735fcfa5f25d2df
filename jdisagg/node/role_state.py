"""The role of a worker process, and how it changes: the `RolePort` that outlives each single life
of the worker.

It refuses what cannot work before anything is given up, tells the process when a change is asked
for, and keeps the report. Whoever runs the lives (worker_process.py) says when each part of a
change is behind it."""

import asyncio
from dataclasses import dataclass

import msgspec

from jdisagg.clock import Clock
from jdisagg.errors import ConfigError, InvalidRequestError, LayoutError, UnavailableError
from jdisagg.layout.axes import Layout, ModelGeometry
from jdisagg.messages.roles import SwitchCall, SwitchReport, SwitchState
from jdisagg.messages.worker_status import WorkerRole


def fixed_because(processes: int, told_how: bool) -> str:
    """Why a worker whose instance has so many processes cannot change its role, and what helps;
    empty where it can."""
    if processes > 1:
        return (
            f"its instance has {processes} processes, and those of one process alone change; end it"
            " and start it as what it is to be"
        )
    return "" if told_how else "it was not told how to lay its weights out anew"


@dataclass(frozen=True, slots=True)
class Role:
    """What a worker is: it changes both or neither."""

    role: WorkerRole
    layout: Layout


class RoleState:
    """`fixed`: why this process cannot change its role at all; empty where it can. `devices`: how
    many it has."""

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
        """From the call to the moment that the worker serves again, whatever as."""
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
        """What is to be begun now that the worker is drained; None where nothing was asked for."""
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
        """It goes back to what it was."""
        self._report = msgspec.structs.replace(self._report, reason=reason)

    def serves(self, boot_id: int, geometry: ModelGeometry) -> None:
        """A life has begun, as `now`."""
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
        """Seconds since this was last asked."""
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

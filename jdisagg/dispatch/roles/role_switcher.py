"""Changes the roles of workers for a router, one worker at a time, and reports the outcome.

The switcher refuses to change the role of the last worker of a role, because a worker cannot check
this itself. It then calls the worker and polls it until one of three outcomes: the worker serves in
its new role and this router places requests on it, the worker serves in its old role again, or its
process restarted in the role of its command line."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from jdisagg.clock import Clock
from jdisagg.errors import DeadlineExceededError, JdisaggError, UnavailableError
from jdisagg.layout.axes import Layout
from jdisagg.messages.registry import WorkerCard
from jdisagg.messages.roles import RolePort, SwitchCall, SwitchReport, SwitchState
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.router.elastic import check_switch, usual_layout
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, MembershipTimeouts
from jdisagg.telemetry import Counters


class Workers(Protocol):
    """The interface of `Membership` that the switcher uses."""

    def statuses(self) -> tuple[WorkerStatus, ...]: ...
    def cards(self) -> tuple[WorkerCard, ...]: ...
    def address(self, name: str) -> str: ...


class RoleSwitcher:
    """Changes roles of workers. `counters` counts roles_switched and role_switches_failed."""

    def __init__(
        self,
        workers: Workers,
        open_port: Callable[[str], AbstractAsyncContextManager[RolePort]],
        clock: Clock,
        new_id: Callable[[], int],
        timeouts: MembershipTimeouts = DEFAULT_TIMEOUTS.membership,
    ) -> None:
        self.counters = Counters()
        self._workers = workers
        self._open_port = open_port
        self._clock = clock
        self._new_id = new_id
        self._timeouts = timeouts
        self._changing: str | None = None

    @property
    def changing(self) -> bool:
        return self._changing is not None

    async def switch(
        self, name: str, role: WorkerRole, layout: Layout | None, seconds: float | None = None
    ) -> SwitchReport:
        """Changes a worker's role and waits for the outcome.

        Args:
            layout: Layout in the new role. None means the most common layout of workers with
                `role`.
            seconds: Time limit of the change. None means `timeouts.role_change_seconds`.

        Raises:
            InvalidRequestError, UnavailableError: The change is not allowed now.
            DeadlineExceededError: The time limit passed before the outcome was known.
        """
        seconds = seconds or self._timeouts.role_change_seconds
        if self._changing is not None:
            raise UnavailableError(
                f"worker {self._changing!r} is changing its role; only one may at a time",
                retry_after_seconds=5.0,
            )
        statuses = self._workers.statuses()
        worker = check_switch(statuses, name, role)
        call = SwitchCall(self._new_id(), role, layout or usual_layout(statuses, worker, role))
        self._changing = name
        try:
            async with (
                self._open_port(self._workers.address(name)) as port,
                asyncio.timeout(seconds),
            ):
                before = await port.switch_report()
                await self._ask(port, call)
                report = await self._outcome(port, call, before)
                await self._placed(report)
        except TimeoutError:
            self.counters.add("role_switches_failed")
            raise DeadlineExceededError(
                f"worker {name!r} did not report as {role.value} within {seconds:g} s; it may still"
                " be draining or warming up"
            ) from None
        finally:
            self._changing = None
        self.counters.add(
            "roles_switched" if report.state is SwitchState.DONE else "role_switches_failed"
        )
        return report

    async def _ask(self, port: RolePort, call: SwitchCall) -> None:
        try:
            await port.switch_role(call)
        except (UnavailableError, DeadlineExceededError):
            until = self._clock.now() + self._timeouts.role_uncertain_seconds
            while (report := await _report(port)) is None and self._clock.now() < until:
                await self._clock.sleep(self._timeouts.role_look_seconds)
            if report is None or report.switch_id != call.switch_id:
                raise

    async def _outcome(
        self, port: RolePort, call: SwitchCall, before: SwitchReport
    ) -> SwitchReport:
        while True:
            await self._clock.sleep(self._timeouts.role_look_seconds)
            report = await _report(port)
            if report is None:
                continue
            if report.switch_id == call.switch_id and report.state in (
                SwitchState.DONE,
                SwitchState.FAILED,
            ):
                return report
            if report.switch_id != call.switch_id and report.boot_id != before.boot_id:
                return msgspec.structs.replace(
                    report,
                    state=SwitchState.FAILED,
                    reason="the worker's process was restarted during the change",
                )

    async def _placed(self, report: SwitchReport) -> None:
        while True:
            live = any(
                status.name == report.worker and status.serving and status.role is report.role
                for status in self._workers.statuses()
            )
            placed = report.boot_id, report.role
            if live and any((card.boot_id, card.role) == placed for card in self._workers.cards()):
                return
            await self._clock.sleep(self._timeouts.role_look_seconds)


async def _report(port: RolePort) -> SwitchReport | None:
    try:
        return await port.switch_report()
    except JdisaggError:
        return None

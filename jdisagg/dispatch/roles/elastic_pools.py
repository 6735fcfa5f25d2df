"""Runs the elastic controller: samples the workers, stores the controller's advice on pool sizes,
and makes the role changes that it recommends.

If `acts` is False, the controller only gives advice, and roles change only when an operator
requests it (`switch`). The live router and the simulator run the same class with different clocks
and ports."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from jdisagg.clock import Clock
from jdisagg.errors import DeadlineExceededError, InvalidRequestError, JdisaggError
from jdisagg.layout.axes import Layout
from jdisagg.messages.roles import AdviceReport, SwitchReport, SwitchState
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.router.elastic import Controller, Switch, Verdict

_log = logging.getLogger(__name__)


class SwitchesRoles(Protocol):
    """Implemented by `RoleSwitcher` (role_switcher.py) and by the simulator."""

    @property
    def changing(self) -> bool: ...

    async def switch(
        self, name: str, role: WorkerRole, layout: Layout | None, seconds: float | None = None
    ) -> SwitchReport: ...


class ElasticPools:
    """Samples workers and makes the controller's role changes. Implements `ClusterRolesPort`.

    Args:
        acts: Whether to make the role changes that the controller recommends.
    """

    def __init__(
        self,
        controller: Controller,
        switcher: SwitchesRoles,
        statuses: Callable[[], tuple[WorkerStatus, ...]],
        clock: Clock,
        acts: bool,
        say: Callable[[str], None] = _log.info,
        held: Callable[[], int] = lambda: 0,
    ) -> None:
        self._controller = controller
        self._switcher = switcher
        self._statuses = statuses
        self._clock = clock
        self._acts = acts
        self._say = say
        self._held = held
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self.run())

    async def stop(self) -> None:
        """Stops sampling. A role change in progress continues at the worker."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def switch(
        self,
        name: str,
        role: WorkerRole,
        layout: Layout | None = None,
        deadline_seconds: float = 120.0,
    ) -> SwitchReport:
        if not 0 < deadline_seconds < float("inf"):
            raise InvalidRequestError(
                f"switch: deadline_seconds must be positive and finite, got {deadline_seconds};"
                " leave it out for 120"
            )
        report: SwitchReport | None = None
        refused = False
        try:
            report = await self._switcher.switch(name, role, layout, deadline_seconds)
            return report
        except JdisaggError as error:
            # A refused change leaves the observations valid.
            refused = not isinstance(error, DeadlineExceededError)
            raise
        finally:
            if not refused:
                self._changed(report)

    async def advice(self) -> AdviceReport:
        return self.latest_advice()

    def latest_advice(self) -> AdviceReport:
        controller = self._controller
        verdict = controller.latest or self._look()
        view, slo, advice = controller.view, controller.config.slo, verdict.advice
        assert view is not None, "the controller has sampled"
        return AdviceReport(
            prefill=advice.prefill,
            decode=advice.decode,
            prefill_now=len(view.prefill.taking),
            decode_now=len(view.decode.taking),
            prefill_need=advice.prefill_need,
            decode_need=advice.decode_need,
            reason=advice.reason,
            elastic=self._acts,
            decision=verdict.reason,
            ttft_attainment=view.ttft_attainment,
            tpot_attainment=view.tpot_attainment,
            ttft_quantile_seconds=view.ttft_quantile,
            tpot_quantile_seconds=view.tpot_quantile,
            requests_per_second=view.requests_per_second,
            slo_ttft_seconds=slo.ttft_seconds,
            slo_tpot_seconds=slo.tpot_seconds,
            slo_quantile=slo.quantile,
        )

    async def run(self) -> None:
        """A failure is logged and the loop continues."""
        while True:
            try:
                await self._round()
            except Exception:
                _log.exception("the elastic controller's round failed; another follows")
            await self._clock.sleep(self._controller.config.interval_seconds)

    async def _round(self) -> None:
        if not self._switcher.changing:
            verdict = self._look()
            if verdict.switch is not None:
                await self._make(verdict.switch, verdict.reason)

    def _look(self) -> Verdict:
        return self._controller.look(self._clock.now(), self._statuses(), self._acts, self._held())

    async def _make(self, switch: Switch, reason: str) -> None:
        self._say(
            f"worker {switch.name} is to become {switch.role.value} ({switch.layout}): {reason}"
        )
        report: SwitchReport | None = None
        try:
            report = await self._switcher.switch(switch.name, switch.role, switch.layout)
            became = f"is {report.role.value} after {report.total_seconds:.1f} s"
            self._say(
                f"worker {switch.name}"
                f" {became}{f'; the change failed: {report.reason}' if report.reason else ''}"
            )
        except JdisaggError as error:
            self._say(f"worker {switch.name} did not change its role: {error.message}")
        finally:
            self._changed(report)

    def _changed(self, report: SwitchReport | None) -> None:
        done = report is not None and report.state is SwitchState.DONE
        self._controller.switched(
            self._clock.now(), report.total_seconds if report is not None and done else None
        )

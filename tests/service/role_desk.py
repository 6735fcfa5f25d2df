"""A worker and a router that are asked to change roles, behind a real server."""

import contextlib
from collections.abc import AsyncIterator

from jdisagg.layout.axes import Layout
from jdisagg.messages.roles import AdviceReport, SwitchCall, SwitchReport, SwitchState
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.service.internal.role_services import cluster_roles_service, worker_roles_service
from tests.service.listening import listening

REPORT = SwitchReport(
    *("p1", 2**64 - 1, WorkerRole.DECODE, Layout(dp=2), SwitchState.DONE, 2**64 - 2, ""),
    *(0.5, 0.25, 1.5, 2.25),
)
ADVICE = AdviceReport(
    *(3, 2, 2, 2, 2.5, 1.25, "prefill is short", True, "p1 is changing its role"),
    *(0.5, 1.0, 4.0, 0.1, 7.5, 2.0, 0.2, 0.9),
)


class Desk:
    """Both sides at once: a worker's port and a router's desk."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.error: Exception | None = None

    async def switch_role(self, call: SwitchCall) -> None:
        self.asked.append(call)
        if self.error is not None:
            raise self.error

    async def switch_report(self) -> SwitchReport:
        return REPORT

    async def switch(
        self,
        name: str,
        role: WorkerRole,
        layout: Layout | None = None,
        deadline_seconds: float = 120.0,
    ) -> SwitchReport:
        self.asked.append((name, role, layout, deadline_seconds))
        if self.error is not None:
            raise self.error
        return REPORT

    async def advice(self) -> AdviceReport:
        return ADVICE


@contextlib.asynccontextmanager
async def served(desk: Desk, tokens: tuple[str, ...] = ()) -> AsyncIterator[str]:
    services = (worker_roles_service(desk, tokens), cluster_roles_service(desk, tokens))
    async with listening(*services) as address:
        yield address

"""Calls and reports of role changes.

A worker that keeps its layout compiles the programs of its new role, if they are not compiled yet,
drains, and registers again with its new role and the same boot id. For another layout, a worker
drains, deregisters from its routers, reshards its weights and compiles or loads its programs. The
same process then registers under the same name and address, with its new role and a new boot id.
The worker's network port is closed during this change, and callers retry until a deadline."""

import enum
from typing import Protocol

from jdisagg.layout.axes import Layout
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.plain import Message


class SwitchState(enum.Enum):
    """State of a role change. `NONE`: no change since the process started. `DRAINING`: the worker
    compiles programs, finishes its work or is being rebuilt. `DONE`: the worker serves in its new
    role. `FAILED`: the change failed, and the worker serves in its old role."""

    NONE = "none"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"


class SwitchCall(Message, frozen=True):
    """Requests a change to `role` with `layout`. The caller chooses a random `switch_id`, which
    identifies the change in reports."""

    switch_id: int
    role: WorkerRole
    layout: Layout


class SwitchReport(Message, frozen=True):
    """A worker's latest role change and its present role. The seconds are the times for draining,
    for resharding weights and building the worker, and for compiling or loading programs.
    `total_seconds` is the time from the call to the new registration."""

    worker: str
    boot_id: int
    role: WorkerRole
    layout: Layout
    state: SwitchState = SwitchState.NONE
    switch_id: int = 0
    reason: str = ""
    drain_seconds: float = 0.0
    build_seconds: float = 0.0
    warm_up_seconds: float = 0.0
    total_seconds: float = 0.0


class RolePort(Protocol):
    async def switch_role(self, call: SwitchCall) -> None:
        """Starts a role change and returns once it has begun.

        Raises:
            InvalidRequestError, LayoutError: The change is not possible. Nothing has changed.
            UnavailableError: Another change is in progress. Nothing has changed.
        """
        ...

    async def switch_report(self) -> SwitchReport:
        """Returns the worker's latest role change. Raises UnavailableError while the worker's
        network port is closed during the change."""
        ...


class AdviceReport(Message, frozen=True):
    """Recommended and present numbers of workers per role, with the measurements on which they are
    based. `elastic` means that the router changes roles itself. `decision` is the router's latest
    decision. An attainment is the fraction of requests in the measured window that met the latency
    objective. The latency quantiles are at `slo_quantile`, in seconds."""

    prefill: int
    decode: int
    prefill_now: int
    decode_now: int
    prefill_need: float
    decode_need: float
    reason: str
    elastic: bool
    decision: str
    ttft_attainment: float
    tpot_attainment: float
    ttft_quantile_seconds: float
    tpot_quantile_seconds: float
    requests_per_second: float
    slo_ttft_seconds: float
    slo_tpot_seconds: float
    slo_quantile: float


class ClusterRolesPort(Protocol):
    """Calls of scripts and autoscalers to a router, to change the roles of its workers."""

    async def switch(
        self,
        name: str,
        role: WorkerRole,
        layout: Layout | None = None,
        deadline_seconds: float = 120.0,
    ) -> SwitchReport:
        """Changes a worker's role. Returns when the worker serves in `role`, or serves in its old
        role again (FAILED). If `layout` is None, the most common layout of the role is used. Raises
        InvalidRequestError or UnavailableError if the change is not possible, and
        DeadlineExceededError if the deadline passes before the outcome is known."""
        ...

    async def advice(self) -> AdviceReport: ...

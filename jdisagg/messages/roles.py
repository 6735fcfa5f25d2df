"""Role changes: calls to a worker and its reports. Plain data and ports, as in ports.py.

A change is a new incarnation of the same process. The worker drains, leaves its routers, reshards
its weights, warms up, and registers under the same name and address with its new role and a new
boot id. While its port is closed, callers retry until a deadline."""

import enum
from typing import Protocol

from jdisagg.layout.axes import Layout
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.plain import Message


class SwitchState(enum.Enum):
    """`NONE`: the process has not changed its role since its start. `FAILED`: it is back in its old
    role."""

    NONE = "none"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"


class SwitchCall(Message, frozen=True):
    """Change to `role` with `layout`. `switch_id` is drawn by the caller and identifies this change
    in reports."""

    switch_id: int
    role: WorkerRole
    layout: Layout


class SwitchReport(Message, frozen=True):
    """A worker's latest change and its present role. Times cover draining, resharding and building,
    and compiling or loading programs. `total_seconds` spans from the call to the new
    registration."""

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
        """Returns when the change has begun. Raises InvalidRequestError, LayoutError or
        UnavailableError (a change is under way) without any effect."""
        ...

    async def switch_report(self) -> SwitchReport:
        """Raises UnavailableError while the worker is between two incarnations."""
        ...


class AdviceReport(Message, frozen=True):
    """Recommended and present numbers of workers per role, with their basis. `elastic` means that
    the router changes roles itself, and `decision` is its latest decision. Attainments are
    fractions of the window's requests that met the objective. Quantile seconds are at
    `slo_quantile`."""

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
    """A router's role calls for scripts and autoscalers."""

    async def switch(
        self,
        name: str,
        role: WorkerRole,
        layout: Layout | None = None,
        deadline_seconds: float = 120.0,
    ) -> SwitchReport:
        """Returns when the worker serves in `role`, or is back in its old one (FAILED). `layout`
        None means the usual one. Raises InvalidRequestError or UnavailableError if the change is
        not possible, DeadlineExceededError if its outcome is unknown in time."""
        ...

    async def advice(self) -> AdviceReport: ...

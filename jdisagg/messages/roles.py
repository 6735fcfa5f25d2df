"""Changing roles: what a worker is asked, and what it says of the change. Plain data and a port, as
in ports.py.

A change is a new life of the same process: it drains, leaves its routers, lays the same weights out
anew, warms up, and registers under the same name and address with its new role and a new boot id.
While its port is closed nobody answers; who asks tries again until a deadline."""

import enum
from typing import Protocol

from jdisagg.layout.axes import Layout
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.plain import Message


class SwitchState(enum.Enum):
    """`NONE`: the process never changed its role since it was started. `FAILED`: it is back in its
    old role."""

    NONE = "none"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"


class SwitchCall(Message, frozen=True):
    """`switch_id`: drawn by the caller, so that the report of this change is told from those of
    others."""

    switch_id: int
    role: WorkerRole
    layout: Layout


class SwitchReport(Message, frozen=True):
    """What a worker says of its latest change, and what it is now. Seconds are spent draining,
    laying weights out and building, and compiling or loading programs; `total_seconds` goes from
    the call to the new registration."""

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
        """Returns when the change has begun. Raises InvalidRequestError, LayoutError,
        UnavailableError (one is under way already): then nothing was changed."""
        ...

    async def switch_report(self) -> SwitchReport:
        """Raises UnavailableError while the worker is between two lives."""
        ...


class AdviceReport(Message, frozen=True):
    """How many workers of each role there should be, how many there are, and what that follows
    from. `elastic`: the router changes roles itself; `decision` is its latest word on that. Of
    requests in the window: shares that met the objective, seconds at its quantile."""

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
    """What a router offers to scripts and autoscalers."""

    async def switch(
        self,
        name: str,
        role: WorkerRole,
        layout: Layout | None = None,
        deadline_seconds: float = 120.0,
    ) -> SwitchReport:
        """Returns when the worker serves in `role`, or is back in its old one (the report says
        FAILED). `layout` None: the usual one. Raises InvalidRequestError and UnavailableError where
        the change may not be, DeadlineExceededError when its outcome is not known in time."""
        ...

    async def advice(self) -> AdviceReport: ...

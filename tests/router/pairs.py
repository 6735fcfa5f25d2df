"""A prefill and a decode worker, and rules of their placement."""

from collections.abc import Iterable

import msgspec

from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.router.accounts import Work
from jdisagg.router.cluster_state import ClusterState
from jdisagg.router.decision import Decision, PlacementPolicy, PlacementQuery
from jdisagg.router.placement import decide

ASK = PlacementQuery(Work(20, expected_tokens=8))


def status(
    name: str,
    role: WorkerRole,
    free: int = 10,
    running: int = 0,
    waiting: int = 0,
    draining: bool = False,
) -> WorkerStatus:
    can_prefill = role is not WorkerRole.DECODE
    worker = WorkerStatus(
        name, role, "dp=1,tp=1,ep=1", (free,), (10,), running, waiting, 4, 16, 128, draining
    )
    return msgspec.structs.replace(worker, can_prefill=can_prefill)


P, D, M = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.MIXED
RULES = PlacementPolicy()


def state_of(workers: Iterable[WorkerStatus]) -> ClusterState:
    state = ClusterState()
    for worker in workers:
        state.update(worker, 0.0)
    return state


def place(*workers: WorkerStatus, query: PlacementQuery = ASK, now: float = 0.0) -> Decision:
    decision = decide(state_of(workers), query, now, RULES)
    assert isinstance(decision, Decision)
    return decision

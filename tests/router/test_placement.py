"""Least-loaded placement, and early refusal."""

import pytest

from jdisagg.dispatch.ports import WorkerRole, WorkerStatus
from jdisagg.errors import OverloadedError, UnavailableError
from jdisagg.router.admission import admit
from jdisagg.router.cluster_state import ClusterState
from jdisagg.router.placement import place


def status(name: str, role: WorkerRole, free: int = 10, running: int = 0, waiting: int = 0, draining: bool = False) -> WorkerStatus:
    return WorkerStatus(name, role, "dp=1,tp=1,ep=1", (free,), (10,), running, waiting, 4, 16, 128, draining)


P, D, M = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.MIXED


def test_the_least_loaded_pair_is_chosen_and_said_why() -> None:
    state = ClusterState.of((status("p0", P, running=3), status("p1", P, running=1), status("d0", D, free=2), status("d1", D, free=9)))
    placement = place(state)
    assert (placement.prefill, placement.decode, placement.context_tokens) == ("p1", "d1", 128)
    assert "p1" in placement.reason and "d1" in placement.reason


def test_a_mixed_worker_prefills_for_itself() -> None:
    assert place(ClusterState.of((status("m0", M),))).prefill is None


def test_a_worker_that_failed_the_request_is_avoided_only_while_there_is_another() -> None:
    pair = ClusterState.of((status("p0", P), status("d0", D), status("d1", D, running=4, waiting=9)))
    assert place(pair, avoid=frozenset({"d0", "p0"})).decode == "d1"
    alone = ClusterState.of((status("p0", P), status("d0", D)))
    assert place(alone, avoid=frozenset({"d0", "p0"})).decode == "d0"


def test_a_draining_worker_gets_only_requests_under_way() -> None:
    state = ClusterState.of((status("p0", P, draining=True), status("d0", D)))
    with pytest.raises(UnavailableError, match=r"no prefill worker.*p0 \(draining\)"):
        place(state)
    assert place(state, resuming=True).prefill == "p0"


def test_no_worker_at_all_is_unavailable() -> None:
    with pytest.raises(UnavailableError, match="no decode worker.*none"):
        place(ClusterState.of(()))


def test_admission_refuses_a_full_queue_with_the_predicted_wait() -> None:
    admit(9, 10, 0.5)
    with pytest.raises(OverloadedError, match="10 requests.*5.0 s") as caught:
        admit(10, 10, 0.5)
    assert caught.value.retry_after_seconds == 5.0

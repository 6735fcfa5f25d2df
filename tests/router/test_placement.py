"""Workers that placement avoids or leaves out: those that failed, drain, are silent, load programs
or have an open breaker. Their speeds are assumed."""

from dataclasses import replace

import pytest

from jdisagg.errors import OverloadedError, UnavailableError
from jdisagg.router.accounts import Accounts
from jdisagg.router.admission import admit
from jdisagg.router.cluster_state import ClusterState
from jdisagg.router.placement import another_decode, another_prefill, decide
from tests.router.pairs import ASK, RULES, D, M, P, place, state_of, status

PAIR = (status("p0", P), status("d0", D))


def test_a_mixed_worker_prefills_for_itself() -> None:
    assert place(status("m0", M)).prefill is None


def test_a_worker_that_failed_the_request_is_avoided_only_while_there_is_another() -> None:
    avoiding = replace(ASK, avoid=frozenset({"d0", "p0"}))
    assert place(*PAIR, status("d1", D, running=4), query=avoiding).decode == "d1"
    assert place(*PAIR, query=avoiding).decode == "d0"


def test_a_draining_worker_gets_only_requests_that_have_tokens() -> None:
    workers = (status("p0", P, draining=True), status("d0", D))
    for query in (ASK, replace(ASK, under_way=True)):
        with pytest.raises(UnavailableError, match=r"no prefill worker.*p0 \(draining\)"):
            place(*workers, query=query)
    assert place(*workers, query=replace(ASK, under_way=True, resuming=True)).prefill == "p0"


def test_a_silent_worker_gets_nothing_new_and_then_nothing_at_all() -> None:
    resuming = replace(ASK, under_way=True, resuming=True)
    assert place(*PAIR, now=RULES.suspect_seconds).prefill == "p0"
    with pytest.raises(UnavailableError, match="silent"):
        place(*PAIR, now=RULES.suspect_seconds + 0.01)
    assert place(*PAIR, query=resuming, now=RULES.gone_seconds).prefill == "p0"
    with pytest.raises(UnavailableError, match="no decode worker"):
        place(*PAIR, query=resuming, now=RULES.gone_seconds + 0.01)


def test_no_worker_at_all_is_unavailable() -> None:
    with pytest.raises(UnavailableError, match="no decode worker.*none"):
        place()


def test_a_worker_whose_breaker_is_open_is_passed_over_while_there_is_another() -> None:
    accounts = Accounts(ClusterState())
    for worker in (*PAIR, status("d1", D, running=4)):
        accounts.heard(worker, 0.0)
    accounts.state.bar("d0", 5.0)
    assert decide(accounts.state, ASK, 1.0, RULES).decode == "d1"  # type: ignore[union-attr]
    patient = replace(RULES, suspect_seconds=9, gone_seconds=9)
    assert decide(accounts.state, ASK, 0.0, patient).decode == "d1"  # type: ignore[union-attr]
    accounts.forget("d1")
    assert decide(accounts.state, ASK, 1.0, RULES).decode == "d0"  # type: ignore[union-attr]


def test_a_moving_sequence_never_goes_to_who_it_avoids_or_who_drains() -> None:
    state = state_of((status("d0", D), status("d1", D, draining=True), status("d2", D, running=3)))
    assert another_decode(state, frozenset({"d0"}), 0.0, RULES) == "d2"
    with pytest.raises(UnavailableError, match="no other decode worker"):
        another_decode(state, frozenset({"d0", "d2"}), 0.0, RULES)


def test_another_prefill_worker_is_one_that_failed_only_when_there_is_no_other() -> None:
    state = state_of((status("p0", P), status("p1", P, draining=True)))
    assert another_prefill(state, frozenset(), 0.0, RULES) == "p0"
    assert another_prefill(state, frozenset({"p0"}), 0.0, RULES) == "p1"
    assert another_prefill(state_of((status("p0", P),)), frozenset({"p0"}), 0.0, RULES) == "p0"


def test_admission_refuses_a_full_queue_with_the_predicted_wait() -> None:
    admit(9, 10, 0.5)
    with pytest.raises(OverloadedError, match="10 requests.*5.0 s") as caught:
        admit(10, 10, 0.5)
    assert caught.value.retry_after_seconds == 5.0


def test_a_queue_that_others_filled_is_open_to_a_tenant_up_to_its_share() -> None:
    admit(19, 10, 0.5, own_waiting=4, tenants=2)
    with pytest.raises(OverloadedError, match="19 requests"):
        admit(19, 10, 0.5, own_waiting=5, tenants=2)
    with pytest.raises(OverloadedError, match="20 requests"):
        admit(20, 10, 0.5, own_waiting=0, tenants=2)
    with pytest.raises(OverloadedError):
        admit(10, 10, 0.5, own_waiting=10, tenants=1)

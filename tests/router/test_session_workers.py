"""The workers of a session's last turn are preferred, up to a part of the predicted seconds."""

import dataclasses
from dataclasses import replace

from jdisagg.prompt.hints import Hints
from jdisagg.request import Request
from jdisagg.router.unreported import SessionWorkers
from tests.router.decisions import ASK, EASY, decision
from tests.router.fleets import M, decode_status, prefill_status, state_of

BEFORE = frozenset({"p1", "d1"})


def request(session: str, tenant: str = "", scope: str = "") -> Request:
    return Request("r", (1,), tenant=tenant, cache_scope=scope, hints=Hints(session))


def test_a_session_of_one_tenant_or_scope_is_unknown_to_another_and_old_ones_are_forgotten() -> (
    None
):
    sessions = SessionWorkers(most=2)
    sessions.placed(request("k", "one"), BEFORE)
    assert sessions.of(request("k", "one")) == BEFORE
    for other in (request("k"), request("k", "two"), request("k", "one", "salt"), request("j")):
        assert not sessions.of(other)
    assert not sessions.of(dataclasses.replace(request("k", "one"), hints=None))
    sessions.placed(request(""), BEFORE)
    sessions.placed(dataclasses.replace(request("k"), hints=None), BEFORE)
    assert len(sessions) == 1
    for key in ("a", "b"):
        sessions.placed(request(key), BEFORE)
    assert len(sessions) == 2 and not sessions.of(request("k", "one"))


def test_of_equal_workers_those_of_the_last_turn_are_chosen_and_the_reason_tells() -> None:
    workers = [prefill_status(f"p{at}") for at in range(3)]
    state = state_of(*workers, *(decode_status(f"d{at}") for at in range(3)))
    without = decision(state)
    assert "session" not in without.reason
    for at in range(3):
        chosen = decision(state, replace(ASK, session_workers=frozenset({f"p{at}", f"d{at}"})))
        assert (chosen.prefill, chosen.decode) == (f"p{at}", f"d{at}")
        assert chosen.reason.endswith(f"the session's last turn was on d{at} and p{at}")
        assert chosen.ttft_seconds == without.ttft_seconds


def test_a_session_costs_no_more_than_its_gain() -> None:
    query = replace(ASK, session_workers=BEFORE)
    for queued in (0, 10, 300, 3000):
        state = state_of(
            prefill_status("p0"), prefill_status("p1", queued), *map(decode_status, ("d0", "d1"))
        )
        best, chosen = decision(state), decision(state, query)
        most = (1 + EASY.session_gain) * (best.ttft_seconds + best.handoff_gap_seconds)
        there = decision(state, replace(query, avoid=frozenset({"p0"})))
        assert chosen.ttft_seconds + chosen.handoff_gap_seconds <= most
        assert chosen.prefill == ("p1" if queued <= 10 else "p0")
        assert there.prefill == "p1" and chosen.decode == "d1"
        away = decision(state, query, replace(EASY, session_gain=0.0))
        assert away.ttft_seconds == best.ttft_seconds


def test_a_worker_that_computes_its_own_prompts_is_preferred_too() -> None:
    state = state_of(*(decode_status(f"m{at}", role=M) for at in range(3)))
    for at in range(3):
        query = replace(ASK, session_workers=frozenset({f"m{at}"}))
        assert decision(state, query).decode == f"m{at}"


def test_a_worker_that_is_gone_is_no_reason() -> None:
    state = state_of(prefill_status("p0"), decode_status("d0"))
    assert "session" not in decision(state, replace(ASK, session_workers=BEFORE)).reason

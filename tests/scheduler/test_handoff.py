"""The hand-off machine: its table, its deadlines, its sweep."""

import itertools

import pytest

from jdisagg.scheduler.handoff import (
    TRANSITIONS,
    Handoff,
    HandoffEvent,
    HandoffState,
    HandoffStateError,
    sweep,
)

S, E = HandoffState, HandoffEvent


@pytest.mark.parametrize(
    ("start", "events", "states"),
    [
        (S.COMPUTING, [E.ALL_OFFERED, E.ALL_ACKED, E.FREE], [S.OFFERED, S.ACKED, S.FREED]),
        (
            S.RESERVED,
            [E.GENERATE, E.ALL_INSERTED, E.ADMIT, E.FREE],
            [S.RECEIVING, S.COMPLETE, S.DECODING, S.FREED],
        ),
    ],
)
def test_each_side_goes_its_way(
    start: HandoffState, events: list[HandoffEvent], states: list[HandoffState]
) -> None:
    handoff = Handoff(1, start, 1.0)
    for at, (event, state) in enumerate(zip(events, states, strict=True)):
        handoff = handoff.advance(event, 2.0 + at)
        assert (handoff.state, handoff.deadline) == (state, 2.0 + at)
    assert handoff.state.final


def test_every_state_that_is_not_final_can_be_aborted_and_no_final_one_can_be_left() -> None:
    for state, event in itertools.product(S, E):
        if state.final:
            assert (state, event) not in TRANSITIONS
        elif event is E.ABORT:
            assert TRANSITIONS[state, event] is S.ABORTED


def test_a_move_that_does_not_exist_is_our_own_bug() -> None:
    with pytest.raises(HandoffStateError, match="ALL_ACKED.*COMPUTING"):
        Handoff(1, S.COMPUTING, 1.0).advance(E.ALL_ACKED, 2.0)


def test_the_sweep_names_those_beyond_their_deadline_only() -> None:
    late, early = Handoff(1, S.OFFERED, 1.0), Handoff(2, S.OFFERED, 3.0)
    freed = Handoff(3, S.FREED, 0.0)
    assert sweep([late, early, freed], now=2.0) == (late,)
    assert sweep([late.renew(4.0), early, freed], now=3.5) == (early,)


def test_progress_renews_a_deadline_and_never_shortens_it() -> None:
    assert Handoff(1, S.OFFERED, 5.0).renew(3.0).deadline == 5.0
    assert Handoff(1, S.FREED, 1.0).renew(3.0).deadline == 1.0

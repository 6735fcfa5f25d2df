"""The router's own account of what it sent: bursts spread, statuses take over, and nothing is left
at the end."""

import random

from jdisagg.router.accounts import Work
from jdisagg.router.cluster_state import OWN, ClusterState, Description
from jdisagg.router.decision import Decision, PlacementPolicy, PlacementQuery
from jdisagg.router.placement import decide
from tests.router.fleets import H100, accounts_of, decode_status, prefill_status

WORKERS = {
    status: Description("r", H100)
    for status in (
        prefill_status("p0"),
        prefill_status("p1"),
        decode_status("d0"),
        decode_status("d1"),
    )
}


def own(state: ClusterState) -> dict[str, list[float]]:
    return {
        column: [float(state.table[column][state.row(name) or 0]) for name in state]
        for column in OWN
    }


def test_a_burst_between_two_heartbeats_spreads() -> None:
    accounts = accounts_of(WORKERS)
    chosen = []
    for _ in range(20):
        answer = decide(
            accounts.state,
            PlacementQuery(Work(1000, expected_tokens=100)),
            0.0,
            PlacementPolicy(hold_seconds=1e9),
        )
        assert isinstance(answer, Decision)
        accounts.place(answer.prefill, answer.decode, Work(1000, expected_tokens=100), 0.0)
        chosen.append((answer.prefill, answer.decode))
    assert sorted(prefill or "" for prefill, _ in chosen) == ["p0"] * 10 + ["p1"] * 10
    assert 8 <= sum(decode == "d0" for _, decode in chosen) <= 12


def test_what_a_worker_was_told_before_it_spoke_is_in_its_own_words_then() -> None:
    accounts = accounts_of(WORKERS)
    first = accounts.place("p0", "d0", Work(1000, expected_tokens=100), 1.0)
    first.prefill_sent(1.0)
    second = accounts.place("p0", "d0", Work(500, expected_tokens=100), 1.0)
    row = accounts.state.row("p0")
    accounts.heard(prefill_status("p0", queued_tokens=1000), 1.1)
    assert accounts.state.table["own_tokens"][row] == 500, (
        "the second waits for its reservation still"
    )
    second.prefill_sent(1.2)
    accounts.heard(prefill_status("p0", queued_tokens=1000), 1.201)
    assert accounts.state.table["own_tokens"][row] == 500, (
        "the status may have been taken before the call came"
    )
    accounts.heard(prefill_status("p0", queued_tokens=1500), 1.3)
    assert accounts.state.table["own_tokens"][row] == 0
    first.prefilled()
    assert accounts.state.table["queued_tokens"][row] == 500, (
        "what is computed is taken off at once"
    )
    second.prefilled()
    second.prefilled()
    assert accounts.state.table["queued_tokens"][row] == 0


def test_pages_of_a_sequence_that_ended_are_there_again_before_the_worker_says_so() -> None:
    accounts = accounts_of(WORKERS)
    placed = accounts.place("p0", "d0", Work(1000, expected_tokens=100), 1.0)
    accounts.heard(decode_status("d0", (1,), (1000,)), 2.0)
    row, free = accounts.state.row("d0"), accounts.state.table["best_free_pages"]
    before = free[row]
    placed.end()
    assert free[row] == before + Work(1000, expected_tokens=100).pages(16)
    assert accounts.state.table["running"][row] == 0


def test_a_prompt_that_another_worker_computes_is_charged_there_alone() -> None:
    accounts = accounts_of(WORKERS)
    work = Work(1000, cached_tokens=400, expected_tokens=100)
    placed = accounts.place("p0", "d0", work, 1.0)
    placed.prefill_at("p1")
    assert own(accounts.state)["own_tokens"] == [0, 1000, 0, 0], "p1 has nothing of it cached"
    assert own(accounts.state)["open"] == [0, 1, 1, 0]
    accounts.place(None, "d1", work, 1.0).prefill_at("p0")
    assert own(accounts.state)["own_tokens"] == [1000, 1000, 0, 0]
    assert own(accounts.state)["open"] == [1, 1, 1, 1]


def test_pages_are_those_of_the_shared_prompt_and_of_each_childs_growth() -> None:
    assert Work(10, children=3, expected_tokens=20).pages(16) == 1 + 3 * 1
    assert Work(10, children=3, expected_tokens=1000).pages(16, growth_tokens=20) == 1 + 3 * 1
    assert Work(16, children=2, expected_tokens=16).pages(16) == 1 + 2


def test_when_all_has_ended_nothing_is_left_whatever_came_between() -> None:
    for seed in range(30):
        draw, accounts, open_legs, now = random.Random(seed), accounts_of(WORKERS), [], 0.0
        for _ in range(120):
            now += draw.random() * 0.05
            step = draw.randrange(7)
            if step == 0:
                prefill = draw.choice(["p0", "p1", None])
                work = Work(
                    draw.randrange(1, 3000), 0, draw.randrange(1, 4), draw.randrange(1, 500)
                )
                open_legs.append(accounts.place(prefill, draw.choice(["d0", "d1"]), work, now))
            elif step == 1 and open_legs:
                draw.choice(open_legs).prefill_sent(now)
            elif step == 2 and open_legs:
                draw.choice(open_legs).prefilled()
            elif step == 3 and open_legs:
                open_legs.pop(draw.randrange(len(open_legs))).end()
            elif step == 6 and open_legs:
                draw.choice(open_legs).prefill_at(draw.choice(["p0", "p1"]))
            elif step == 4:
                accounts.heard(draw.choice(list(WORKERS)), now)
            elif draw.random() < 0.2:
                status, description = draw.choice(list(WORKERS.items()))
                accounts.forget(status.name)  # it died, and came back as another process
                accounts.state.describe(status.name, description)
                accounts.heard(status, now)
        for placed in open_legs:
            placed.end()
            placed.end()
        assert all(value == 0 for values in own(accounts.state).values() for value in values), own(
            accounts.state
        )


def test_rows_move_up_when_a_worker_goes_and_names_last() -> None:
    accounts = accounts_of(WORKERS)
    placed = accounts.place("p1", "d1", Work(100, expected_tokens=10), 0.0)
    accounts.forget("p0")
    state = accounts.state
    assert [state.name(int(row)) for row in state.prefill.rows] == ["p1"]
    assert [state.name(int(row)) for row in state.decode.rows] == ["d0", "d1"]
    assert state.table["open"][state.row("d1")] == 1 and state.table["open"][state.row("d0")] == 0
    placed.end()
    assert not any(state.table["open"])

"""Who gets pages on a prefill mesh, replayed from snapshots: no worker, no clock."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.scheduler.prefill_admission import STALLED_TOTAL, Admission, RankLoad, admit
from jdisagg.scheduler.prompt import Prompt
from tests.scheduler.prompts import MOST, prompt, snapshot


def test_the_oldest_go_first_to_the_rank_with_the_least_queued_work() -> None:
    ranks = (RankLoad(8, 10), RankLoad(8, 0))
    placed = admit(snapshot(prompt(1), prompt(2, tokens=20), prompt(3), ranks=ranks)).placed
    assert placed == ((1, 1), (2, 1), (3, 0)), "4, then 24 tokens queue there; the third avoids it"


def test_of_ranks_with_equal_work_the_one_with_most_free_pages_is_taken() -> None:
    assert admit(snapshot(prompt(1), ranks=(RankLoad(4, 0), RankLoad(6, 0)))).placed == ((1, 1),)


def test_none_overtakes_a_prompt_that_no_rank_has_room_for() -> None:
    decision = admit(snapshot(prompt(1, pages=9), prompt(2, pages=1)))
    assert not decision.placed and decision.blocked == 1 and "prompt 1" in decision.reason


def test_pages_given_in_one_round_are_counted() -> None:
    decision = admit(snapshot(prompt(1, pages=5), prompt(2, pages=5)))
    assert decision.placed == ((1, 0),) and decision.blocked == 2


def test_prompts_of_a_destination_that_does_not_fetch_are_held_back_and_others_pass_them() -> None:
    decision = admit(
        snapshot(prompt(1, destination="slow"), prompt(2), offered={"slow": MOST, "d0": 1})
    )
    assert decision.stalled == {"slow"} and decision.placed == ((2, 0),) and not decision.full
    assert "slow" in decision.reason


def test_prompts_that_have_not_begun_for_a_stalled_destination_give_their_pages_to_others() -> None:
    idle = (prompt(1, pages=8, destination="slow", rank=0),)
    now = snapshot(
        prompt(2, pages=8), ranks=(RankLoad(0, 4),), unbegun=idle, offered={"slow": MOST}
    )
    assert admit(now) == Admission(((2, 0),), (1,), frozenset({"slow"}))
    still = msgspec.structs.replace(now, offered_tokens={"slow": MOST - 1})
    assert admit(still) == Admission(blocked=2)


def test_many_destinations_that_fetch_a_little_late_hold_the_whole_mesh_back() -> None:
    offered = {f"d{number}": MOST // 2 for number in range(2 * STALLED_TOTAL)}
    decision = admit(snapshot(offered=offered))
    assert decision.full and not decision.stalled and "all destinations" in decision.reason


def test_nothing_that_waits_needs_no_reason() -> None:
    assert admit(snapshot()) == Admission() and admit(snapshot()).reason == ""


prompts = st.lists(
    st.builds(
        prompt,
        key=st.integers(0, 10**6),
        arrival=st.floats(0, 100),
        destination=st.sampled_from(["a", "b", "c"]),
        tokens=st.integers(1, 50),
        pages=st.integers(1, 6),
    ),
    max_size=12,
    unique_by=lambda one: one.key,
)


@given(
    prompts,
    st.lists(st.builds(RankLoad, st.integers(0, 10), st.integers(0, 50)), min_size=1, max_size=3),
    st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(0, 3 * MOST)),
)
def test_a_decision_keeps_order_and_room_and_has_no_side_effects(
    waiting: list[Prompt], ranks: list[RankLoad], offered: dict[str, int]
) -> None:
    waiting.sort(key=lambda one: one.order)
    now = snapshot(*waiting, ranks=tuple(ranks), offered=offered)
    decision = admit(now)
    assert admit(now) == decision, "it has changed nothing"
    able = [one for one in waiting if one.destination not in decision.stalled]
    keys = [key for key, _ in decision.placed]
    assert keys == [one.key for one in able][: len(keys)], "by arrival, none left out"
    free = [rank.free_pages for rank in ranks]
    for one, (_, rank) in zip(able, decision.placed, strict=False):
        free[rank] -= one.needs_pages
    assert min(free) >= 0
    if len(keys) < len(able):
        assert decision.blocked == able[len(keys)].key
        assert able[len(keys)].needs_pages > max(free)

"""Who gets pages on a mesh that sends KV, and in which order: no worker, no clock."""

from hypothesis import given
from hypothesis import strategies as st

from jdisagg.scheduler.admission import STALLED_TOTAL, stalled_destinations
from jdisagg.scheduler.block_names import BlockNames
from tests.scheduler.prompts import Sender

MOST = 100


def test_the_oldest_go_first_to_the_rank_with_the_least_queued_work() -> None:
    queue = Sender(ranks=2)
    queue.waits(1)
    queue.waits(2, pages=3)
    queue.waits(3)
    queue.waits(4)
    assert queue.admit() == [(1, 0), (2, 1), (3, 0), (4, 0)], "8, 16 and 24 tokens against 24"


def test_of_ranks_with_equal_work_the_one_with_most_free_pages_is_taken() -> None:
    queue = Sender(ranks=2)
    queue.state.ledgers[0].reserve(-1, 2)
    queue.waits(1)
    assert queue.admit() == [(1, 1)]


def test_none_overtakes_a_prompt_that_no_rank_has_room_for() -> None:
    queue = Sender(pages=8)
    queue.waits(1, pages=5)
    queue.waits(2, pages=5)
    queue.waits(3)
    assert queue.admit() == [(1, 0)], "pages given in one round are counted"
    assert queue.admit() == [] and [one.key for one in queue.admission.queue] == [2, 3]


def test_prompts_of_a_destination_that_does_not_fetch_are_held_back_and_others_pass_them() -> None:
    queue = Sender()
    queue.waits(1, destination="slow")
    queue.waits(2)
    assert queue.admit("slow") == [(2, 0)]
    assert queue.admit() == [(1, 0)]


def test_prompts_that_have_not_begun_for_a_stalled_destination_give_their_pages_to_others() -> None:
    queue = Sender()
    idle = queue.waits(1, pages=8, destination="slow")
    queue.admit()
    queue.waits(2, pages=8)
    assert queue.admit() == []
    assert queue.admit("slow") == [(2, 0)] and idle in queue.admission.queue


def test_a_prompt_that_has_begun_keeps_its_pages() -> None:
    queue = Sender()
    begun = queue.waits(1, pages=8, destination="slow")
    queue.admit()
    assert queue.prompts.next_chunk(1) is not None
    queue.waits(2, pages=8, priority=5)
    assert queue.admit("slow") == [] and begun.rank == 0


def test_a_higher_priority_overtakes_a_blocked_prompt_only_if_another_gives_way_to_it() -> None:
    queue = Sender()
    queue.waits(1, pages=8)
    queue.admit()
    queue.waits(2, pages=4)
    queue.waits(3, pages=8, arrival=90.0, priority=1)
    assert queue.admit() == [(3, 0)]
    assert [one.key for one in queue.admission.queue] == [1, 2]


def test_none_waits_for_blocks_of_a_lower_priority_that_gave_its_pages_back() -> None:
    queue = Sender(names=BlockNames(b"secret", "model", 8))
    queue.waits(1, pages=6)
    queue.admit()
    assert queue.prompts.follows(queue.waits(2, pages=6, priority=5)) == 40
    queue.waits(3, pages=8, arrival=-90.0, priority=5)
    assert queue.admit() == [(3, 0)]
    assert [one.key for one in queue.prompts.take_released()] == [2]


def test_destinations_stall_one_by_one_and_all_together() -> None:
    assert stalled_destinations({"slow": MOST, "d0": 1}, MOST) == ({"slow"}, False)
    assert stalled_destinations({"slow": MOST - 1}, MOST) == (set(), False)
    late = {f"d{number}": MOST // 2 for number in range(2 * STALLED_TOTAL)}
    assert stalled_destinations(late, MOST) == (set(), True)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(1, 6), st.sampled_from("abc"), st.integers(0, 100)),
            st.sets(st.sampled_from("abc")),
            st.none(),
        ),
        max_size=40,
    ),
    st.integers(1, 3),
)
def test_admission_keeps_order_and_room(events: list[object], ranks: int) -> None:
    """A prompt comes, a round is held with stalled destinations, or the oldest with pages ends."""
    queue, total = Sender(ranks, pages=10), 0
    for key, event in enumerate(events):
        match event:
            case (int(pages), str(destination), int(at)):
                queue.waits(key, pages, destination, arrival=at)
            case None if queue.prompts.placed:
                oldest = queue.prompts.placed[0]
                queue.admission.release(oldest)
                queue.prompts.forget(oldest.key)
            case set():
                able = [one for one in queue.admission.queue if one.destination not in event]
                admitted = [key for key, _ in queue.admit(*event)]
                assert admitted == [one.key for one in able][: len(admitted)], "none is left out"
                free = [ledger.free_pages for ledger in queue.state.ledgers]
                if len(admitted) < len(able):
                    assert able[len(admitted)].tokens > 8 * max(free)
                assert not [one for one in queue.prompts.placed if one.destination in event]
        total = sum(-(-one.tokens // 8) for one in queue.prompts.placed)
        assert sum(ledger.free_pages for ledger in queue.state.ledgers) == 10 * ranks - total

"""Which prompts wait for which others, held against a model; and when waiting pays."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.messages.ports import Child
from jdisagg.request import Request, SamplingParams
from jdisagg.scheduler.prompts import ChunkTimes, Leader, SharedPrompts, waiting_pays
from jdisagg.scheduler.residency import Chain
from jdisagg.scheduler.sequences import Prompt


def chain(text: str) -> Chain:
    """A name for each beginning of the text."""
    return tuple([text[: end + 1].encode() for end in range(len(text))])


def asked(key: int, at: float, text: str) -> Prompt:
    made = Prompt(key, Request(str(key), (1,), SamplingParams()), (Child(0),), at)
    made.chain = chain(text)
    return made


def test_the_one_that_has_most_in_common_leads_and_of_equals_the_first() -> None:
    shared = SharedPrompts()
    for key, text in enumerate(("ab", "abcd", "abcx", "abcd")):
        shared.begin(asked(key, 0.0, text))
    shared.begin(asked(9, 1.0, "abcdef"))
    assert shared.leader(9, chain("abcdef"), 0) == Leader(1, 4)
    assert shared.leader(9, chain("abcdef"), 4) is None, "nobody computes the fifth"
    assert shared.leader(9, chain("abc"), 0) == Leader(1, 3)
    assert shared.leader(9, chain("xyz"), 0) is None
    shared.reached(1, 3)
    assert shared.leader(9, chain("abcdef"), 0) == Leader(3, 4), "what is issued is not waited for"
    assert shared.leader(9, chain("abcdef"), 3) == Leader(1, 4)


def test_a_younger_prompt_leads_only_once_it_has_begun() -> None:
    shared = SharedPrompts()
    younger = asked(1, 5.0, "ab")
    shared.begin(younger)
    shared.begin(asked(2, 1.0, "ab"))
    assert shared.leader(2, chain("ab"), 0) is None
    assert shared.leader(1, chain("ab"), 0) == Leader(2, 2)
    younger.rank = 0
    assert shared.leader(2, chain("ab"), 0) == Leader(1, 2)


def test_a_stalled_prompt_is_not_waited_for_until_it_goes_on() -> None:
    shared = SharedPrompts()
    for key in (1, 2):
        shared.begin(asked(key, 0.0, "abcd"))
    shared.follow(2, Leader(1, 4))
    assert shared.stall(1) == (2,)
    assert shared.leader(2, chain("abcd"), 0) is None
    shared.reached(1, 1)
    assert shared.leader(2, chain("abcd"), 1) == Leader(1, 4)


@dataclass
class Model:
    prompt: Prompt
    text: str
    reached: int = 0
    waits: Leader | None = None


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "follow", "start", "reach", "end"]),
        st.integers(0, 7),
        st.integers(0, 5),
        st.text("ab", max_size=5),
    ),
    max_size=40,
)


@given(ACTIONS)
def test_who_waits_is_released_once_when_the_blocks_are_there_or_their_prompt_has_ended(
    actions: list[tuple[str, int, int, str]],
) -> None:
    """And so are a_prompt_waits_for_blocks_that_another_will_compute_and_for_no_others and
    nothing_is_left_when_all_prompts_have_ended."""
    shared, model = SharedPrompts(), dict[int, Model]()

    def let_go(free: tuple[int, ...], leader: int, blocks: float) -> None:
        expected = {
            key
            for key, one in model.items()
            if one.waits is not None and one.waits.key == leader and one.waits.blocks <= blocks
        }
        assert set(free) == expected and len(free) == len(expected)
        for key in free:
            model[key].waits = None

    for action, key, number, text in actions:
        one = model.get(key)
        if action == "begin" and one is None:
            model[key] = Model(asked(key, number, text), text)
            shared.begin(model[key].prompt)
        elif one is None:
            continue
        elif action == "follow" and one.waits is None and one.prompt.rank < 0:
            known = min(number, len(one.text))
            leader = shared.leader(key, chain(one.text), known)
            if leader is None:
                continue
            first = model[leader.key]
            assert known < leader.blocks and first.reached <= known
            assert first.text[: leader.blocks] == one.text[: leader.blocks]
            assert first.prompt.rank == 0 or first.prompt.order < one.prompt.order
            one.waits = leader
            shared.follow(key, leader)
        elif action == "start" and one.waits is None:
            one.prompt.rank = 0
        elif action == "reach" and one.waits is None:
            one.reached = max(one.reached, min(number, len(one.text)))
            let_go(shared.reached(key, one.reached), key, one.reached)
        elif action == "end":
            del model[key]
            let_go(shared.end(key), key, 99)
        assert all(shared.waits(key) == (one.waits is not None) for key, one in model.items())
    for key in list(model):
        assert _end_of_waits(model, key) >= 0
    for key in list(model):
        del model[key]
        let_go(shared.end(key), key, 99)
    assert not len(shared) and not shared._makers


def _end_of_waits(model: dict[int, Model], key: int) -> int:
    """How many prompts are before this one in the line of those that wait for each other."""
    steps = 0
    while (waits := model[key].waits) is not None:
        key, steps = waits.key, steps + 1
        assert steps <= len(model), "they wait for each other"
    return steps


def times(fixed: float, each: float) -> ChunkTimes:
    made = ChunkTimes(512)
    for _ in range(10):
        for tokens in (64, 256, 512):
            made.took(tokens, fixed + each * tokens)
    return made


def test_time_of_chunks_is_a_part_per_chunk_and_a_part_per_token() -> None:
    assert times(0.01, 1e-4).seconds(1024 + 100) == pytest.approx(3 * 0.01 + 1124e-4)
    assert ChunkTimes(512).seconds(700) == 700, "in tokens where nothing is measured"


def test_on_one_rank_waiting_pays_where_it_saves_more_than_another_chunk_costs() -> None:
    # 300 tokens of the leader, then 300 of which 200 are the same
    linear, steep = times(0.0, 1e-4), times(0.05, 1e-4)
    assert waiting_pays(linear, [300], 0, 300, 200)
    # both fit two chunks, either way
    assert waiting_pays(steep, [300], 0, 300, 200)
    # both would fit one chunk
    assert not waiting_pays(steep, [150], 0, 150, 100)
    assert waiting_pays(linear, [150], 0, 150, 100)
    assert waiting_pays(ChunkTimes(512), [150], 0, 150, 16)


def test_a_prompt_does_not_wait_where_another_rank_is_idle_unless_the_leader_is_nearly_done() -> (
    None
):
    linear = times(0.0, 1e-4)
    assert not waiting_pays(linear, [300, 0], 0, 300, 200)
    assert waiting_pays(linear, [100, 0], 0, 300, 200)
    assert waiting_pays(linear, [5000, 5000], 0, 300, 200), "both have others to compute"
    assert not waiting_pays(linear, [5000, 100], 0, 300, 200)

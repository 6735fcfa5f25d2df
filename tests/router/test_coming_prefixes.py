"""Prefixes of prompts in progress: held against a list of prompts, and what they change in the
choice of a worker."""

import random

from jdisagg.router.accounts import Work
from jdisagg.router.decision import Decision, PlacementPolicy, PlacementQuery, PromptBlocks
from jdisagg.router.placement import decide
from jdisagg.router.unreported import LINGER_SECONDS, ComingPrefixes
from tests.router.fleets import decode_status, prefill_status, state_of

SIZE = 128


def blocks(text: str) -> PromptBlocks:
    """A name for each beginning of the text."""
    return PromptBlocks([hash(text[: end + 1]) for end in range(len(text))], SIZE)


def test_each_worker_is_known_for_the_longest_prefix_of_its_prompts_in_progress() -> None:
    rng, coming = random.Random(3), ComingPrefixes()
    alive: dict[int, tuple[str, str]] = {}
    for _ in range(300):
        text, worker = "".join(rng.choices("ab", k=rng.randrange(5))), rng.choice(("p0", "p1"))
        expected: dict[str, int] = {}
        for name, other in alive.values():
            common = 0
            while common < min(len(text), len(other)) and text[common] == other[common]:
                common += 1
            expected[name] = max(expected.get(name, 0), common * SIZE)
        found = coming.known(blocks(text), 0.0)
        assert found == {name: tokens for name, tokens in expected.items() if tokens}
        if rng.random() < 0.6:
            alive[coming.placed(blocks(text), worker)] = worker, text
        elif alive:
            key = rng.choice(list(alive))
            del alive[key]
            coming.ended(key)
            coming.ended(key)
    for key in alive:
        coming.ended(key)
    assert not len(coming) and not coming._workers


def test_an_entry_outlives_the_first_token_by_the_time_of_a_report() -> None:
    coming = ComingPrefixes()
    key = coming.placed(blocks("ab"), "p0")
    coming.computed(key, now=10.0)
    assert coming.known(blocks("abc"), 10.0 + LINGER_SECONDS / 2) == {"p0": 2 * SIZE}
    assert coming.known(blocks("abc"), 10.0 + LINGER_SECONDS) == {} and not len(coming)


def test_a_prompt_goes_where_its_prefix_is_being_computed_if_that_is_sooner() -> None:
    work, policy = Work(4100, expected_tokens=50), PlacementPolicy()

    def chosen(queued: int, coming: dict[str, int]) -> str | None:
        state = state_of(prefill_status("p0", queued), prefill_status("p1"), decode_status("d0"))
        decision = decide(state, PlacementQuery(work, coming=coming), 0.0, policy)
        assert isinstance(decision, Decision)
        return decision.prefill

    assert chosen(4100, {"p0": 4096}) == "p0"
    assert chosen(4100, {}) == "p1"
    assert chosen(4100, {"p0": 512}) == "p1", "most of it would be computed behind the other"
    assert chosen(40_000, {"p0": 4096}) == "p1"


def test_nothing_is_fetched_that_is_not_there_yet() -> None:
    state = state_of(prefill_status("p0", 4100), prefill_status("p1"), decode_status("d0"))
    policy = PlacementPolicy(peer_fetch=True)
    query = PlacementQuery(Work(8000, expected_tokens=50), coming={"p0": 4096})
    decision = decide(state, query, 0.0, policy)
    assert isinstance(decision, Decision) and not decision.peer

"""Which drafts of slots with a grammar a step verifies, and their masks."""

import random
from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jdisagg.executor.draft_rows import DraftPlan, Guess, Guesses
from jdisagg.executor.grammar_rows import GrammarRows, pays
from jdisagg.grammar.matcher import mask_words
from jdisagg.layout.kv_spec import KVComponent, KVLayer, KVSpec
from jdisagg.messages.step_commands import NO_TOKEN, SampleSpec, SlotAdmit, SlotGrow
from jdisagg.request import Grammar, GrammarKind, SamplingParams
from jdisagg.scheduler.executor import LONGEST_RUN, MeshLimits
from jdisagg.scheduler.speculation import rows_before_snapshot
from tests.fakes.fake_executor import toy_limits
from tests.fakes.toy_grammars import END, FIRST, GRAMMARS, VOCABULARY

REGEX = Grammar(GrammarKind.REGEX, "[a-z]forced words[0-9]")
STOP = chr(FIRST + END)


def ids(text: str) -> list[int]:
    return [ord(letter) - FIRST for letter in text]


def admit(
    slot: int,
    text: str = "q",
    limit: int = 100,
    params: SamplingParams | None = None,
    grammar: Grammar = REGEX,
) -> SlotAdmit:
    """A sequence whose answer so far is `text`; the last of it is at position 10."""
    params = replace(params or SamplingParams(), grammar=grammar)
    spec = SampleSpec(0, params, (END,), output_history=tuple(ids(text)))
    return SlotAdmit(1, 0, slot, ids(text)[-1], 10, limit, (0,), spec)


def rows_of(*admits: SlotAdmit, longest: int = LONGEST_RUN) -> GrammarRows:
    rows = GrammarRows(VOCABULARY, longest, "cpu")
    rows.compiler = GRAMMARS
    rows.admit(admits, ())
    return rows


def step(
    rows: GrammarRows,
    slots: tuple[int, ...],
    room: int = 16,
    guesses: Guesses | None = None,
    ours: list[int] | None = None,
    make: Callable[[int], list[int]] | None = None,
) -> tuple[list[str], list[str]]:
    """A step in which each row takes the first token of its mask. The drafts, and what was taken.
    For the first slot, the mesh itself drafted `ours`, and then drafts what `make` returns for the
    number of tokens taken: the position of the first draft, and tokens."""
    drafts = rows.runs((slots,), room, guesses or {})
    plan = DraftPlan.of(drafts, 1, len(slots), room, LONGEST_RUN) if drafts else None
    masks = rows.masks((slots,), len(slots) + (room if plan else 0), plan)[0]
    allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    first = np.argmax(allowed, axis=1)
    taken = np.full((1, len(slots), LONGEST_RUN if plan else 1), NO_TOKEN, np.int32)
    for row in range(len(slots)):
        taken[0, row, 0] = first[row]
        guess = drafts.get((0, row))
        known = (guess.tokens or ours or ()) if guess else ()
        for offset, draft in enumerate(known[: guess.count] if guess else (), 1):
            if taken[0, row, offset - 1] != draft:
                break
            assert plan is not None
            taken[0, row, offset] = first[plan.place(0, row, offset)]
    made = make(int(np.sum(taken[0, 0] >= 0))) if make else None
    rows.issued((slots,), jnp.asarray(taken), None if made is None else jnp.asarray([[made]]))
    text = lambda tokens: "".join(chr(FIRST + token) for token in tokens if token >= 0)  # noqa: E731
    of_row = [drafts.get((0, row), Guess(0, (), 0)) for row in range(len(slots))]
    return [text(one.tokens[: one.count]) for one in of_row], [text(row) for row in taken[0]]


def test_a_run_is_taken_one_step_after_it_is_known_and_goes_on_where_it_was_too_long() -> None:
    rows = rows_of(admit(3))
    assert step(rows, (3,)) == ([""], ["f"])
    assert step(rows, (3,)) == (["orced w"], ["orced wo"])
    assert step(rows, (3,)) == (["rds"], ["rds0"])
    assert step(rows, (3,)) == ([""], [STOP]), "a stop id is chosen, not forced"


def test_a_run_is_cut_where_the_slot_may_write_no_more_and_goes_on_when_it_has_grown() -> None:
    rows = rows_of(admit(3, limit=15))
    step(rows, (3,))
    assert step(rows, (3,)) == (["orc"], ["orce"])
    assert step(rows, (3,))[0] == [""], "it stands at its limit"
    rows.admit((), (SlotGrow(0, 3, 18, (0, 1)),))
    assert step(rows, (3,)) == (["d "], ["d w"])


def test_rows_beside_the_slots_are_shared_and_what_does_not_fit_is_left_to_later_steps() -> None:
    rows = rows_of(admit(0), admit(1))
    step(rows, (0, 1))
    assert step(rows, (0, 1), room=4) == (["", "orce"], ["o", "orced"]), "each comes first in turn"
    assert step(rows, (0, 1), room=4) == (["rced", ""], ["rced ", " "])
    assert step(rows, (0, 1), room=13)[0] == ["w", "w"]


def test_on_a_cpu_a_run_must_save_a_quarter_of_the_rows() -> None:
    assert pays(1, 4, "cpu") and pays(2, 8, "cpu") and pays(1, 256, "gpu")
    assert not pays(1, 5, "cpu") and not pays(0, 1, "cpu") and not pays(0, 1, "gpu")
    others = [admit(slot, "qforced words") for slot in range(1, 5)]
    rows = rows_of(admit(0, "qforced wor"), *others)
    step(rows, (0, 1, 2, 3, 4))
    assert step(rows, (0, 1, 2, 3, 4)) == ([""] * 5, ["s", *[STOP] * 4])


def test_a_slot_that_rests_for_a_step_goes_on_with_its_run() -> None:
    rows = rows_of(admit(0), admit(1))
    step(rows, (0, 1))
    assert step(rows, (1,))[0] == ["orced w"]
    assert step(rows, (0, 1))[0] == ["orced w", "rds"]


def test_rows_with_penalties_and_log_probabilities_take_runs() -> None:
    for params in (SamplingParams(logprobs=0), SamplingParams(repetition_penalty=1.1)):
        rows = rows_of(admit(0, params=params))
        taken = [step(rows, (0,)) for _ in range(4)]
        assert [run for run, _ in taken] == [[""], ["orced w"], ["rds"], [""]]
        assert "".join(text for _, (text,) in taken) == "forced words0" + STOP


def test_another_sequence_in_the_slot_begins_without_a_run() -> None:
    rows = rows_of(admit(0))
    step(rows, (0,))
    rows.admit((admit(0, "qforced w"),), ())
    assert step(rows, (0,)) == ([""], ["o"])
    assert step(rows, (0,)) == (["rds"], ["rds0"])


FREE = Grammar(GrammarKind.REGEX, "[a-z]([a-c]{3}-)*")


def guess(text: str, start: int = 11, count: int = 7) -> Guesses:
    return {(0, 0): Guess(start, tuple(ids(text)), count)}


def test_predicted_drafts_are_masked_one_by_one_up_to_the_first_that_the_grammar_forbids() -> None:
    rows = rows_of(admit(0, grammar=FREE))
    assert step(rows, (0,), guesses=guess("aaa-aaa-")) == (["aaa-aaa"], ["aaa-aaa-"])
    assert step(rows, (0,), guesses=guess("aa-", 19)) == (["aa-"], ["aaa"]), "not after two"
    assert step(rows, (0,), guesses=guess("-ba", 22)) == (["-ba"], ["-a"]), "b is not chosen"
    assert step(rows, (0,)) == ([""], ["a"])


def test_predicted_drafts_are_those_after_the_position_where_the_slot_really_is() -> None:
    rows = rows_of(admit(0, grammar=FREE))
    assert step(rows, (0,), guesses=guess("aba-aaaa", count=3))[1] == ["aa"]
    # planned before it was known that only two of four tokens came
    drafts = rows.runs(((0,),), 7, guess("aba-aaaaaaaa", count=3))
    plan = DraftPlan.of(drafts, 1, 1, 7, LONGEST_RUN)
    masks = rows.masks(((0,),), 8, plan)[0]
    allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :VOCABULARY]
    letters = ["".join(chr(FIRST + token) for token in np.flatnonzero(row)) for row in allowed[:3]]
    # the drafts are the tokens of positions 13 to 15: "a", "-", "a"
    assert letters == ["abc", "-", "abc" + STOP]


def test_a_slot_with_a_known_run_takes_no_predicted_drafts() -> None:
    rows = rows_of(admit(0))
    step(rows, (0,))
    assert step(rows, (0,), guesses=guess("zzzzzzz", 12))[0] == ["orced w"]


LOOP = Grammar(GrammarKind.REGEX, "[a-z]([a-c][a-c]forced-)*")


def test_drafts_that_the_mesh_makes_change_no_answer_whatever_they_are() -> None:
    """Right ones and wrong ones, with forced tokens among them, and at limits that grow."""
    rng, alone = random.Random(2), rows_of(admit(0, grammar=LOOP, limit=1000))
    answer = "".join(step(alone, (0,))[1][0] for _ in range(130))
    assert answer.startswith("aaforced-aaforced-")
    accepted = rejected = runs = 0
    for _ in range(30):
        limit, text, ours = 14, "", []
        rows = rows_of(admit(0, grammar=LOOP, limit=limit))
        while len(text) < 100:
            at = 10 + len(text)  # position of the slot's token
            if at >= limit - rng.randrange(1, 4):
                limit += rng.randrange(4, 12)
                rows.admit((), (SlotGrow(0, 0, limit, (0,)),))

            made: list[int] = []

            def make(count: int, at: int = at, made: list[int] = made) -> list[int]:
                right = ids(answer[at - 10 + count :][:3])
                wrong = [rng.randrange(20) if rng.random() < 0.2 else token for token in right]
                made[:] = [at + count + 1, *wrong]
                return made

            inside = ours[1 : limit - at]
            asked = {(0, 0): Guess(0, (), rng.randrange(4))}
            (run,), (got,) = step(rows, (0,), guesses=asked, ours=inside, make=make)
            assert text + got == answer[: len(text) + len(got)]
            text, ours = text + got, made
            runs += bool(run)
            accepted += 0 if run else len(got) - 1
            rejected += not run and len(got) <= min(asked[0, 0].count, len(inside))
    assert min(accepted, rejected, runs) > 50


def test_what_is_forced_is_what_the_mask_allows_alone() -> None:
    matcher, one_by_one, limited = (
        GRAMMARS.matcher(REGEX, SamplingParams(grammar=REGEX), (END,), ids("q")) for _ in range(3)
    )
    assert limited.forced(100, ids("r")[0]) == ids("fo"), "the model does not know the others"
    forced = matcher.forced(100, VOCABULARY)
    assert forced == ids("forced words")
    mask = np.zeros(mask_words(VOCABULARY), np.uint32)
    for token in forced:
        one_by_one.fill(mask)
        (allowed,) = np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert allowed.tolist() == [token]
        one_by_one.consume((token,))
    assert one_by_one.forced(100, VOCABULARY) == []
    assert matcher.forced(100, VOCABULARY) == []


def test_a_ring_takes_what_its_window_leaves_and_a_step_ends_before_a_snapshot() -> None:
    def limits(layer: KVLayer, ring_pages: int = 0) -> MeshLimits:
        spec = KVSpec((layer,), "float32")
        return replace(toy_limits(page_size=4), kv_spec=spec, ring_pages=ring_pages)

    kv = (KVComponent("k", 1, 8), KVComponent("v", 1, 8))
    full, windowed = KVLayer(kv), KVLayer(kv, window=6)
    assert limits(KVLayer(kv, state=kv)).longest_run == LONGEST_RUN
    assert limits(full).longest_run == LONGEST_RUN
    assert limits(windowed).longest_run == LONGEST_RUN
    # positions p - 5 to p are seen from p; a ring of 12 holds those and six more
    assert limits(windowed, ring_pages=3).longest_run == 7

    # of blocks of 16 tokens: single tokens from 14 on
    rows = [rows_before_snapshot(position, 16) for position in (0, 7, 12, 13, 14, 15, 16)]
    assert rows == [14, 7, 2, 1, 0, -1, 14]
    assert rows_before_snapshot(15, 0) == LONGEST_RUN

"""Which runs of forced tokens a forward pass takes, and their rows."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.executor.decode_program import run_rows
from jdisagg.executor.grammar_rows import LONGEST_RUN, GrammarRows, longest_run, pays, rows_for_runs
from jdisagg.grammar.matcher import mask_words
from jdisagg.layout.kv_spec import KVComponent, KVLayer, KVSpec
from jdisagg.messages.step_commands import SampleSpec, SlotAdmit, SlotGrow
from jdisagg.request import Grammar, GrammarKind, SamplingParams
from jdisagg.scheduler.executor import MeshLimits
from tests.fakes.fake_executor import toy_limits
from tests.fakes.toy_grammars import END, FIRST, GRAMMARS, VOCABULARY

REGEX = Grammar(GrammarKind.REGEX, "[a-z]forced words[0-9]")
NOBODY = 8


def ids(text: str) -> list[int]:
    return [ord(letter) - FIRST for letter in text]


def admit(
    slot: int, text: str = "q", limit: int = 100, params: SamplingParams | None = None
) -> SlotAdmit:
    """A sequence whose answer so far is `text`; the last of it is at position 10."""
    params = replace(params or SamplingParams(), grammar=REGEX)
    spec = SampleSpec(0, params, (END,), output_history=tuple(ids(text)))
    return SlotAdmit(1, 0, slot, ids(text)[-1], 10, limit, (0,), spec)


def rows_of(*admits: SlotAdmit, longest: int = LONGEST_RUN) -> GrammarRows:
    rows = GrammarRows(VOCABULARY, longest, "cpu")
    rows.compiler = GRAMMARS
    rows.admit(admits, ())
    return rows


def step(rows: GrammarRows, slots: tuple[int, ...], room: int = 16) -> tuple[list[str], list[str]]:
    """A step in which each row takes the first token of its mask. The runs, and what was taken."""
    runs = rows.runs((slots,), room)
    mask = rows.masks((slots,), len(slots))[0]
    allowed = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")
    token = np.argmax(allowed, axis=1)
    rows.issued((slots,), jnp.asarray(token[None], jnp.int32))
    text = lambda tokens: "".join(chr(FIRST + token) for token in tokens)  # noqa: E731
    return [text(runs.get((0, row), ())) for row in range(len(slots))], [*text(token)]


def test_a_run_begins_at_the_slots_own_token_and_is_taken_one_step_after_it_is_known() -> None:
    rows = rows_of(admit(3))
    assert step(rows, (3,)) == ([""], ["f"])
    assert step(rows, (3,)) == (["forced words"], ["0"])
    assert step(rows, (3,)) == ([""], [chr(FIRST + END)]), "a stop id is chosen, not forced"


def test_a_run_is_cut_where_the_slot_may_write_no_more_and_goes_on_when_it_has_grown() -> None:
    rows = rows_of(admit(3, limit=15))
    step(rows, (3,))
    assert step(rows, (3,)) == (["forc"], ["e"])
    assert step(rows, (3,))[0] == [""], "it stands at its limit"
    rows.admit((), (SlotGrow(0, 3, 18, (0, 1)),))
    assert step(rows, (3,)) == (["ed "], ["w"])


def test_rows_beside_the_slots_are_shared_and_what_does_not_fit_is_left_to_later_steps() -> None:
    rows = rows_of(admit(0), admit(1))
    step(rows, (0, 1))
    assert step(rows, (0, 1), room=4) == (["", "force"], ["o", "d"]), "each comes first in turn"
    assert step(rows, (0, 1), room=4) == (["orced", ""], [" ", " "])
    assert step(rows, (0, 1), room=13)[0] == [" words", " words"]


def test_on_a_cpu_a_run_must_save_a_quarter_of_the_rows() -> None:
    assert pays(1, 4, "cpu") and pays(2, 8, "cpu") and pays(1, 256, "gpu")
    assert not pays(1, 5, "cpu") and not pays(0, 1, "cpu") and not pays(0, 1, "gpu")
    others = [admit(slot, "qforced words") for slot in range(1, 5)]
    rows = rows_of(admit(0, "qforced wor"), *others)
    step(rows, (0, 1, 2, 3, 4))
    assert step(rows, (0, 1, 2, 3, 4)) == ([""] * 5, ["s", *[chr(FIRST + END)] * 4])


def test_a_slot_that_rests_for_a_step_goes_on_with_its_run() -> None:
    rows = rows_of(admit(0), admit(1))
    step(rows, (0, 1))
    assert step(rows, (1,))[0] == ["forced words"]
    assert step(rows, (0, 1))[0] == ["forced words", ""]


@pytest.mark.parametrize(
    "params", [SamplingParams(logprobs=0), SamplingParams(repetition_penalty=1.1)]
)
def test_penalties_and_log_probabilities_are_of_tokens_chosen_one_by_one(
    params: SamplingParams,
) -> None:
    rows = rows_of(admit(0, params=params))
    taken = [step(rows, (0,)) for _ in range(14)]
    assert [run for run, _ in taken] == [[""]] * 14
    assert "".join(token for _, (token,) in taken) == "forced words0" + chr(FIRST + END)


def test_another_sequence_in_the_slot_begins_without_a_run() -> None:
    rows = rows_of(admit(0))
    step(rows, (0,))
    rows.admit((admit(0, "qforced w"),), ())
    assert step(rows, (0,)) == ([""], ["o"])
    assert step(rows, (0,)) == (["ords"], ["0"])


def test_what_is_forced_is_what_the_mask_allows_alone() -> None:
    matcher, one_by_one = (
        GRAMMARS.matcher(REGEX, SamplingParams(grammar=REGEX), (END,), ids("q")) for _ in range(2)
    )
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


def test_ids_that_the_model_does_not_know_are_not_forced() -> None:
    matcher = GRAMMARS.matcher(REGEX, SamplingParams(grammar=REGEX), (END,), ids("q"))
    assert matcher.forced(100, ids("r")[0]) == ids("fo")


def test_the_rows_of_a_run_are_successive_positions_and_the_last_one_is_the_slots() -> None:
    runs = {(0, 1): [7, 8, 9], (0, 2): [5, 6]}
    rows = run_rows(((4, 6, 2), (1,)), 4, runs, NOBODY).tolist()
    assert rows[0][:4] == [[4, 0, -1], [6, 2, 9], [2, 1, 6], [NOBODY, 0, -1]]
    assert rows[0][4:7] == [[6, 0, 7], [6, 1, 8], [2, 0, 5]]
    assert rows[1] == [[1, 0, -1]] + [[NOBODY, 0, -1]] * (3 + rows_for_runs(4))
    assert len(rows[0]) == 4 + rows_for_runs(4)


def test_a_state_takes_one_token_at_a_time_and_a_ring_what_its_window_leaves() -> None:
    def limits(layer: KVLayer, ring_pages: int = 0) -> MeshLimits:
        spec = KVSpec((layer,), "float32")
        return replace(toy_limits(page_size=4), kv_spec=spec, ring_pages=ring_pages)

    kv = (KVComponent("k", 1, 8), KVComponent("v", 1, 8))
    full, windowed = KVLayer(kv), KVLayer(kv, window=6)
    assert longest_run(limits(KVLayer(kv, state=kv))) == 1
    assert longest_run(limits(full)) == LONGEST_RUN
    assert longest_run(limits(windowed)) == LONGEST_RUN
    # positions p - 5 to p are seen from p; a ring of 12 holds those and six more
    assert longest_run(limits(windowed, ring_pages=3)) == 7

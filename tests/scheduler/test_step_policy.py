"""What a decode mesh does next, replayed from snapshots: no worker, no clock."""

import itertools

import msgspec
import pytest

from jdisagg.scheduler.turn import GAP_STEPS, Action, StepSnapshot, next_step


def test_a_mesh_without_programs_for_both_alternates_chunks_and_steps() -> None:
    waiting = StepSnapshot(prompts_queued=True)
    assert next_step(waiting).action is Action.PREFILL
    after_a_chunk = msgspec.structs.replace(waiting, steps_turn=True)
    assert next_step(after_a_chunk).action is Action.DECODE
    no_sequences = msgspec.structs.replace(after_a_chunk, decode_runnable=False)
    assert next_step(no_sequences).action is Action.PREFILL


MIXING = StepSnapshot(
    prompts_queued=True,
    mixes=True,
    step_seconds=0.01,
    mixed_seconds=((64, 0.020), (128, 0.032), (256, 0.058), (512, 0.12)),
)


def test_a_chunk_runs_with_a_step_as_long_as_the_gap_between_tokens_allows() -> None:
    steep = msgspec.structs.replace(
        MIXING, mixed_seconds=((64, 0.03), (128, 0.04), (256, 0.05), (512, 0.085))
    )
    decision = next_step(steep)
    assert (decision.action, decision.chunk_tokens) == (Action.MIXED, 256)
    assert 0.05 <= GAP_STEPS * 0.01 < 0.085, "the case is between two sizes"
    slower = msgspec.structs.replace(steep, step_seconds=0.02)
    assert next_step(slower).chunk_tokens == 512
    assert next_step(msgspec.structs.replace(steep, steps_turn=True)) == decision


def test_a_larger_chunk_is_taken_only_for_a_gain_in_tokens_per_second() -> None:
    decision = next_step(MIXING)
    rates = [size / seconds for size, seconds in MIXING.mixed_seconds[:3]]
    assert rates[1] > 0.9 * rates[2] > rates[0]
    assert (decision.action, decision.chunk_tokens) == (Action.MIXED, 128)
    again = msgspec.structs.replace(MIXING, steps_turn=True)
    assert next_step(again) == decision, "nothing alternates"


def test_single_steps_run_while_prompts_wait_for_prompts_of_other_ranks() -> None:
    waiting = msgspec.structs.replace(MIXING, gathering=True)
    decision = next_step(waiting)
    assert (decision.action, decision.quiet, decision.chunk_tokens) == (Action.DECODE, False, 0)
    span = msgspec.structs.replace(waiting, span_in_flight=True)
    assert next_step(span).action is Action.INTERRUPT, "a chunk can follow any step"


def test_the_smallest_chunk_runs_even_if_it_makes_the_gap_too_long() -> None:
    tight = msgspec.structs.replace(MIXING, step_seconds=0.001)
    unknown = msgspec.structs.replace(MIXING, mixed_seconds=((64, 0.0),))
    assert next_step(unknown).chunk_tokens == 64
    decision = next_step(tight)
    assert (decision.action, decision.chunk_tokens) == (Action.MIXED, 64)


def test_a_prompt_has_full_chunks_if_no_sequence_runs() -> None:
    alone = msgspec.structs.replace(MIXING, decode_runnable=False)
    assert next_step(alone).action is Action.PREFILL
    again = msgspec.structs.replace(alone, steps_turn=True)
    assert next_step(again).action is Action.PREFILL


def test_a_step_runs_alone_until_its_time_is_measured() -> None:
    decision = next_step(msgspec.structs.replace(MIXING, step_seconds=None))
    assert decision.action is Action.DECODE and "measured" in decision.reason
    assert not decision.quiet, "one step, so that the prompt goes on"


def test_steps_wait_for_a_hand_off_that_completes_behind_the_step_in_flight() -> None:
    decision = next_step(StepSnapshot(kv_arriving=True, joining=True))
    assert decision.action is Action.WAIT and "KV" in decision.reason


def test_several_steps_go_together_only_when_nothing_waits_beside_them() -> None:
    assert next_step(StepSnapshot()).quiet
    assert not next_step(StepSnapshot(kv_arriving=True)).quiet
    busy = StepSnapshot(prompts_queued=True, steps_turn=True)
    assert not next_step(busy).quiet
    spans = StepSnapshot(interruptible=True, kv_arriving=True)
    assert next_step(spans).quiet, "a span ends early when its KV has come"


@pytest.mark.parametrize(
    ("prompts_queued", "span_blocks", "action"),
    [
        (False, False, Action.WAIT),
        (True, False, Action.INTERRUPT),
        (False, True, Action.INTERRUPT),
        (True, True, Action.INTERRUPT),
    ],
)
def test_one_span_at_a_time_which_ends_when_something_waits_for_that(
    prompts_queued: bool, span_blocks: bool, action: Action
) -> None:
    under_way = StepSnapshot(
        interruptible=True,
        prompts_queued=prompts_queued,
        span_in_flight=True,
        span_blocks=span_blocks,
    )
    assert next_step(under_way).action is action


def test_every_snapshot_has_a_decision_with_its_reason_and_the_same_again() -> None:
    fields = msgspec.structs.fields(StepSnapshot)
    flags = [field.name for field in fields if field.type is bool]
    assert len(flags) + 2 == len(fields)
    sizes = ((64, 0.0), (128, 0.1))
    for step in (None, 0.05):
        for values in itertools.product([False, True], repeat=len(flags)):
            given = dict(zip(flags, values, strict=True))
            snapshot = StepSnapshot(step_seconds=step, mixed_seconds=sizes, **given)
            decision = next_step(snapshot)
            recorded = msgspec.json.decode(msgspec.json.encode(snapshot), type=StepSnapshot)
            assert decision.reason and next_step(recorded) == decision
            prefills = decision.action in (Action.PREFILL, Action.MIXED)
            assert snapshot.prompts_queued or not prefills
            assert (decision.chunk_tokens > 0) == (decision.action is Action.MIXED)
            if decision.action is Action.INTERRUPT:
                assert snapshot.span_in_flight

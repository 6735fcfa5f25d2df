"""What a decode mesh does next, replayed from snapshots: no worker, no clock."""

import itertools

import msgspec
import pytest

from jdisagg.config import Mode
from jdisagg.scheduler.step_policy import Action, StepSnapshot, next_step

CHUNKED, UNIFIED, DISAGGREGATED = Mode.CHUNKED, Mode.UNIFIED, Mode.DISAGGREGATED


def test_chunked_mode_alternates_chunks_and_steps() -> None:
    waiting = StepSnapshot(CHUNKED, prompts_queued=True)
    assert next_step(waiting).action is Action.PREFILL
    after_a_chunk = msgspec.structs.replace(waiting, prefilled_last=True)
    assert next_step(after_a_chunk).action is Action.DECODE
    no_sequences = msgspec.structs.replace(after_a_chunk, decode_runnable=False)
    assert next_step(no_sequences).action is Action.PREFILL


def test_unified_mode_prefills_whole_prompts_first_and_their_sequences_join_the_next_step() -> None:
    assert (
        next_step(StepSnapshot(UNIFIED, prompts_queued=True, prefilled_last=True)).action
        is Action.PREFILL
    )
    decision = next_step(StepSnapshot(UNIFIED, chunk_in_flight=True))
    assert decision.action is Action.WAIT and "join the next step" in decision.reason


@pytest.mark.parametrize("mode", [DISAGGREGATED, CHUNKED])
def test_a_chunk_in_flight_holds_no_steps_back_but_in_unified_mode(mode: Mode) -> None:
    assert next_step(StepSnapshot(mode, chunk_in_flight=True)).action is Action.DECODE


def test_steps_wait_for_a_hand_off_that_completes_behind_the_step_in_flight() -> None:
    decision = next_step(StepSnapshot(DISAGGREGATED, kv_arriving=True, kv_completing=True))
    assert decision.action is Action.WAIT and "KV" in decision.reason


def test_several_steps_go_together_only_when_nothing_waits_beside_them() -> None:
    assert next_step(StepSnapshot(DISAGGREGATED)).quiet
    assert not next_step(StepSnapshot(DISAGGREGATED, kv_arriving=True)).quiet
    busy = StepSnapshot(CHUNKED, prompts_queued=True, prefilled_last=True)
    assert not next_step(busy).quiet
    spans = StepSnapshot(DISAGGREGATED, interruptible=True, kv_arriving=True)
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
        CHUNKED,
        interruptible=True,
        prompts_queued=prompts_queued,
        span_in_flight=True,
        span_blocks=span_blocks,
    )
    assert next_step(under_way).action is action


def test_every_snapshot_has_a_decision_with_its_reason_and_the_same_again() -> None:
    flags = [name for name in StepSnapshot.__struct_fields__ if name != "mode"]
    for mode in Mode:
        for values in itertools.product([False, True], repeat=len(flags)):
            snapshot = StepSnapshot(mode, **dict(zip(flags, values, strict=True)))
            decision = next_step(snapshot)
            recorded = msgspec.json.decode(msgspec.json.encode(snapshot), type=StepSnapshot)
            assert decision.reason and next_step(recorded) == decision
            assert snapshot.prompts_queued or decision.action is not Action.PREFILL
            if decision.action is Action.INTERRUPT:
                assert snapshot.span_in_flight

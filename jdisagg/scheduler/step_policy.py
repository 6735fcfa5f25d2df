"""Decides what a decode mesh does next: prefill, decode, wait, or end the running span of steps.
Pure.

CHUNKED mode alternates prefill chunks with decode steps; UNIFIED mode runs whole prefills first.
Steps are held back if they would delay sequences about to join: those of a chunk in flight in
UNIFIED mode, and those whose KV lacks only insertions that precede a step in flight. That step
keeps the mesh busy, and the new sequences join the next one.

`next_step` is a function of its snapshot alone, so that recorded snapshots can be replayed."""

import enum

import msgspec

from jdisagg.config import Mode


class Action(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    WAIT = "wait"
    INTERRUPT = "interrupt"


class StepSnapshot(msgspec.Struct, frozen=True, gc=False):
    """What waits for the mesh, and what it is doing.

    Attributes:
        prompts_queued: Prompts that are not completely issued.
        prefilled_last: The newest command was a prefill chunk.
        decode_runnable: A decode step would hold a sequence; read only if a chunk competes.
        interruptible: The mesh runs spans of steps that can be ended early.
        span_in_flight: A span is running.
        span_blocks: A sequence waits for the end of that span.
        chunk_in_flight: A prefill chunk is issued and not applied.
        kv_arriving: Blocks are being pulled or inserted.
        kv_completing: A hand-off ends with insertions issued before the newest step in flight.
    """

    mode: Mode
    interruptible: bool = False
    prompts_queued: bool = False
    prefilled_last: bool = False
    decode_runnable: bool = True
    span_in_flight: bool = False
    span_blocks: bool = False
    chunk_in_flight: bool = False
    kv_arriving: bool = False
    kv_completing: bool = False


class StepDecision(msgspec.Struct, frozen=True, gc=False):
    """The decision. With `quiet`, nothing else waits, so several steps may run at once. A DECODE
    without a sequence to step leaves the mesh to a queued prompt."""

    action: Action
    reason: str
    quiet: bool = False


_INTERRUPT = StepDecision(Action.INTERRUPT, "something waits for the end of the span")
_ONE_SPAN = StepDecision(Action.WAIT, "a span is under way; what follows is decided at its end")
_WHOLE_PROMPTS = StepDecision(Action.PREFILL, "whole prompts go before decode steps")
_CHUNKS_TURN = StepDecision(Action.PREFILL, "a prompt waits, and decode steps went last")
_NO_STEPS = StepDecision(Action.PREFILL, "a prompt waits, and no sequence can be stepped")
_CHUNK_JOINS = StepDecision(Action.WAIT, "the chunk's sequences join the next step")
_KV_JOINS = StepDecision(Action.WAIT, "sequences whose KV is nearly whole join the next step")
_ALONE = StepDecision(Action.DECODE, "nothing else waits", quiet=True)
_BESIDE = StepDecision(Action.DECODE, "prompts or KV wait beside the sequences")


def next_step(now: StepSnapshot) -> StepDecision:
    """Decides what the mesh does next."""
    if now.span_in_flight:
        return _INTERRUPT if now.prompts_queued or now.span_blocks else _ONE_SPAN
    if now.prompts_queued:
        if now.mode is Mode.UNIFIED:
            return _WHOLE_PROMPTS
        if not now.prefilled_last:
            return _CHUNKS_TURN
        if not now.decode_runnable:
            return _NO_STEPS
    if now.mode is Mode.UNIFIED and now.chunk_in_flight:
        return _CHUNK_JOINS
    if now.kv_completing:
        return _KV_JOINS
    quiet = not now.prompts_queued and (now.interruptible or not now.kv_arriving)
    return _ALONE if quiet else _BESIDE

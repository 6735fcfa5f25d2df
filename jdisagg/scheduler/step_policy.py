"""Decides what a decode mesh does next: prefill, decode, both in one program, wait, or interrupt
the running span (one command of many decode steps). Has no side effects.

CHUNKED mode runs prefill chunks together with decode steps. The predicted time of both together,
which is the gap between two tokens of a running sequence, is at most `GAP_STEPS` times the measured
time of a step alone. Among the chunk sizes within this limit, the smallest is chosen that computes
nearly as many prompt tokens per second as the best one (`EFFICIENT`). If no sequence runs, chunks
have their full size. A mesh without mixed programs alternates chunks and steps. Mode UNIFIED sets
large chunks without mixed programs, after which steps have no turn while a prompt waits.

If sequences are about to join the batch, no step is issued, so that they join the next step. The
mesh is busy with earlier commands in the meantime. Two kinds of sequences are about to join: those
whose last KV insertions were issued before the newest step in flight, and those of a prefill chunk
in flight if prompts are computed whole.

On a mesh with several dp ranks, prompts may wait until each rank has one (`gathering`). During this
time only single steps run, so that a chunk can follow any step.

`next_step` depends only on its snapshot, so recorded snapshots can be replayed."""

import enum
from collections import deque
from collections.abc import Sequence

import msgspec

# Largest time of a decode step with a prefill chunk, relative to a step alone. The smallest chunk
# may exceed this limit.
GAP_STEPS = 6.0
# A larger chunk makes gaps longer. It is chosen only if it computes over a tenth more tokens per
# second than a smaller one (benchmarks/LOG.md).
EFFICIENT = 0.9


class Action(enum.Enum):
    PREFILL = "prefill"
    MIXED = "mixed"
    DECODE = "decode"
    WAIT = "wait"
    INTERRUPT = "interrupt"


class StepSnapshot(msgspec.Struct, frozen=True, gc=False):
    """The input of `next_step`: work that waits for the mesh, and commands in flight.

    Attributes:
        prompts_queued: Whether some prompt has tokens that are in no issued chunk.
        gathering: Whether the queued prompts wait for prompts of other dp ranks.
        steps_turn: Whether decode steps go before further prompts, because the newest command was a
            prefill chunk and the mesh alternates.
        decode_runnable: Whether any sequence can run a decode step. Read only if a prompt waits.
        mixes: Whether the mesh has programs that run a chunk and a decode step together.
        step_seconds: Measured seconds of a decode step alone. None if there is no recent
            measurement. Read only if `mixes` is set.
        mixed_seconds: (tokens of a chunk, predicted seconds of the chunk with a decode step),
            ascending. The smallest chunk is always included, others only if they can be predicted.
        interruptible: Whether the mesh runs spans: commands of many steps that can be ended early.
        span_in_flight: Whether a span is running.
        span_blocks: Whether a sequence must wait until the running span ends.
        kv_arriving: Whether KV blocks are being received from another worker.
        joining: Whether sequences join the batch before the newest command in flight ends.
    """

    interruptible: bool = False
    prompts_queued: bool = False
    gathering: bool = False
    steps_turn: bool = False
    decode_runnable: bool = True
    mixes: bool = False
    span_in_flight: bool = False
    span_blocks: bool = False
    kv_arriving: bool = False
    joining: bool = False
    step_seconds: float | None = None
    mixed_seconds: tuple[tuple[int, float], ...] = ()


class StepDecision(msgspec.Struct, frozen=True, gc=False):
    """The action that the mesh takes next, and the reason. `quiet` means that no other work waits,
    so one command may run several steps. If the action is MIXED, `chunk_tokens` is the largest
    number of tokens of the chunk. If the action is DECODE or MIXED but no sequence can run, a
    queued prompt is prefilled alone."""

    action: Action
    reason: str
    quiet: bool = False
    chunk_tokens: int = 0


_INTERRUPT = StepDecision(Action.INTERRUPT, "something waits for the end of the span")
_ONE_SPAN = StepDecision(Action.WAIT, "a span is under way; what follows is decided at its end")
_CHUNKS_TURN = StepDecision(Action.PREFILL, "a prompt waits, and it is not the turn of steps")
_NO_STEPS = StepDecision(Action.PREFILL, "a prompt waits, and no sequence can be stepped")
_UNMEASURED = StepDecision(Action.DECODE, "a prompt waits, and the time of a step is not measured")
_JOINING = StepDecision(Action.WAIT, "sequences whose KV is nearly complete join the next step")
_ALONE = StepDecision(Action.DECODE, "nothing else waits", quiet=True)
_BESIDE = StepDecision(Action.DECODE, "prompts or KV wait beside the sequences")


def next_step(now: StepSnapshot) -> StepDecision:
    """Decides what the mesh does next, and returns the action with its reason."""
    if now.span_in_flight:
        return _INTERRUPT if now.prompts_queued or now.span_blocks else _ONE_SPAN
    if now.prompts_queued and not now.gathering:
        if now.mixes and now.decode_runnable:
            return _UNMEASURED if now.step_seconds is None else _mixed(now, now.step_seconds)
        if not now.steps_turn:
            return _CHUNKS_TURN
        if not now.decode_runnable:
            return _NO_STEPS
    if now.joining:
        return _JOINING
    quiet = not now.prompts_queued and (now.interruptible or not now.kv_arriving)
    return _ALONE if quiet else _BESIDE


def _mixed(now: StepSnapshot, step_seconds: float) -> StepDecision:
    smallest, *others = now.mixed_seconds
    fits = [smallest, *(one for one in others if one[1] <= GAP_STEPS * step_seconds)]
    best = max(size / max(seconds, 1e-9) for size, seconds in fits)
    tokens = next(size for size, seconds in fits if size >= EFFICIENT * best * seconds)
    return StepDecision(
        Action.MIXED, "a prompt waits, and its chunk runs with a step", chunk_tokens=tokens
    )


SAMPLES = 9
KEPT_STEPS = 256


class _Recent:
    def __init__(self) -> None:
        self._times: deque[tuple[int, float]] = deque(maxlen=SAMPLES)

    def add(self, now: int, seconds: float) -> None:
        self._times.append((now, seconds))

    def fastest(self, now: int) -> float | None:
        while self._times and now - self._times[0][0] > KEPT_STEPS:
            self._times.popleft()
        return min([seconds for _, seconds in self._times], default=None)


class MixedTimes:
    """Measured times of decode steps on one mesh, alone and together with a prefill chunk.

    The predicted time for a chunk size is its fastest recent measurement, because other work on the
    machine only adds time. Measurements older than `KEPT_STEPS` commands are dropped, because
    contexts grow. The time for a size without measurements is extrapolated from the nearest
    measured size.

    Args:
        batches: Batch sizes of steps, ascending. Steps without a chunk are measured separately for
            each.
    """

    def __init__(self, chunks: Sequence[int], batches: Sequence[int]) -> None:
        self.chunks = tuple(chunks)
        self._batches = batches
        self._alone = {size: _Recent() for size in batches}
        self._mixed = {size: _Recent() for size in chunks}
        self._now = 0

    def took(self, sequences: int, chunk_tokens: int, seconds: float) -> None:
        """Records the seconds of a step.

        Args:
            chunk_tokens: Padded number of tokens of the chunk, or 0 without a chunk.
        """
        self._now += 1
        if not chunk_tokens:
            self._alone[self._batch(sequences)].add(self._now, seconds)
        elif chunk_tokens in self._mixed:
            self._mixed[chunk_tokens].add(self._now, seconds)

    def alone(self, sequences: int) -> float | None:
        return self._alone[self._batch(sequences)].fastest(self._now)

    def mixed(self, sequences: int) -> tuple[tuple[int, float], ...]:
        """Returns (tokens of a chunk, predicted seconds of a step with this chunk) for each chunk
        size that can be predicted. The smallest size is always included, with 0 seconds if it is
        not measured."""
        alone = self.alone(sequences)
        known = {
            size: seconds
            for size, times in self._mixed.items()
            if (seconds := times.fastest(self._now)) is not None
        }
        if alone is None or not known:
            return ((self.chunks[0], 0.0),)
        found: list[tuple[int, float]] = []
        for size in self.chunks:
            near = min(known, key=lambda one: (abs(one - size), one))
            longer = max(0.0, known[near] - alone) * size / near
            found.append((size, known.get(size, alone + longer)))
        return tuple(found)

    def _batch(self, sequences: int) -> int:
        return next(size for size in self._batches if size >= min(sequences, self._batches[-1]))

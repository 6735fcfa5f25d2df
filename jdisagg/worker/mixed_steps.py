"""Plans decode steps that run together with a prefill chunk of the same mesh. Also measures the
times of all decode steps, and counts the tokens that grammars forced and the drafts."""

import msgspec

from jdisagg.messages.step_commands import DecodeSteps
from jdisagg.scheduler.decode_batches import DecodeBatches
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.mixed_times import MixedTimes
from jdisagg.scheduler.step_policy import StepSnapshot
from jdisagg.telemetry import Counters
from jdisagg.worker.prompts import Prompts


class MixedSteps:
    def __init__(
        self, state: DecodeState, batches: DecodeBatches, prompts: Prompts, counters: Counters
    ) -> None:
        self._state, self._batches, self._prompts = state, batches, prompts
        self._counters = counters
        self._times = MixedTimes(prompts.beside(), state.limits.batch_buckets)

    def seen(self, snapshot: StepSnapshot) -> StepSnapshot:
        """Completes a snapshot for the step policy. Adds the measured times from which the policy
        chooses mixed steps, and whether prompts wait for other prompts."""
        # while each rank decodes a sequence, none is idle
        if snapshot.prompts_queued and self._prompts.gathering and all(self._state.running):
            return msgspec.structs.replace(snapshot, gathering=True)
        mixes = snapshot.prompts_queued and bool(self._times.chunks)
        if not mixes and not (snapshot.prompts_queued and snapshot.steps_turn):
            return snapshot
        runnable, width = self._batches.runnable(), self._batches.width()
        times = mixes and runnable
        return msgspec.structs.replace(
            snapshot,
            decode_runnable=runnable,
            mixes=mixes,
            step_seconds=self._times.alone(width) if times else None,
            mixed_seconds=self._times.mixed(width) if times else (),
        )

    def joined(self, steps: DecodeSteps, chunk_tokens: int) -> DecodeSteps:
        for progress in self._state.news:
            # The plan of the step may have preempted a sequence whose prompt is queued.
            if progress.group_key not in self._state.groups:
                self._prompts.forget(progress.group_key)
        sizes = tuple([size for size in self._times.chunks if size <= chunk_tokens])
        chunk = self._prompts.next_chunk(steps.step, beside=sizes)
        return msgspec.structs.replace(steps, chunk=chunk)

    def ended(self, command: DecodeSteps, seconds: float) -> None:
        if self._times.chunks and not command.drafts:
            chunk_tokens = command.chunk.chunk_tokens if command.chunk else 0
            sequences = max(map(len, command.slots))
            self._times.took(sequences, chunk_tokens, seconds / command.steps)
        every = self._batches.forced_tokens
        if every and (forced := every - self._counters["forced_tokens"]):
            self._counters.add("forced_tokens", forced)
        for source, drafted, accepted in self._batches.take_drafts():
            self._counters.add("drafted_tokens", drafted, source=source)
            self._counters.add("accepted_tokens", accepted, source=source)

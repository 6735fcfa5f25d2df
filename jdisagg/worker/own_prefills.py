"""Queues the prompts that a decode mesh computes itself. In modes CHUNKED and UNIFIED it computes
all prompts. In mode DISAGGREGATED it computes the last, uncached tokens of prompts with a cached
prefix."""

from collections.abc import Callable

from jdisagg.messages.step_commands import PrefillChunk
from jdisagg.scheduler.backlog import Backlog
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.prefill_batches import PrefillBatches
from jdisagg.scheduler.sequences import SequenceGroup
from jdisagg.scheduler.shared_prompts import ChunkTimes
from jdisagg.telemetry import Counters
from jdisagg.worker.shared_waits import SharedWaits


class OwnPrefills:
    def __init__(
        self,
        state: DecodeState,
        ids: Callable[[], int],
        now: Callable[[], float],
        counters: Counters,
    ) -> None:
        self.backlog = Backlog()
        self._state = state
        self._now = now
        kept = state.residency
        self._batches = PrefillBatches(
            state.limits.computed, ids, kept.cut_tokens, kept.begin_snapshot
        )
        self._times = ChunkTimes(state.limits.computed.chunk_buckets[-1])
        self.waits = SharedWaits(state.residency, self._queued, self._times, counters)
        self._keys: dict[int, int] = {}  # keys in `waits`, by the group's key
        self._steps_waited = 0  # decode steps since the last chunk, with a prompt queued

    def beside(self) -> tuple[int, ...]:
        """Returns the sizes of the chunks that may run together with a decode step. Empty if
        `grid_tokens` is set, because then a KV block must always be computed by the same
        programs."""
        on_grid = self._state.residency.on and not self._state.residency.keeps_answers
        return () if on_grid else self._batches.beside(self._state.limits.mixed_buckets)

    @property
    def gathering(self) -> bool:
        """Whether the queued prompts wait until prompts of other dp ranks arrive (`gather_steps`).
        They wait only while each rank decodes a sequence, because each rank then has work in the
        meantime."""
        steps = self._state.limits.gather_steps
        return self._steps_waited < steps and self._batches.gathers() and all(self._state.running)

    def __bool__(self) -> bool:
        return bool(self._batches)

    def add(self, group: SequenceGroup) -> int:
        known, cached = group.known_tokens, group.cached_tokens
        self._batches.add(self._state.prefill_job(group))
        group.request = group.request.without_pixels()  # only the job needs the pixels
        self.backlog.add(group.key, len(known), cached, group.request.priority)
        if (key := self._keys.get(group.key)) is not None:
            self.waits.began(key, group.rank)
        return len(known) - cached

    def expect(self, ticket: int, key: int) -> None:
        """The ticket later becomes the key of the request's group."""
        self._keys[ticket] = key

    def forget(self, key: int) -> None:
        self._batches.remove(key)
        self.backlog.forget(key)
        if (waits := self._keys.pop(key, None)) is not None:
            self.waits.end(waits)

    def next_chunk(self, step: int, beside: tuple[int, ...] = ()) -> PrefillChunk | None:
        """Returns the next chunk, or None if there is none. If `beside` is not empty, the chunk
        runs together with a decode step (`PrefillBatches.next_chunk`). The chunk's blocks are
        cached immediately, because commands run in order."""
        chunk = self._batches.next_chunk(step, beside=beside)
        if chunk is None:
            return None
        self._steps_waited = 0
        self._times.issued(self._now())
        kept = self._state.residency
        for row in chunk.rows if kept.on else ():
            group = self._state.groups[row.sequence]
            blocks = (row.start + len(row.tokens)) // kept.block_tokens
            if group.epoch == kept.epoch and not kept.snapshots:
                kept.keep(row.rank, group.key, group.chain[:blocks])
            if (key := self._keys.get(group.key)) is not None:
                self.waits.issued(key, blocks)
        return chunk

    def _queued(self) -> list[int]:
        return [self._batches.queued_tokens(rank) for rank in range(self._state.limits.ranks)]

    def computed(self, chunk: PrefillChunk) -> float:
        """Returns the chunk's duration in seconds, without the time of earlier commands."""
        for row in chunk.rows:
            self.backlog.computed(row.sequence, len(row.tokens))
            if row.samples and (key := self._keys.pop(row.sequence, None)) is not None:
                self.waits.end(key)
        return self._times.computed(chunk.chunk_tokens, self._now())

    def step_ended(self) -> None:
        self._steps_waited = self._steps_waited + 1 if self._batches else 0
        self._times.command_ended(self._now())

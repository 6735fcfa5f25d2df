"""Packs prompts into prefill chunks. Each data-parallel rank serves its prompts in order of
arrival. A prompt of higher priority is treated as if it had arrived earlier
(`scheduler/priorities.py`).

Prompts are split only at multiples of `cut_tokens`.

Invariants: a prompt's rows are issued in order and without gap after its cached positions; a token
is sampled only in the prompt's last row; a rank has at most one partly issued prompt of each
priority, not counting those in `held`."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from jdisagg.messages.step_commands import OfferSpec, PrefillChunk, PrefillRow, SampleSpec
from jdisagg.prompt.images import PromptImage, shift_before, within
from jdisagg.scheduler.blocks import merged_block, padded, split_blocks
from jdisagg.scheduler.executor import MeshLimits


@dataclass(slots=True)
class PrefillJob:
    """One sequence to prefill on `rank` into `pages`.

    Attributes:
        cached_tokens: Number of leading positions whose KV was in the pages before the job began.
        issued_tokens: Number of leading positions that are cached or part of issued chunks.
        offers_from: First position whose KV is sent to a decode worker, a multiple of
            `granule_tokens`; None if no KV is sent.
        prompt_logprobs: Number of log-probabilities to return for each prompt token, or None. If it
            is set, no positions are cached.
        snapshots: Positions, ascending, at which snapshots of the state are wanted.
        windows: Page table of the sequence for sliding-window layers, if these have pages of their
            own.
        arrival: Time of arrival, made earlier by the `head_start` of the priority.
    """

    sequence: int
    rank: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    samples: tuple[SampleSpec, ...]
    arrival: float
    offers_from: int | None = None
    cached_tokens: int = 0
    issued_tokens: int = 0
    state: int = 0
    prompt_logprobs: int | None = None
    snapshots: tuple[int, ...] = ()
    adapter: int = 0
    priority: int = 0
    images: tuple[PromptImage, ...] = ()
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.issued_tokens = max(self.issued_tokens, self.cached_tokens)

    @property
    def begun(self) -> bool:
        return self.issued_tokens > self.cached_tokens

    @property
    def left_tokens(self) -> int:
        return len(self.tokens) - self.issued_tokens

    def most_tokens(self, grain: int) -> int:
        """Returns the largest number of next tokens that one row may have. A row makes at most one
        snapshot, after a multiple of `grain` tokens or at its end."""
        ahead = [at - self.issued_tokens for at in self.snapshots if at > self.issued_tokens]
        ends = len(ahead) > 1 or (ahead and ahead[0] % grain)
        return ahead[0] if ends else self.left_tokens


class PrefillBatches:
    """Queues the prompts of one mesh until all their tokens are in issued chunks.

    Args:
        cut_tokens: Prompts are split between chunks only at multiples of this number of tokens;
            None allows any position.
        snapshot: Function that returns the slot for a snapshot, given rank, sequence and position.
            It returns None if no slot is free.
    """

    def __init__(
        self,
        limits: MeshLimits,
        new_id: Callable[[], int],
        cut_tokens: int | None = None,
        snapshot: Callable[[int, int, int], int | None] = lambda *_: None,
    ) -> None:
        self._limits = limits
        # if no chunk is that long, prompts are split at any position
        fits = cut_tokens is not None and cut_tokens <= limits.chunk_buckets[-1]
        self._cut_tokens = cut_tokens if fits else None
        self._new_id = new_id
        self._snapshot = snapshot
        self._queues: list[list[PrefillJob]] = [[] for _ in range(limits.ranks)]

    def __len__(self) -> int:
        return sum([len(queue) for queue in self._queues])

    def __bool__(self) -> bool:
        return any(self._queues)

    def queued_tokens(self, rank: int) -> int:
        return sum(job.left_tokens for job in self._queues[rank])

    def beside(self, sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(size for size in sizes if size >= (self._cut_tokens or 0))

    def gathers(self) -> bool:
        """Returns whether the next chunk should wait for more prompts: some dp rank has no prompt,
        and no prompt is in the middle of its chunked prefill."""
        begun = any(job.begun for queue in self._queues for job in queue)
        return not all(self._queues) and not begun

    def add(self, job: PrefillJob) -> None:
        """Queues a job in order of arrival. The job is never queued before a partly issued job of
        the same or a higher priority. It may precede a partly issued job of lower priority, which
        then continues after it."""
        queue = self._queues[job.rank]
        place = len(queue)
        while place and _precedes(job, queue[place - 1]):
            place -= 1
        queue.insert(place, job)

    def remove(self, sequence: int) -> None:
        for queue in self._queues:
            queue[:] = [job for job in queue if job.sequence != sequence]

    def next_chunk(
        self,
        step: int,
        held: Collection[int] = (),
        chunk_in_flight: bool = False,
        beside: Sequence[int] = (),
    ) -> PrefillChunk | None:
        """Returns the next chunk, or None if no chunk should be issued now. None has two reasons:
        no sequence outside `held` is queued, or a chunk is in flight and some rank would have no
        row in the next chunk. In the second case it pays to wait, because a prompt for that rank
        may arrive before the chunk in flight ends.

        Args:
            beside: Chunk sizes that can run together with a decode step, ascending; empty if the
                chunk runs alone. The chunk has at most as many tokens as the largest of these
                sizes. It is padded to one of them if this less than doubles its padded length.
        """
        if chunk_in_flight and self._leaves_ranks_idle(held):
            return None
        buckets = self._limits.chunk_buckets
        most = beside[-1] if beside else buckets[-1]
        ranks = [
            packed for rank in range(self._limits.ranks) if (packed := self._pack(rank, held, most))
        ]
        if not ranks:
            return None
        fullest = max(packed[-1].offset + len(packed[-1].tokens) for packed in ranks)
        chunk_tokens = next(bucket for bucket in buckets if bucket >= fullest)
        joint = next((size for size in beside if size >= fullest), chunk_tokens)
        chunk_tokens = joint if joint < 2 * chunk_tokens else chunk_tokens
        for packed in ranks:
            packed[-1] = self._merged(packed[-1], chunk_tokens)
        return PrefillChunk(step, chunk_tokens, tuple(row for packed in ranks for row in packed))

    def _leaves_ranks_idle(self, held: Collection[int]) -> bool:
        return not all([any([job.sequence not in held for job in queue]) for queue in self._queues])

    def _merged(self, row: PrefillRow, chunk_tokens: int) -> PrefillRow:
        limits = self._limits
        if len(row.offers) < 2:
            return row
        first = min(offer.offset for offer in row.offers)
        tokens = row.offset + len(row.tokens) - first
        block_tokens = merged_block(tokens, limits.granule_tokens)
        if block_tokens is None:
            return row
        fewer = len(row.offers) - len(limits.bands(block_tokens))
        padding = block_tokens - padded(tokens, limits.granule_tokens)
        if (
            fewer <= 0
            or padding > fewer * limits.block_cost_tokens
            or first + block_tokens > chunk_tokens
        ):
            return row
        return msgspec.structs.replace(row, offers=tuple(self._bands(first, block_tokens)))

    def _pack(self, rank: int, held: Collection[int], largest: int) -> list[PrefillRow]:
        limits = self._limits
        queue = [job for job in self._queues[rank] if job.sequence not in held]
        picked: list[tuple[PrefillJob, int]] = []
        used = samples = continuing = 0
        capacity = min(limits.pack_tokens or largest, largest)
        while queue and len(picked) < limits.rows_per_chunk and (not picked or used < capacity):
            job = queue[0]
            if picked and (
                job.begun  # a chunk continues one prompt at most
                or (job.cached_tokens and continuing == limits.continuing_rows)
            ):
                break
            tokens = self._part(job, capacity - used if picked else largest)
            if picked and not tokens:
                break
            if picked and tokens < job.left_tokens and capacity < largest:
                break  # shared chunks have whole prompts only; this prompt gets its own chunk
            if tokens == job.left_tokens:
                if samples + len(job.samples) > limits.samples_per_chunk:
                    break
                samples += len(job.samples)
                queue.pop(0)
                self._queues[rank].remove(job)
            else:
                queue = []  # the chunk is full
            picked.append((job, tokens))
            continuing += job.issued_tokens > 0
            used += padded(tokens, limits.granule_tokens)
        return self._rows(picked)

    def _part(self, job: PrefillJob, room_tokens: int) -> int:
        if job.snapshots and (most := job.most_tokens(self._limits.state_grain)) <= room_tokens:
            return most
        if job.left_tokens <= room_tokens or not self._cut_tokens:
            return min(job.left_tokens, room_tokens)
        end = (job.issued_tokens + room_tokens) // self._cut_tokens * self._cut_tokens
        return max(0, end - job.issued_tokens)

    def _rows(self, picked: list[tuple[PrefillJob, int]]) -> list[PrefillRow]:
        rows: list[PrefillRow] = []
        offset = 0
        for job, tokens in sorted(picked, key=lambda one: one[0].issued_tokens == 0):
            rows.append(self._row(job, offset, tokens))
            offset += padded(tokens, self._limits.granule_tokens)
        return rows

    def _row(self, job: PrefillJob, offset: int, tokens: int) -> PrefillRow:
        start = job.issued_tokens
        job.issued_tokens += tokens
        columns = -(-job.issued_tokens // self._limits.page_size)
        row = PrefillRow(
            sequence=job.sequence,
            rank=job.rank,
            offset=offset,
            tokens=job.tokens[start : job.issued_tokens],
            start=start,
            pages=job.pages[:columns],
            windows=job.windows[:columns],
            samples=job.samples if not job.left_tokens else (),
            offers=tuple(self._offers(offset, tokens, start, job.offers_from)),
            state=job.state,
            adapter=job.adapter,
            images=within(job.images, start, job.issued_tokens),
            shift=shift_before(start, job.images, self._limits.images),
        )
        for at in job.snapshots:
            slot = None
            if start < at <= job.issued_tokens:
                slot = self._snapshot(job.rank, job.sequence, at)
            if slot is not None:
                row = msgspec.structs.replace(row, snapshot=slot, snapshot_at=at)
        if job.prompt_logprobs is None:
            return row
        following = job.tokens[job.issued_tokens] if job.left_tokens else -1
        return msgspec.structs.replace(
            row, prompt_logprobs=job.prompt_logprobs, following=following
        )

    def _offers(
        self, offset: int, tokens: int, start: int, offers_from: int | None
    ) -> list[OfferSpec]:
        skipped = tokens if offers_from is None else min(tokens, max(0, offers_from - start))
        blocks = split_blocks(
            tokens - skipped, self._limits.granule_tokens, self._limits.whole_blocks
        )
        offers = [
            offer
            for at, block_tokens, _ in blocks
            for offer in self._bands(offset + skipped + at, block_tokens)
        ]
        # in the order in which they are computed
        return sorted(offers, key=lambda offer: offer.group + offer.groups)

    def _bands(self, offset: int, block_tokens: int) -> list[OfferSpec]:
        bands = self._limits.bands(block_tokens)
        return [
            OfferSpec(self._new_id(), band.start, offset, block_tokens, len(band)) for band in bands
        ]


def _precedes(job: PrefillJob, other: PrefillJob) -> bool:
    return job.arrival < other.arrival and (not other.begun or job.priority > other.priority)

"""Packs prompts into prefill chunks. Each data-parallel rank serves its prompts in order of
arrival. A prompt of higher priority is treated as if it had arrived earlier
(`scheduler/sequences.py`).

Prompts are split only at multiples of `cut_tokens`.

Invariants: a prompt's rows are issued in order and without gap after its cached positions; a token
is sampled only in the prompt's last row; a rank has at most one partly issued prompt of each
priority, not counting those in `held`."""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

import msgspec

from jdisagg.messages.step_commands import OfferSpec, PrefillChunk, PrefillRow
from jdisagg.prompt.images import shift_before, within
from jdisagg.scheduler.blocks import merged_block, padded, split_blocks
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.sequences import Prompt


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
        self.queues: list[list[Prompt]] = [[] for _ in range(limits.ranks)]

    def __iter__(self) -> Iterator[Prompt]:
        return itertools.chain.from_iterable(self.queues)

    def queued_tokens(self, rank: int) -> int:
        return sum(prompt.left_tokens for prompt in self.queues[rank])

    def beside(self, sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(size for size in sizes if size >= (self._cut_tokens or 0))

    def add(self, prompt: Prompt) -> None:
        """Queues a prompt in order of arrival. It is never queued before a partly issued prompt of
        the same or a higher priority. It may precede a partly issued prompt of lower priority,
        which then continues after it."""
        prompt.issued_tokens = prompt.cached_tokens
        queue = self.queues[prompt.rank]
        place = len(queue)
        while place and _precedes(prompt, queue[place - 1]):
            place -= 1
        queue.insert(place, prompt)

    def remove(self, prompt: Prompt) -> None:
        """Idempotent."""
        for queue in self.queues:
            if prompt in queue:
                queue.remove(prompt)

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
        return not all([any([prompt.key not in held for prompt in queue]) for queue in self.queues])

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
        queue = [prompt for prompt in self.queues[rank] if prompt.key not in held]
        picked: list[tuple[Prompt, int]] = []
        used = samples = continuing = 0
        capacity = min(limits.pack_tokens or largest, largest)
        while queue and len(picked) < limits.rows_per_chunk and (not picked or used < capacity):
            prompt = queue[0]
            if picked and (
                prompt.begun  # a chunk continues one prompt at most
                or (prompt.cached_tokens and continuing == limits.continuing_rows)
            ):
                break
            tokens = self._part(prompt, capacity - used if picked else largest)
            if picked and not tokens:
                break
            if picked and tokens < prompt.left_tokens and capacity < largest:
                break  # shared chunks have whole prompts only; this prompt gets its own chunk
            if tokens == prompt.left_tokens:
                if samples + len(prompt.samples) > limits.samples_per_chunk:
                    break
                samples += len(prompt.samples)
                queue.pop(0)
                self.queues[rank].remove(prompt)
            else:
                queue = []  # the chunk is full
            picked.append((prompt, tokens))
            continuing += prompt.issued_tokens > 0
            used += padded(tokens, limits.granule_tokens)
        return self._rows(picked)

    def _part(self, prompt: Prompt, room_tokens: int) -> int:
        if (
            prompt.snapshots
            and (most := prompt.most_tokens(self._limits.state_grain)) <= room_tokens
        ):
            return most
        if prompt.left_tokens <= room_tokens or not self._cut_tokens:
            return min(prompt.left_tokens, room_tokens)
        end = (prompt.issued_tokens + room_tokens) // self._cut_tokens * self._cut_tokens
        return max(0, end - prompt.issued_tokens)

    def _rows(self, picked: list[tuple[Prompt, int]]) -> list[PrefillRow]:
        rows: list[PrefillRow] = []
        offset = 0
        for prompt, tokens in sorted(picked, key=lambda one: one[0].issued_tokens == 0):
            rows.append(self._row(prompt, offset, tokens))
            offset += padded(tokens, self._limits.granule_tokens)
        return rows

    def _row(self, prompt: Prompt, offset: int, tokens: int) -> PrefillRow:
        start = prompt.issued_tokens
        prompt.issued_tokens += tokens
        columns = -(-prompt.issued_tokens // self._limits.page_size)
        row = PrefillRow(
            sequence=prompt.key,
            rank=prompt.rank,
            offset=offset,
            tokens=prompt.token_ids[start : prompt.issued_tokens],
            start=start,
            pages=prompt.pages[:columns],
            windows=prompt.windows[:columns],
            samples=prompt.samples if not prompt.left_tokens else (),
            offers=tuple(self._offers(offset, tokens, start, prompt.offers_from)),
            state=prompt.state,
            adapter=prompt.adapter,
            images=within(prompt.images, start, prompt.issued_tokens),
            shift=shift_before(start, prompt.images, self._limits.images),
        )
        for at in prompt.snapshots:
            slot = None
            if start < at <= prompt.issued_tokens:
                slot = self._snapshot(prompt.rank, prompt.key, at)
            if slot is not None:
                row = msgspec.structs.replace(row, snapshot=slot, snapshot_at=at)
        if prompt.prompt_logprobs is None:
            return row
        following = prompt.token_ids[prompt.issued_tokens] if prompt.left_tokens else -1
        return msgspec.structs.replace(
            row, prompt_logprobs=prompt.prompt_logprobs, following=following
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


class Begun(Protocol):
    @property
    def begun(self) -> bool:
        """Whether some of the prompt's tokens are in issued chunks."""
        ...


def gathers(queues: Sequence[Collection[Begun]]) -> bool:
    """Returns whether the next chunk should wait for more prompts: some dp rank has no prompt, and
    no prompt is in the middle of its chunked prefill. `queues`: the prompts of each dp rank."""
    return not all(queues) and not any(prompt.begun for queue in queues for prompt in queue)


def _precedes(prompt: Prompt, other: Prompt) -> bool:
    return prompt.order < other.order and (not other.begun or prompt.priority > other.priority)

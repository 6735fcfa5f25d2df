"""Packs the sequences that the research API computes into prefill chunks, and collects the results
of each sequence.

Several short prompts share a chunk. A prompt that is longer than a chunk, or that continues cached
KV, does not share its chunks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jdisagg.dispatch.ids import random_id
from jdisagg.engine.research.kv_blocks import KVBlock
from jdisagg.engine.research.kv_cache import NextToken
from jdisagg.errors import BrokenModelError
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.messages.step_commands import (
    BROKEN_TOKEN,
    OfferSpec,
    PrefillResult,
    PrefillRow,
    SampledToken,
    SampleSpec,
)
from jdisagg.prompt.logprobs import PromptLogprobs
from jdisagg.scheduler.blocks import padded, split_blocks
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.page_ledger import PageLedger, pages_for
from jdisagg.transfer.channel import NO_STAMP, BlockStamp, Channel, Offered, Pull, PullTarget


class KeepingChannel:
    """Wraps a `Channel`. Blocks that this instance offers are stored until `take` is called,
    instead of being served to peers. All other calls are passed to the wrapped channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._kept: dict[int, jax.Array] = {}

    def take(self, offer_id: int) -> jax.Array:
        return self._kept.pop(offer_id)

    def forget(self) -> None:
        self._kept.clear()

    def connect(self, peer: str, card: MeshCard) -> None:
        self._channel.connect(peer, card)

    def disconnect(self, peer: str) -> None:
        self._channel.disconnect(peer)

    def offer(
        self, offer_id: int, block: jax.Array, rank: int, stamp: BlockStamp = NO_STAMP
    ) -> None:
        self._kept[offer_id] = block

    def pull(self, offer_id: int, target: PullTarget, deadline_seconds: float) -> Pull:
        return self._channel.pull(offer_id, target, deadline_seconds)

    def release(self, offer_id: int) -> None:
        self._kept.pop(offer_id, None)

    def revoke(self, offer_id: int, reason: str) -> None:
        self._kept.pop(offer_id, None)

    def offered(self) -> Offered:
        return Offered(len(self._kept), sum(block.nbytes for block in self._kept.values()))

    def bytes_per_pair(self) -> dict[tuple[int, int], int]:
        return self._channel.bytes_per_pair()


@dataclass(slots=True)
class Run:
    """One sequence to compute. Tokens before index `start` have KV in the sequence's pages, and
    tokens from `start` on are computed. The fields from `sampled` on are results.

    Attributes:
        rank: dp rank that computes the sequence. Empty if no next token is needed.
        top: Number of most likely tokens to store in `scores` at each position after `start`. None
            for no scores.
    """

    tokens: tuple[int, ...]
    start: int
    rank: int
    owner: int
    samples: tuple[SampleSpec, ...] = ()
    emits: bool = False
    top: int | None = None
    sampled: SampledToken | None = None
    blocks: list[KVBlock] = field(default_factory=list)
    scores: list[PromptLogprobs] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)

    def next_token(self) -> NextToken:
        """Raises BrokenModelError if the logits were not finite."""
        assert self.sampled is not None, "this run sampled nothing"
        sampling = self.samples[0].sampling
        return NextToken(whole_token(self.sampled.token), sampling, self.sampled.logprobs)


@dataclass(frozen=True, slots=True)
class RunPart:
    """The tokens [start, stop) of a run, as part of one chunk. They begin at index `offset` of the
    chunk."""

    run: Run
    start: int
    stop: int
    offset: int

    def row(self, limits: MeshLimits, ledger: PageLedger) -> PrefillRow:
        run, ends = self.run, self.stop == len(self.run.tokens)
        cuts = split_blocks(self.stop - self.start, limits.granule_tokens) if run.emits else ()
        return PrefillRow(
            run.owner,
            run.rank,
            self.offset,
            run.tokens[self.start : self.stop],
            self.start,
            ledger.pages(run.owner)[: pages_for(self.stop, limits.page_size)],
            run.samples if ends else (),
            tuple(
                OfferSpec(random_id(), layer, self.offset + at, size)
                for at, size, _ in cuts
                for layer in range(limits.layer_groups)
            ),
            prompt_logprobs=run.top,
            following=-1 if ends else run.tokens[self.stop],
        )

    def take(self, row: PrefillRow, result: PrefillResult, kept: KeepingChannel) -> None:
        for offer in row.offers:
            at = offer.offset - self.offset
            valid = min(offer.block_tokens, len(row.tokens) - at)
            block = kept.take(offer.offer_id)
            self.run.blocks.append(KVBlock(offer.group, self.start + at, valid, block))
        ours = [sample for sample in result.samples if sample.sequence == row.sequence]
        self.run.sampled = ours[0] if ours else self.run.sampled
        self.run.scores += [scores for owner, scores in result.prompts if owner == row.sequence]


def chunks(runs: Sequence[Run], limits: MeshLimits) -> Iterator[list[RunPart]]:
    largest = limits.chunk_buckets[-1]
    open_chunk: list[RunPart] = []
    used = [0] * limits.ranks
    for run in runs:
        length = len(run.tokens) - run.start
        if run.start or length > largest:
            for start in range(run.start, len(run.tokens), largest):
                yield [RunPart(run, start, min(start + largest, len(run.tokens)), 0)]
            continue
        rows = sum(part.run.rank == run.rank for part in open_chunk)
        most = min(limits.rows_per_chunk, limits.samples_per_chunk)
        if used[run.rank] + length > largest or rows == most:
            yield open_chunk
            open_chunk, used = [], [0] * limits.ranks
        open_chunk.append(RunPart(run, 0, length, used[run.rank]))
        used[run.rank] += padded(length, limits.granule_tokens)
    if open_chunk:
        yield open_chunk


def whole_token(token: int) -> int:
    """Returns `token` unchanged. Raises BrokenModelError if it is the value that stands for logits
    that are not finite."""
    if token == BROKEN_TOKEN:
        raise BrokenModelError()
    return token

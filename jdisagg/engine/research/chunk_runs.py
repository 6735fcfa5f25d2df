"""What the research face asks of prefill programs: sequences of which some tokens are to be
computed, packed into chunks, and what comes back.

A prompt that fits into a chunk shares it with others; a longer one, or one that goes on behind KV
that lies in its pages, has its chunks to itself. Pure but for the blocks that it hands on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from jdisagg.engine.research.keeping_channel import KeepingChannel
from jdisagg.engine.research.kv_blocks import KVBlock
from jdisagg.engine.research.kv_cache import NextToken
from jdisagg.errors import BrokenModelError
from jdisagg.ids import random_id
from jdisagg.messages.step_commands import (
    BROKEN_TOKEN,
    OfferSpec,
    PrefillResult,
    PrefillRow,
    SampledToken,
    SampleSpec,
)
from jdisagg.prompt_logprobs import PromptLogprobs
from jdisagg.scheduler.blocks import padded, split_blocks
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.page_ledger import PageLedger, pages_for


@dataclass(slots=True)
class Run:
    """A sequence of which the tokens from `start` on are computed; those before lie in the owner's
    pages. `samples`: how the next token is chosen; () for none. `emits`: its KV comes back.
    `top`: log-probabilities of the tokens behind `start` are wanted, each with so many of the most
    likely ones; None: they are not.

    The rest is what came back."""

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
        """Raises BrokenModelError where the logits were not finite."""
        assert self.sampled is not None, "this run sampled nothing"
        sampling = self.samples[0].sampling
        return NextToken(whole_token(self.sampled.token), sampling, self.sampled.logprobs)


@dataclass(frozen=True, slots=True)
class RunPart:
    """A run's tokens [start, stop), at `offset` of a chunk of its rank."""

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
        """What the part's row gave goes to its run."""
        for offer in row.offers:
            at = offer.offset - self.offset
            valid = min(offer.block_tokens, len(row.tokens) - at)
            block = kept.take(offer.offer_id)
            self.run.blocks.append(KVBlock(offer.group, self.start + at, valid, block))
        ours = [sample for sample in result.samples if sample.sequence == row.sequence]
        self.run.sampled = ours[0] if ours else self.run.sampled
        self.run.scores += [scores for owner, scores in result.prompts if owner == row.sequence]


def chunks(runs: Sequence[Run], limits: MeshLimits) -> Iterator[list[RunPart]]:
    """The chunks that compute the runs, in their order; a chunk has room for each rank."""
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
    """A token that was chosen from finite logits. Raises BrokenModelError for another."""
    if token == BROKEN_TOKEN:
        raise BrokenModelError()
    return token

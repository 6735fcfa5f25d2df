"""The state of one prompt at a prefill worker, from the call until the decode worker has fetched
all KV."""

import asyncio

from jdisagg.errors import JdisaggError
from jdisagg.messages.ports import FirstToken, HandoffEnd, Offer, PrefillCall, PrefillReply
from jdisagg.messages.step_commands import PrefillRow
from jdisagg.prompt.logprobs import PromptLogprobs
from jdisagg.request import CachedTokens
from jdisagg.scheduler.prefill_admission import QueuedPrompt
from jdisagg.scheduler.prefill_batches import PrefillJob
from jdisagg.scheduler.residency import Chain
from jdisagg.scheduler.sequences import sample_spec, wanted_of_prompt
from jdisagg.worker.kv_sources import RestoredBlocks
from jdisagg.worker.outgoing_kv import OutgoingHandoff


class PrefillTask:
    """One prompt at a prefill worker.

    Attributes:
        chain: Names (hashes) of the prompt's full blocks.
        useful: Names of the prompt's blocks that need not be computed if they are cached. Excludes
            the block of the last token.
        known: For each rank, the number of leading blocks of `useful` that were in pages at the
            last look-up.
        rank: Data-parallel rank of the prompt's pages, or -1 if it has no pages.
        cached_tokens: Number of positions that were cached when the prompt got pages.
        epoch: Epoch of the prefix cache when the prompt got pages. Each clear of the cache starts a
            new epoch.
        most_reused: Largest number of cached positions that the worker can use.
    """

    def __init__(
        self,
        prompt: QueuedPrompt,
        call: PrefillCall,
        chain: Chain,
        restored: RestoredBlocks,
        until: float,
        now: float,
    ) -> None:
        self.prompt = prompt
        self.call = call
        self.chain = chain
        self.useful: Chain = ()
        self.most_reused = prompt.tokens
        self.known: tuple[int, ...] = ()
        self.restored = restored
        self.cached_tokens = self.epoch = 0
        self.extracting: set[int] = set()
        self.firsts: tuple[FirstToken, ...] | None = None
        self.restoring: asyncio.Task[None] | None = None
        self.prompt_logprobs: list[PromptLogprobs] = []  # of prompt parts so far
        self.handoff = OutgoingHandoff(
            call.handoff_id, call.attempt, prompt.key, until, call.destination
        )
        self.queued_at = now
        self.started_at: float | None = None
        self.rank = -1
        self.reply: asyncio.Future[PrefillReply] = asyncio.get_running_loop().create_future()

    @property
    def begun(self) -> bool:
        return self.started_at is not None

    @property
    def of_prompt(self) -> int | None:
        return wanted_of_prompt(self.call.request, self.call.children[0].accepted)

    @property
    def most_known(self) -> int:
        """Number of leading positions that need not be computed if they are cached. These are all
        but the last position, and at most `most_reused`. The number is 0 if log-probabilities of
        prompt tokens are requested."""
        return min(self.prompt.tokens - 1, self.most_reused) if self.of_prompt is None else 0

    @property
    def cached(self) -> CachedTokens:
        """Number of the request's prompt tokens that were cached, by origin. Tokens that an earlier
        attempt generated are left out."""
        known = min(self.cached_tokens, len(self.call.request.prompt_token_ids))
        return self.restored.split(self.rank, known)

    @property
    def scores(self) -> PromptLogprobs | None:
        return PromptLogprobs.joined(self.prompt_logprobs) if self.prompt_logprobs else None

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.call.request.prompt_token_ids + self.call.children[0].accepted

    def job(
        self,
        pages: tuple[int, ...],
        state: int,
        snapshots: tuple[int, ...],
        adapter: int,
        windows: tuple[int, ...] = (),
    ) -> PrefillJob:
        request, children = self.call.request, self.call.children
        return PrefillJob(
            sequence=self.prompt.key,
            rank=self.rank,
            tokens=self.tokens,
            pages=pages,
            samples=tuple([sample_spec(request, one.index, one.accepted) for one in children]),
            arrival=self.prompt.arrival,
            offers_from=self.call.from_token,
            cached_tokens=self.cached_tokens,
            state=state,
            prompt_logprobs=self.of_prompt,
            snapshots=snapshots,
            adapter=adapter,
            priority=self.prompt.priority,
            images=request.scoped_images,
            windows=windows,
        )

    def end(self, offers: int) -> HandoffEnd:
        assert self.firsts is not None
        scores = self.scores
        return HandoffEnd(offers, self.prompt.tokens, self.firsts, prompt_logprobs=scores)

    def fail(self, error: JdisaggError) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)
            self.reply.exception()


def offers_of_row(row: PrefillRow) -> list[Offer]:
    return [
        Offer(
            offer_id=spec.offer_id,
            group=spec.group,
            groups=spec.groups,
            start=row.start + spec.offset - row.offset,
            valid_tokens=min(spec.block_tokens, len(row.tokens) - spec.offset + row.offset),
            block_tokens=spec.block_tokens,
            rank=row.rank,
        )
        for spec in row.offers
    ]

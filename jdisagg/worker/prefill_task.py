"""The state of one prompt at a prefill worker, from the call until its KV is fetched."""

import asyncio

from jdisagg.errors import JdisaggError
from jdisagg.messages.ports import FirstToken, HandoffEnd, PrefillCall, PrefillReply
from jdisagg.prompt_logprobs import PromptLogprobs
from jdisagg.request import CachedTokens
from jdisagg.scheduler.prefill_admission import QueuedPrompt
from jdisagg.scheduler.prefill_batches import PrefillJob
from jdisagg.scheduler.residency import Chain
from jdisagg.scheduler.sequences import sample_spec, wanted_of_prompt
from jdisagg.worker.kv_sources import RestoredBlocks
from jdisagg.worker.outgoing_kv import OutgoingHandoff


class PrefillTask:
    """One prompt.

    Attributes:
        chain: Names of the prompt's full blocks.
        useful: Names of the blocks that need no computing if cached.
        known: By rank, number of leading useful blocks in pages, at the last look-up.
        restored: Origins of the blocks that were restored for this prompt.
        restoring: Restore that the prompt waits for, or None.
        rank: Rank of its pages, or -1 without pages.
        cached_tokens: Number of positions that were cached when the prompt got pages.
        epoch: Epoch of the prefix cache at that time.
        extracting: Offers that are not extracted from pages yet.
        firsts: Sampled tokens, one for each sample.
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
        self.known: tuple[int, ...] = ()
        self.restored = restored
        self.cached_tokens = self.epoch = 0
        self.extracting: set[int] = set()
        self.firsts: tuple[FirstToken, ...] | None = None
        self.restoring: asyncio.Task[None] | None = None
        self.prompt_logprobs: list[PromptLogprobs] = []  # of the parts computed so far
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
        """Number of positions that need no computing if cached: all but the last, or 0 if
        log-probabilities of prompt tokens are requested."""
        return self.prompt.tokens - 1 if self.of_prompt is None else 0

    @property
    def cached(self) -> CachedTokens:
        """Counts the prompt's cached tokens by origin, without accepted tokens after it."""
        known = min(self.cached_tokens, len(self.call.request.prompt_token_ids))
        return self.restored.split(self.rank, known)

    @property
    def scores(self) -> PromptLogprobs | None:
        """Log-probabilities of the prompt tokens, if requested."""
        return PromptLogprobs.joined(self.prompt_logprobs) if self.prompt_logprobs else None

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.call.request.prompt_token_ids + self.call.children[0].accepted

    def job(self, pages: tuple[int, ...], state: int) -> PrefillJob:
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
        )

    def end(self, offers: int) -> HandoffEnd:
        """Returns the last message of the hand-off."""
        assert self.firsts is not None
        scores = self.scores
        return HandoffEnd(offers, self.prompt.tokens, self.firsts, prompt_logprobs=scores)

    def fail(self, error: JdisaggError) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)
            self.reply.exception()

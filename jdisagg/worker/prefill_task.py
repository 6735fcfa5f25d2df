"""The state of one prompt at a prefill worker, from the call until the decode worker has fetched
all KV."""

import asyncio
from dataclasses import dataclass

from jdisagg.errors import JdisaggError
from jdisagg.messages.ports import FirstToken, HandoffEnd, Offer, PrefillCall, PrefillReply
from jdisagg.messages.step_commands import PrefillRow, SampleSpec
from jdisagg.request import CachedTokens
from jdisagg.scheduler.prompt import Prompt
from jdisagg.scheduler.sequences import sample_spec
from jdisagg.worker.kv_sources import RestoredBlocks
from jdisagg.worker.outgoing_kv import OutgoingHandoff


@dataclass(slots=True, eq=False)
class PrefillTask:
    """One prompt at a prefill worker.

    Attributes:
        extracting: Number of cached blocks that are being extracted.
    """

    prompt: Prompt
    call: PrefillCall
    handoff: OutgoingHandoff
    restored: RestoredBlocks
    queued_at: float
    reply: "asyncio.Future[PrefillReply]"
    started_at: float | None = None
    restoring: "asyncio.Task[None] | None" = None
    extracting: int = 0
    firsts: tuple[FirstToken, ...] | None = None

    @property
    def cached(self) -> CachedTokens:
        """Number of the request's prompt tokens that were cached, by origin. Tokens that an earlier
        attempt generated are left out."""
        known = min(self.prompt.cached_tokens, len(self.call.request.prompt_token_ids))
        return self.restored.split(self.prompt.rank, known)

    @property
    def samples(self) -> tuple[SampleSpec, ...]:
        request, children = self.call.request, self.call.children
        return tuple([sample_spec(request, one.index, one.accepted) for one in children])

    def end(self, offers: int) -> HandoffEnd:
        assert self.firsts is not None
        scores = self.prompt.all_scores
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

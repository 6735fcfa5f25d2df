"""The prompts at a worker, each from its call until nothing of it is left, and the streams of new
tokens of those that are decoded here.

The queue of a stream is bounded by the requested number of tokens, so a slow reader delays no other
work. The stream ends when every child has ended, or with an error. `next` has no timeout, because a
timeout for each token would be expensive. It cannot wait forever, because the worker periodically
ends expired groups."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jdisagg.clock import Mailbox
from jdisagg.errors import (
    BrokenModelError,
    DeadlineExceededError,
    HandoffError,
    InvalidRequestError,
    JdisaggError,
)
from jdisagg.messages.ports import (
    FirstToken,
    HandoffSource,
    PrefillCall,
    PrefillReply,
    ReserveCall,
    SourceLost,
    Span,
    SpanEnd,
)
from jdisagg.messages.step_commands import STUCK_TOKEN
from jdisagg.prompt.logprobs import PromptLogprobs
from jdisagg.request import FinishReason, Identity, Request
from jdisagg.scheduler.handoff import HandoffState
from jdisagg.scheduler.sequences import ChildProgress, Prompt, SequenceGroup
from jdisagg.worker.kv_sources import RestoredBlocks, RestoreQuery
from jdisagg.worker.outgoing_kv import OutgoingHandoff

_OVERDUE = {
    HandoffState.RESERVED: "its lease passed before generate took it over",
    HandoffState.ORPHANED: "its source failed, and its lease passed before another came",
}
_ENDS = {FinishReason.STOP: SpanEnd.STOP, FinishReason.LENGTH: SpanEnd.LENGTH}


class SpanStream:
    """Queue of spans (runs of new tokens of one child) for the caller of `generate`. `taken`:
    whether this caller has connected. It must connect by `lease_until`."""

    def __init__(self, group: SequenceGroup, weights: str = "") -> None:
        self.attempt = group.attempt
        self.weights = weights
        self.lease_until = group.handoff.deadline
        self.taken = False
        self.moves = 0
        self.begun = asyncio.Event()
        self.kv_bytes_moved = 0
        self.exposed_seconds = 0.0
        self.prompt_logprobs: PromptLogprobs | None = None
        self._open = {child.child for child in group.children}
        self._spans: Mailbox[Span | JdisaggError | None] = Mailbox()

    def put(self, progress: ChildProgress) -> None:
        if progress.child not in self._open:
            return
        end = _end_of(progress)
        if progress.token_ids or end:
            span = Span(
                child=progress.child,
                first_index=progress.first_index,
                token_ids=progress.token_ids,
                logprobs=progress.logprobs,
                end=end,
                kv_bytes_moved=self.kv_bytes_moved,
                exposed_transfer_seconds=self.exposed_seconds,
                prompt_logprobs=self.prompt_logprobs,
                yielded=progress.yielded,
                weights=self.weights,
            )
            self._spans.put_nowait(span)
            self.prompt_logprobs = None
            self.kv_bytes_moved, self.exposed_seconds = 0, 0.0
        if end or progress.finish:
            self._open.discard(progress.child)
            if not self._open:
                self._spans.put_nowait(None)

    def announce(self, lost: SourceLost | None = None, moving: HandoffSource | None = None) -> None:
        self._spans.put_nowait(Span(-1, 0, (), lost=lost, moving=moving))

    def fail(self, error: JdisaggError) -> None:
        self._open.clear()
        self._spans.put_nowait(error)

    async def next(self) -> Span | None:
        """Returns None at the end of the stream. Raises the error that ended the stream."""
        item = await self._spans.get()
        if isinstance(item, JdisaggError):
            raise item
        return item


@dataclass(slots=True, eq=False)
class PromptTask:
    """One prompt at a worker.

    Attributes:
        restored: The sources from which its cached blocks were restored.
        answer: What its call waits for: its first tokens if its KV is sent, otherwise its pages.
        handoff: The hand-off of its KV; None if it is decoded here.
        stream: The new tokens of its sequences; None as long as it has no pages to decode in.
        extracting: Number of its cached blocks that are being extracted.
    """

    prompt: Prompt
    call: PrefillCall | ReserveCall
    restored: RestoredBlocks
    queued_at: float
    answer: "asyncio.Future[PrefillReply | SequenceGroup]"
    handoff: OutgoingHandoff | None = None
    stream: SpanStream | None = None
    started_at: float | None = None
    restoring: "asyncio.Task[None] | None" = None
    extracting: int = 0
    firsts: tuple[FirstToken, ...] | None = None

    @classmethod
    def of(
        cls,
        call: PrefillCall | ReserveCall,
        key: int,
        now: float,
        arrival: float,
        block_tokens: int,
        computes: bool,
        appends: bool,
        continues: bool,
    ) -> "PromptTask":
        """
        Args:
            computes: Whether the mesh computes every prompt.
            appends: Whether the mesh computes what the router leaves to it.
            continues: Whether sequences that gave way may go on with a decode step.
        """
        request, children, attempt = call.request, call.children, call.attempt
        handoff = since = None
        if isinstance(call, PrefillCall):
            until, to = now + call.deadline_seconds, call.destination
            handoff = OutgoingHandoff(call.handoff_id, attempt, key, until, to)
            prompt = Prompt(key, request, children, arrival, attempt, decodes=False, destination=to)
            prompt.offers_from = call.from_token if to else None
        else:
            if call.aside_seconds is not None:
                since = arrival + max(0.0, call.age_seconds - call.aside_seconds)
            asked = computes or call.computes
            computes = computes or (call.computes and appends)
            prompt = Prompt(key, request, children, arrival, attempt, computes, asked, since=since)
            prompt.continues = continues and asked and bool(children[0].accepted)
        answer = asyncio.get_running_loop().create_future()
        return cls(prompt, call, RestoredBlocks(block_tokens), now, answer, handoff)

    @property
    def query(self) -> RestoreQuery:
        """Asks the sources of KV for the blocks of the prompt that are not in pages."""
        prompt, call = self.prompt, self.call
        hinted = min(call.peer_tokens, prompt.most_known)
        return RestoreQuery(prompt.useful, prompt.known, 0, call.peer, hinted, tail=prompt.tail)

    def query_of(self, group: SequenceGroup, ranks: int, block_tokens: int) -> RestoreQuery:
        """Returns the query for the pages of its sequences."""
        known = [0] * ranks
        known[group.rank] = group.cached_tokens // block_tokens
        # a prefill worker would have to compute the accepted tokens before it sends their KV
        computes = self.prompt.computes or self.prompt.children[0].accepted
        instead = "compute" if computes else "receive"
        return replace(self.query, known=tuple(known), only=group.rank, instead=instead)

    def reply(self, firsts: tuple[FirstToken, ...], now: float) -> PrefillReply:
        prompt, started = self.prompt, self.started_at
        assert started is not None, "its rows were planned"
        # tokens that an earlier attempt generated are left out
        known = min(prompt.cached_tokens, len(prompt.request.prompt_token_ids))
        cached = self.restored.split(prompt.rank, known)
        waited, took = started - self.queued_at, now - started
        return PrefillReply(firsts, waited, took, cached, prompt.all_scores)

    def fail(self, error: JdisaggError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()


class PromptTasks(dict[int, PromptTask]):
    """The prompts at a worker by key.

    Attributes:
        seeking: Prompts that wait for blocks of another prompt or for a restore.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seeking: dict[int, Prompt] = {}
        self._of_request: dict[Identity, dict[int, PromptTask]] = {}

    def add(self, task: PromptTask) -> None:
        key = task.prompt.key
        self[key] = self._of_request.setdefault(task.prompt.request.identity, {})[key] = task

    def superseded(
        self, call: PrefillCall | ReserveCall, groups: Mapping[int, SequenceGroup]
    ) -> list[PromptTask]:
        """Returns the prompts of earlier attempts that wait for pages or decode a child of `call`.

        Args:
            groups: Sequences by the keys of their prompts.
        """
        superseded: list[PromptTask] = []
        indices = {child.index for child in call.children}
        for key, task in self._of_request.get(call.request.identity, {}).items():
            children: set[int] = set()
            if (group := groups.get(key)) is not None:
                children = {child.child for child in group.alive}
            elif task.handoff is None and task.stream is None:
                children = {child.index for child in task.prompt.children}
            if task.prompt.attempt < call.attempt and indices & children:
                superseded.append(task)
        return superseded

    def end(self, key: int) -> None:
        self.seeking.pop(key, None)
        if (task := self.pop(key, None)) is not None:
            identity = task.prompt.request.identity
            del self._of_request[identity][key]
            if not self._of_request[identity]:
                del self._of_request[identity]


def _end_of(progress: ChildProgress) -> SpanEnd | None:
    if progress.preempted:
        return SpanEnd.PREEMPTED
    if progress.moved:
        return SpanEnd.MOVED
    return _ENDS.get(progress.finish) if progress.finish else None


def unchosen(request: Request, token: int) -> JdisaggError:
    """Returns the error of a sequence with this code (BROKEN_TOKEN, STUCK_TOKEN) as its token."""
    grammar = request.sampling.grammar
    if token != STUCK_TOKEN or grammar is None:
        return BrokenModelError()
    return InvalidRequestError(
        f"grammar: the {grammar.kind.value} became too complex for the text so far, or the"
        " tokens so far do not follow it; simplify it"
    )


def overdue(group: SequenceGroup) -> JdisaggError:
    """Returns the error of sequences whose lease or deadline has passed."""
    if reason := _OVERDUE.get(group.handoff.state):
        return HandoffError(f"reservation {group.key}: {reason}")
    return DeadlineExceededError(
        "the request's deadline passed while its tokens were being generated"
    )

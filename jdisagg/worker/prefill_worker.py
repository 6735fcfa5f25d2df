"""The prefill worker: computes prompts on one mesh and sends their KV to decode workers.

Admission (`scheduler/prefill_admission.py`) gives a prompt pages for all its positions. A chunk's
KV is offered to the decode worker as soon as the chunk is issued. It is kept until it is
acknowledged or the lease ends. Cached positions that the decode worker lacks are extracted from
pages after the last chunk, so that this work does not delay the first token.

Blocks are cached when the chunk that computes them is issued, because commands run in order."""

import asyncio
import functools
from collections import deque
from dataclasses import dataclass, replace

import msgspec

from jdisagg.clock import within
from jdisagg.config import InstanceConfig, LimitsConfig
from jdisagg.errors import (
    BrokenModelError,
    DeadlineExceededError,
    HandoffError,
    InvalidRequestError,
    JdisaggError,
    UnavailableError,
)
from jdisagg.messages.ports import FirstToken, HandoffEnd, Offer, PrefillCall, PrefillReply
from jdisagg.messages.step_commands import (
    PrefillChunk,
    PrefillResult,
    PrefillRow,
    SampledToken,
    StepCommand,
    StepResult,
)
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.request import CachedTokens, Request
from jdisagg.scheduler.executor import Executor
from jdisagg.scheduler.page_ledger import pages_for
from jdisagg.scheduler.prompt import Prompt
from jdisagg.scheduler.prompts import check_queue
from jdisagg.scheduler.residency import Chain
from jdisagg.scheduler.turn import Facts, Turn
from jdisagg.worker.kv_sources import RestoredBlocks
from jdisagg.worker.mesh_worker import MeshWorker, WorkerContext
from jdisagg.worker.outgoing_kv import OutgoingHandoff, offers_of_pages, snapshot_offers
from jdisagg.worker.peers import PeerResolver


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

    def end(self, offers: int) -> HandoffEnd:
        assert self.firsts is not None
        scores = self.prompt.all_scores
        return HandoffEnd(offers, self.prompt.tokens, self.firsts, prompt_logprobs=scores)

    def fail(self, error: JdisaggError) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)
            self.reply.exception()


class PrefillWorker(MeshWorker):
    """Implements `PrefillPort`."""

    def __init__(
        self,
        context: WorkerContext,
        executor: Executor,
        config: InstanceConfig,
        limits: LimitsConfig,
        peers: PeerResolver | None = None,
    ) -> None:
        super().__init__(WorkerRole.PREFILL, context, executor, config, limits, peers)
        self._room = self._state.room
        self._unsent: deque[PrefillTask] = deque()  # whose last chunk is issued
        self._tasks: dict[int, PrefillTask] = {}

    # ---- the loop

    def _facts(self, step: int | None) -> Facts:
        while self._unsent:
            self._send_cached(self._unsent.popleft())
        works = self._admission.queue or self._prompts
        offered = self._outgoing.offered_tokens() if works else {}
        in_flight = self._loop.in_flight(PrefillChunk)
        return Facts(step, chunk_in_flight=in_flight, offered_tokens=offered, at=self._clock.now())

    def _carry_out(self, turn: Turn) -> StepCommand | None:
        if turn.held_back:
            self.counters.add("chunks_held_back")
        for prompt in turn.prompts:
            restored = self._tasks[prompt.key].restored
            self._count_reuse(prompt, prompt.rank, prompt.cached_tokens, restored)
        chunk = turn.command
        return self._announce(chunk) if isinstance(chunk, PrefillChunk) else None

    def _apply(self, command: StepCommand, result: StepResult) -> None:
        assert isinstance(command, PrefillChunk) and isinstance(result, PrefillResult)
        sums = {entry.offer_id: entry for entry in result.checksums}
        for row in command.rows:
            if (task := self._tasks.get(row.sequence)) is not None:
                offers = [one.offer_id for one in row.offers]
                task.handoff.announce_checksums([sums[one] for one in offers if one in sums])
        self._apply_chunk(command, result)

    def _announce(self, chunk: PrefillChunk) -> PrefillChunk:
        for row in chunk.rows:
            task = self._tasks[row.sequence]
            if task.started_at is None:
                task.started_at = self._clock.now()
            task.handoff.announce(_offers_of_row(row))
            if row.samples:
                task.extracting = 1  # until it is known how many
                self._unsent.append(task)
        key = self._hello.checksum_key
        return msgspec.structs.replace(chunk, checksum_key=key) if key else chunk

    def _send_cached(self, task: PrefillTask) -> None:
        start, prompt, ids = task.call.from_token, task.prompt, self._context.ids
        if task.handoff.over:
            return
        offers: list[Offer] = []
        if task.call.destination:
            cached = prompt.cached_tokens
            offers += offers_of_pages(self._mesh, prompt.rank, start, cached, ids)
            offers += snapshot_offers(self._mesh, prompt.rank, prompt.tokens, ids)
        task.extracting += len(offers) - 1
        for offer in offers:
            pages = self._room.place(offer.kind, prompt.rank, prompt.key, prompt.pages)
            extracting = self._outgoing.extract(task.handoff, offer, pages)
            extracting.add_done_callback(functools.partial(self._extracted, task))
        self._end_if_done(task)

    def _extracted(self, task: PrefillTask, extracting: "asyncio.Future[StepResult]") -> None:
        error = None if extracting.cancelled() else extracting.exception()
        if error is not None:
            self._loop.break_down(error)
        task.extracting -= 1
        self._end_if_done(task)

    def _look(self) -> None:
        if self._admission.queue or self._unsent or self._prompts or self._prompts.released:
            self._loop.wake()

    # ---- prompts

    async def prefill(self, call: PrefillCall) -> PrefillReply:
        await self._compiled(call.request, call.deadline_seconds)
        async with self._adapters.held(call.request, call.deadline_seconds):
            self._check(call)
            task = self._new_task(call, self._clock.now())
            self._tasks[task.prompt.key] = task
        self._outgoing.open(task.handoff)
        self._seek(task.prompt)
        try:
            return await within(task.reply, call.deadline_seconds)
        except TimeoutError:
            error = DeadlineExceededError(
                f"worker {self.name!r} did not prefill the prompt within its"
                f" {call.deadline_seconds:g} s"
            )
            self._outgoing.end(task.handoff, error)
            raise error from None
        except asyncio.CancelledError:
            self._outgoing.end(task.handoff, HandoffError("the caller gave the prompt up"))
            raise

    async def cancel_prefill(self, handoff_id: int) -> None:
        await self.abort(handoff_id, "cancelled")

    def _check(self, call: PrefillCall) -> None:
        self._check_serving(call.request, call.children)
        if call.weights != self._hello.weights:
            raise UnavailableError(
                f"worker {self.name!r} has weights {self._hello.weights!r} and {call.destination!r}"
                f" has {call.weights!r}: they cannot hand over KV"
            )
        if call.handoff_id in self._outgoing:
            raise HandoffError(f"hand-off {call.handoff_id} exists already; give each its own id")
        self._attempts.take(call.request, call.children, call.attempt, self._clock.now())
        mesh = self._mesh
        tokens = len(call.request.prompt_token_ids) + len(call.children[0].accepted)
        if tokens > mesh.context_tokens or pages_for(tokens, mesh.page_size) > mesh.pages_per_rank:
            raise InvalidRequestError(
                f"prompt has {tokens} tokens; worker {self.name!r} holds {mesh.context_tokens} of"
                f" context and {mesh.pages_per_rank} pages of {mesh.page_size} per rank: shorten it"
            )
        if call.from_token % mesh.granule_tokens or not 0 <= call.from_token <= tokens:
            raise HandoffError(
                f"from_token={call.from_token} must be a multiple of {mesh.granule_tokens} and at"
                f" most the prompt's {tokens} tokens: do both workers run the same version?"
            )
        if len(call.children) > mesh.samples_per_chunk:
            raise InvalidRequestError(
                f"n={len(call.children)} exceeds the {mesh.samples_per_chunk} samples of one"
                " prefill; ask for fewer"
            )
        check_queue(
            self.name, self._admission.queue, call.request.priority, self._config.queue_limit
        )

    def _new_task(self, call: PrefillCall, now: float) -> PrefillTask:
        prompt = Prompt(
            self._state.new_key(),
            call.request,
            call.children,
            now - call.age_seconds,
            call.attempt,
            destination=call.destination,
            offers_from=call.from_token if call.destination else None,
        )
        until = now + call.deadline_seconds
        return PrefillTask(
            self._prompts.begin(prompt),
            call,
            OutgoingHandoff(call.handoff_id, call.attempt, prompt.key, until, call.destination),
            RestoredBlocks(self._kept.block_tokens),
            now,
            asyncio.get_running_loop().create_future(),
        )

    def _seek(self, prompt: Prompt) -> None:
        task, follows = self._tasks[prompt.key], self._prompts.follows(prompt)
        self._count_backlog(prompt, follows or prompt.known_tokens)
        if follows:
            return
        ahead = max(0, self._prompts.backlog.tokens - prompt.tokens + prompt.known_tokens)
        plan = self._sources.best(replace(self._query(prompt, task.call), ahead_tokens=ahead))
        if plan is not None:
            task.restoring = self._sources.begin(plan, task.restored, lambda: self._restored(task))
        else:
            self._admission.enqueue(task.prompt)
        self._look()

    def _count_backlog(self, prompt: Prompt, known_tokens: int) -> None:
        self._prompts.backlog.add(prompt.key, prompt.tokens, known_tokens, prompt.priority)

    def _restored(self, task: PrefillTask) -> None:
        if self._tasks.get(task.prompt.key) is task:
            self._prompts.look_up(task.prompt)
            self._count_backlog(task.prompt, task.prompt.known_tokens)
            self._admission.enqueue(task.prompt)
            self._prompts.reached(task.prompt)
            self._look()

    def _prefilled(self, key: int, firsts: list[SampledToken]) -> None:
        if (task := self._tasks.get(key)) is None:
            return
        now, started = self._clock.now(), task.started_at
        assert started is not None, "its rows were planned"
        if error := self._unsampled(task.call.request, firsts):
            if isinstance(error, BrokenModelError):
                self._forget_broken(task.prompt.rank)
            self._outgoing.end(task.handoff, error)
            return
        task.firsts = tuple([FirstToken(one.child, one.token, one.logprobs) for one in firsts])
        if not task.reply.done():
            task.reply.set_result(
                PrefillReply(
                    task.firsts,
                    started - task.queued_at,
                    now - started,
                    task.cached,
                    task.prompt.all_scores,
                )
            )
        self._end_if_done(task)

    def _end_if_done(self, task: PrefillTask) -> None:
        if task.firsts is not None and not task.extracting and not task.handoff.over:
            fresh = task.prompt.epoch == self._kept.epoch
            self._stop_computing(task, task.prompt.chain if fresh else ())
            self._prompts.forget(task.prompt.key)
            self._outgoing.finish(task.handoff, task.end)

    def _stop_computing(self, task: PrefillTask, chain: Chain = ()) -> None:
        self._admission.release(task.prompt, chain)
        self._look()

    # ---- the worker

    def _handed_over(self, handoff: OutgoingHandoff, error: JdisaggError | None) -> None:
        task = self._tasks.pop(handoff.sequence)
        if task.restoring is not None:
            task.restoring.cancel()
        self._admission.withdraw(task.prompt.key)
        self._stop_computing(task)
        if error is not None:
            task.fail(error)
        self._prompts.forget(handoff.sequence)
        self._adapters.poke()

    def _requests_running(self) -> list[Request]:
        return [task.call.request for task in self._tasks.values()]

    async def acknowledge(self, handoff_id: int, offer_ids: tuple[int, ...]) -> None:
        await super().acknowledge(handoff_id, offer_ids)
        self._look()

    def _busy(self) -> bool:
        return len(self._outgoing) > 0

    def _end_old(self, keep: bool) -> None:
        """Does nothing, because sequences have already ended with their hand-offs."""

    def _hand_on(self) -> None:
        """Does nothing, because a running prefill is not worth moving."""

    def _end_everything(self, error: UnavailableError) -> None:
        self._outgoing.end_all(error)

    def _status(self, common: WorkerStatus) -> WorkerStatus:
        return msgspec.structs.replace(
            common,
            running=len(self._prompts.placed),
            slots=self._mesh.ranks * self._mesh.rows_per_chunk,
            handoffs=len(self._outgoing),
        )


def _offers_of_row(row: PrefillRow) -> list[Offer]:
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

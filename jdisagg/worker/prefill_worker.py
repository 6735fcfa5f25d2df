"""The prefill worker: a mesh's control endpoint, `PrefillPort` and `PeerPort` in front, the packer and the step loop behind.

A prompt waits, by arrival, until some dp rank has pages for all of it; its pages serve only its own later chunks and are freed
when its tokens are sampled. Its KV leaves as offers: announced as soon as the chunk that computes them is issued, kept until
acknowledged, released at the latest when the lease ends. When too much is offered to a decode worker and not fetched, none of its prompts
goes on: a stalled decode worker holds its own prefill back instead of filling memory, and the others' when there are many such.

All state is touched on the event loop only, between awaits.
"""

import asyncio
import bisect
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from jdisagg.clock import Clock, within
from jdisagg.config import InstanceConfig, LimitsConfig
from jdisagg.dispatch.ports import FirstToken, Offer, PeerHello, PeerMessage, PrefillCall, PrefillReply, WorkerRole, WorkerStatus
from jdisagg.errors import (
    BrokenModelError,
    DeadlineExceededError,
    HandoffError,
    InvalidRequestError,
    JdisaggError,
    OverloadedError,
    UnavailableError,
)
from jdisagg.scheduler.backlog import Backlog
from jdisagg.scheduler.commands import (
    BROKEN_TOKEN,
    Executor,
    PrefillChunk,
    PrefillResult,
    PrefillRow,
    SampledToken,
    StepCommand,
    StepResult,
)
from jdisagg.scheduler.page_ledger import PageLedger, pages_for
from jdisagg.scheduler.prefill_batches import PrefillBatches, PrefillJob
from jdisagg.scheduler.sequences import sample_spec
from jdisagg.telemetry import Counters
from jdisagg.worker.attempts import Attempts
from jdisagg.worker.outbox import Outbox, Outboxes
from jdisagg.worker.peer_hello import hello_of
from jdisagg.worker.sender import Sender
from jdisagg.worker.step_loop import StepLoop
from jdisagg.worker.sweeper import Sweeper

CHUNKS_OFFERED = 4
MOST_STALLED = 4


class PrefillWorker:
    """Implements `PrefillPort` and `PeerPort`. At most `CHUNKS_OFFERED` full chunks of KV may be offered to one decode worker and not yet
    fetched, and `MOST_STALLED` times as many to all."""

    def __init__(
        self,
        name: str,
        executor: Executor,
        config: InstanceConfig,
        limits: LimitsConfig,
        clock: Clock,
        ids: Callable[[], int],
        model_fingerprint: str = "",
    ) -> None:
        self.name = name
        self.counters = Counters()
        self.loading_seconds: Callable[[], float] = float  # none; set by whoever loads programs while it serves
        self._mesh = executor.limits
        self._config = config
        self._limits = limits
        self._clock = clock
        self.boot_id = ids()
        self._checksum_key = ids() if limits.verify else 0
        self._ledgers = [PageLedger(self._mesh.pages_per_rank) for _ in range(self._mesh.ranks)]
        self._batches = PrefillBatches(self._mesh, ids)
        self._backlog = Backlog()
        self._waiting: list[Sender] = []
        self._computing: dict[int, Sender] = {}
        self._last_key = 0
        chunks = CHUNKS_OFFERED + self._mesh.stages - 1  # those that a pipeline computes are offered already
        self._most_offered = chunks * self._mesh.ranks * self._mesh.chunk_buckets[-1] * self._mesh.layer_groups
        self._attempts = Attempts()
        depth = self._mesh.stages + 1  # each stage has a chunk, and one waits for the first
        self._loop = StepLoop(executor, self._plan, self._apply, self._break_down, clock.now, depth)
        hello = hello_of(name, model_fingerprint, executor.limits, executor.card, self.boot_id, self._checksum_key)
        self._boxes = Outboxes(hello, self._loop, clock, limits.handoff_lease_seconds, self.counters)
        self._sweeper = Sweeper(clock, limits.handoff_lease_seconds, self._sweep, self._loop.break_down)
        self._draining = False
        self._quiet = asyncio.Event()

    async def start(self) -> None:
        self._loop.start()
        self._sweeper.start()

    async def stop(self) -> None:
        """Aborts what is left and stops the tasks. The executor stays open."""
        self._abort_all(UnavailableError(f"worker {self.name!r} was stopped"))
        await self._sweeper.stop()
        await self._loop.stop()

    async def drain(self, deadline_seconds: float | None = None) -> None:
        """Refuses new prompts and returns when all offers are fetched, or when the time is over; what is left then is given up."""
        self._draining = True
        try:
            async with asyncio.timeout(deadline_seconds):
                while len(self._boxes):
                    self._quiet.clear()
                    await self._quiet.wait()
        except TimeoutError:
            self.counters.add("drains_cut_short")
            self._abort_all(UnavailableError(f"worker {self.name!r} shuts down; its time to drain is over"))

    async def prefill(self, call: PrefillCall) -> PrefillReply:
        self._check(call)
        now = self._clock.now()
        self._last_key += 1
        until = now + call.deadline_seconds
        box = Outbox(call.handoff_id, call.attempt, until, lambda error: self._ended(sender, error), call.destination)
        sender = Sender(self._last_key, call, box, now - call.age_seconds, now)
        self._boxes.open(box)
        self._backlog.add(sender.key, len(sender.tokens))
        self._queue(sender)
        self._loop.wake()
        try:
            return await within(sender.reply, call.deadline_seconds)
        except TimeoutError:
            error = DeadlineExceededError(f"worker {self.name!r} did not prefill the prompt within its {call.deadline_seconds:g} s")
            self._boxes.abort_box(sender.box, error)
            raise error from None
        except asyncio.CancelledError:
            self._boxes.abort_box(sender.box, HandoffError("the caller gave the prompt up"))
            raise

    async def cancel_prefill(self, handoff_id: int) -> None:
        await self.abort(handoff_id, "cancelled")

    async def status(self) -> WorkerStatus:
        return self.status_now()

    def status_now(self) -> WorkerStatus:
        """Raises UnavailableError when the mesh failed."""
        self._loop.check()
        return WorkerStatus(
            name=self.name,
            role=WorkerRole.PREFILL,
            layout=str(self._config.layout),
            free_pages=tuple(ledger.free_pages for ledger in self._ledgers),
            total_pages=tuple(ledger.total_pages for ledger in self._ledgers),
            running=len(self._computing),
            waiting=len(self._waiting),
            slots=self._mesh.ranks * self._mesh.rows_per_chunk,
            page_size=self._mesh.page_size,
            context_tokens=self._mesh.context_tokens,
            draining=self._draining,
            handoffs=len(self._boxes),
            queued_tokens=self._backlog.tokens,
            queued_pairs=self._backlog.pairs,
            can_prefill=True,
            chunk_tokens=self._mesh.chunk_buckets[-1],
            loading_seconds=self.loading_seconds(),
        )

    async def hello(self, hello: PeerHello) -> PeerHello:
        return await self._boxes.hello(hello)

    def offers(self, handoff_id: int, attempt: int) -> AsyncIterator[PeerMessage]:
        return self._boxes.offers(handoff_id, attempt)

    async def acknowledge(self, handoff_id: int, offer_ids: tuple[int, ...]) -> None:
        await self._boxes.acknowledge(handoff_id, offer_ids)
        self._loop.wake()

    async def abort(self, handoff_id: int, reason: str) -> None:
        await self._boxes.abort(handoff_id, reason)

    def _check(self, call: PrefillCall) -> None:
        self._loop.check()
        if self._draining and not any(child.accepted for child in call.children):
            raise UnavailableError(f"worker {self.name!r} is draining and takes no new prompts; try another", retry_after_seconds=1.0)
        if call.handoff_id in self._boxes:
            raise HandoffError(f"hand-off {call.handoff_id} exists already; give each its own id")
        indices = tuple(child.index for child in call.children)
        self._attempts.take(call.request, indices, call.attempt, self._clock.now())
        mesh, tokens = self._mesh, len(call.request.prompt_token_ids) + len(call.children[0].accepted)
        if tokens > mesh.context_tokens or pages_for(tokens, mesh.page_size) > mesh.pages_per_rank:
            raise InvalidRequestError(
                f"prompt has {tokens} tokens; worker {self.name!r} holds {mesh.context_tokens} of context and "
                f"{mesh.pages_per_rank} pages of {mesh.page_size} a rank: shorten it"
            )
        if call.from_token % mesh.granule_tokens or not 0 <= call.from_token < tokens:
            raise HandoffError(
                f"from_token={call.from_token} of {tokens} tokens must be a multiple of {mesh.granule_tokens} and leave one to send: "
                "do both workers run the same version?"
            )
        if len(indices) > mesh.samples_per_chunk:
            raise InvalidRequestError(f"n={len(indices)} exceeds the {mesh.samples_per_chunk} samples of one prefill; ask for fewer")
        if len(self._waiting) >= self._config.queue_limit:
            raise OverloadedError(
                f"worker {self.name!r}: {len(self._waiting)} prompts wait, the queue's limit; try again later", retry_after_seconds=1.0
            )

    def _queue(self, sender: Sender) -> None:
        bisect.insort(self._waiting, sender, key=lambda waiting: (waiting.arrival, waiting.key))

    def _plan(self, step: int) -> StepCommand | None:
        if not self._waiting and not self._batches:
            return None
        stalled, full = self._stalled()
        if stalled:
            self._unplace(stalled)
        self._place_waiting(stalled)
        if stalled or full:
            self.counters.add("chunks_held_back")
        if full:
            return None
        held = {key for key, sender in self._computing.items() if sender.call.destination in stalled} if stalled else ()
        if self._loop.in_flight(PrefillChunk) and self._batches.leaves_ranks_idle(held):
            return None  # all ranks would wait for the few: who comes while the last chunk runs can share this one
        chunk = self._batches.next_chunk(step, held)
        for row in chunk.rows if chunk else ():
            sender = self._computing[row.sequence]
            if sender.started_at is None:
                sender.started_at = self._clock.now()
            sender.box.announce(_offers(row))
        return replace(chunk, checksum_key=self._checksum_key) if chunk and self._checksum_key else chunk

    def _stalled(self) -> tuple[frozenset[str], bool]:
        """Who does not fetch what is offered to him; and whether nothing more is to be offered to anybody."""
        boxes = self._boxes.all()
        if sum([box.outstanding_tokens for box in boxes]) < self._most_offered:
            return frozenset(), False
        offered: Counter[str] = Counter()
        for box in boxes:
            offered[box.destination] += box.outstanding_tokens
        stalled = frozenset(name for name, tokens in offered.items() if tokens >= self._most_offered)
        return stalled, offered.total() >= MOST_STALLED * self._most_offered

    def _unplace(self, stalled: frozenset[str]) -> None:
        """Prompts that did not begin give their pages back while nobody would fetch what they compute."""
        for sender in [one for one in self._computing.values() if one.started_at is None and one.call.destination in stalled]:
            self._stop_computing(sender)
            self._queue(sender)

    def _place_waiting(self, stalled: frozenset[str]) -> None:
        """Gives the oldest waiting prompts pages on the least loaded rank that has them; nobody overtakes but those of stalled workers."""
        for sender in [sender for sender in self._waiting if sender.call.destination not in stalled]:
            need = pages_for(len(sender.tokens), self._mesh.page_size)
            ranks = [rank for rank, ledger in enumerate(self._ledgers) if ledger.free_pages >= need]
            if not ranks:
                return
            self._waiting.remove(sender)
            sender.rank = min(ranks, key=lambda rank: (self._batches.queued_tokens(rank), -self._ledgers[rank].free_pages))
            pages = self._ledgers[sender.rank].reserve(sender.key, need)
            assert pages is not None, "room was checked"
            self._computing[sender.key] = sender
            request = sender.call.request
            specs = tuple(sample_spec(request, child.index, child.accepted) for child in sender.call.children)
            job = PrefillJob(sender.key, sender.rank, sender.tokens, pages, specs, sender.arrival, offers_from=sender.call.from_token)
            self._batches.add(job)

    def _apply(self, command: StepCommand, result: StepResult) -> None:
        assert isinstance(command, PrefillChunk) and isinstance(result, PrefillResult)
        sums = {entry.offer_id: entry for entry in result.checksums}
        for row in command.rows:
            sender = self._computing.get(row.sequence)
            if sender is None:
                continue
            self._backlog.computed(sender.key, len(row.tokens))
            sender.box.announce_checksums(sums[offer.offer_id] for offer in row.offers if offer.offer_id in sums)
            if row.samples:
                self._finish(sender, [sample for sample in result.samples if sample.sequence == sender.key])

    def _finish(self, sender: Sender, firsts: list[SampledToken]) -> None:
        """Its tokens are sampled, so all of it is offered."""
        now, started = self._clock.now(), sender.started_at
        assert started is not None, "its rows were planned"
        if any(first.token == BROKEN_TOKEN for first in firsts):
            self._boxes.abort_box(sender.box, BrokenModelError())
            return
        tokens = tuple(FirstToken(sample.child, sample.token, sample.logprobs) for sample in firsts)
        self._stop_computing(sender)
        if not sender.reply.done():
            sender.reply.set_result(PrefillReply(tokens, started - sender.queued_at, now - started))
        self._boxes.finish(sender.box, sender.end)

    def _stop_computing(self, sender: Sender) -> None:
        if self._computing.pop(sender.key, None) is not None:
            self._batches.remove(sender.key)
            self._ledgers[sender.rank].free(sender.key)
            self._loop.wake()

    def _ended(self, sender: Sender, error: JdisaggError | None) -> None:
        """All of it was fetched, or it was given up: then compute and pages are freed, and the caller is told."""
        if sender in self._waiting:
            self._waiting.remove(sender)
        self._backlog.forget(sender.key)
        self._stop_computing(sender)
        if error is not None:
            sender.fail(error)
        self._loop.wake()  # who waited behind it may go
        self._quiet.set()

    def _abort_all(self, error: UnavailableError) -> None:
        for box in self._boxes.all():
            self._boxes.abort_box(box, UnavailableError(error.message))

    def _sweep(self, now: float) -> None:
        self._boxes.sweep(now)
        self._loop.break_if_stalled(self._limits.step_seconds)
        self._attempts.forget_before(now - 2 * self._limits.handoff_lease_seconds)

    def _break_down(self, error: UnavailableError) -> None:
        self.counters.add("mesh_failures")
        self._abort_all(error)


def _offers(row: PrefillRow) -> list[Offer]:
    """What a row's blocks hold, in positions of the sequence."""
    offers = []
    for spec in row.offers:
        at = spec.offset - row.offset
        valid_tokens = min(spec.block_tokens, len(row.tokens) - at)
        offers.append(Offer(spec.offer_id, spec.group, row.start + at, valid_tokens, spec.block_tokens, row.rank, spec.groups))
    return offers

"""The worker: what is done with the prompts and sequences of one mesh.

1. Reserve (`prefill`, `reserve`): a prompt waits for pages (`scheduler/admission.py`).
2. Its cached KV is restored from slower tiers and other workers (`KvSources`). A prompt whose KV is
   sent waits for the restore before it gets pages; others have them already.
3. The rest is computed in chunks, or received from another worker (`IncomingKv`).
4. Its KV is sent to a decode worker (`PromptSender`), or its answer is generated here (`generate`).
   A running sequence may move to another worker (`MigrationSender`).

A role is two flags (`WorkerRole`). A worker that only computes is a prefill worker, and sends the
KV. One that only decodes is a decode worker: it computes what the router leaves to it, and receives
the rest. A mixed worker does both. A prefill or decode worker changes its role by these flags when
its work has ended or moved (`change_role`).

The worker takes a turn of its scheduler (`scheduler/turn.py`) after each event and carries it out.
Only the scheduler assigns pages and chooses batches. State changes only on the event loop and
between awaits, so every method sees a consistent state. A background task periodically ends expired
leases and detects a mesh that hangs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from jdisagg.clock import within
from jdisagg.errors import (
    BrokenModelError,
    DeadlineExceededError,
    HandoffError,
    JdisaggError,
    UnavailableError,
)
from jdisagg.messages.ports import (
    FirstToken,
    GenerateCall,
    HandoffSource,
    PrefillCall,
    PrefillReply,
    Reservation,
    ReserveCall,
    ResumeCall,
    SourceLost,
    Span,
)
from jdisagg.messages.step_commands import (
    BROKEN_TOKEN,
    STUCK_TOKEN,
    CopyPages,
    DecodeResult,
    DecodeSteps,
    PrefillChunk,
    PrefillResult,
    SampledToken,
    StepCommand,
    StepResult,
)
from jdisagg.request import FinishReason
from jdisagg.scheduler.handoff import HandoffEvent, HandoffState
from jdisagg.scheduler.prompts import check_queue
from jdisagg.scheduler.sequences import ChildProgress, SequenceGroup, Stage
from jdisagg.scheduler.turn import Facts, Turn
from jdisagg.worker.incoming_handoff import Received
from jdisagg.worker.mesh_worker import MeshWorker
from jdisagg.worker.tasks import PromptTask, SpanStream, overdue, unchosen

MOST_MOVES = 3


class Worker(MeshWorker):
    """One mesh behind its ports: `PrefillPort`, `DecodePort` and `PeerPort`."""

    # ---- the loop

    def _turn(self, step: int | None) -> StepCommand | None:
        prompts = self._prompts
        for prompt in prompts.take_released() if prompts.released else ():
            self._seek(self._tasks[prompt.key])
        if self._sender.unsent:
            self._sender.send_cached()
        newest, command = self._loop.newest(DecodeSteps) if self._decodes else 0, None
        if not self._scheduler.idle(step is None or newest > 0):
            turn = self._scheduler.turn(self._facts(step, newest))
            for copies in turn.copies:
                self._loop.fire(CopyPages(self._loop.next_number(), (), copies))
            command = self._carry_out(turn)
        if command is None:
            self._copy_evicted()  # otherwise before the command
        if prompts.released:
            self._loop.wake()
        if self._draining:
            self._quiet.set()
        return command

    def _facts(self, step: int | None, newest_steps: int) -> Facts:
        now, incoming = self._clock.now(), self._incoming
        works = not self._decodes and (self._admission.queue or self._prompts)
        waits = step is not None and self._interruptible is None
        return Facts(
            step,
            now + self._limits.reservation_lease_seconds,
            newest_steps > 0,
            self._loop.newest(PrefillChunk) > 0,
            waits and incoming.arriving,
            waits and newest_steps > 0 and incoming.completing_before(newest_steps),
            self._outgoing.offered_tokens() if works else {},
            now,
        )

    def _carry_out(self, turn: Turn) -> StepCommand | None:
        if turn.held_back:
            self.counters.add("chunks_held_back")
        if turn.yielded:
            self.counters.add("sequences_yielded", turn.yielded)
        for owner in turn.cut:
            self._given.cut(owner)
        for prompt in turn.prompts:
            if not prompt.decodes:  # others may get more from slower tiers
                restored = self._tasks[prompt.key].restored
                self._cache.used(prompt, prompt.rank, prompt.cached_tokens, restored)
        for group in turn.groups:
            task = self._tasks[group.key]
            task.stream = SpanStream(group, self._hello.weights)
            if not task.answer.done():  # otherwise the call has been given up
                task.answer.set_result(group)
        if turn.news and self._report(turn.news):
            self._freed()
        if turn.interrupt and self._interruptible is not None:
            self._interruptible.interrupt()
        chunk = turn.command
        if not isinstance(chunk, PrefillChunk):
            return chunk
        return self._sender.announce(chunk, self._tasks, self._clock.now())

    def _apply(self, command: StepCommand, result: StepResult) -> None:
        if isinstance(command, PrefillChunk):
            assert isinstance(result, PrefillResult)
            self._apply_chunk(command, result)
        else:
            assert isinstance(command, DecodeSteps) and isinstance(result, DecodeResult)
            if command.chunk is not None and result.chunk is not None:
                self._apply_chunk(command.chunk, result.chunk)
            for group, token in self._scheduler.batches.apply(result, self._loop.took):
                self.fail(group, unchosen(group.request, token))
        self._scheduler.ended(command, self._loop.took)
        self._migration.poke()

    def _apply_chunk(self, chunk: PrefillChunk, result: PrefillResult) -> None:
        seconds = self._loop.took
        self._sender.computed(chunk, result, self._tasks)
        self._prompts.computed(chunk, result, seconds)
        self._sources.computed_in(sum([len(row.tokens) for row in chunk.rows]), seconds)
        for row in chunk.rows:
            if row.samples and (task := self._tasks.get(row.sequence)) is not None:
                if task.stream is not None:
                    task.stream.prompt_logprobs = task.prompt.all_scores
                firsts = [one for one in result.samples if one.sequence == row.sequence]
                self._sampled(task, firsts)

    def _sampled(self, task: PromptTask, firsts: Sequence[SampledToken]) -> None:
        prompt, group = task.prompt, self._state.groups.get(task.prompt.key)
        codes = [one.token for one in firsts if one.token in (BROKEN_TOKEN, STUCK_TOKEN)]
        if codes and (group is not None or task.handoff is not None):
            self._fail(task, unchosen(prompt.request, codes[0]))
        elif group is not None:
            number, until = self._loop.next_number(), group.handoff.deadline
            copies = self._scheduler.batches.ready(group, tuple(firsts), number, until)
            if copies is not None:
                self._loop.fire(copies)
        elif task.handoff is not None:
            task.firsts = tuple([FirstToken(one.child, one.token, one.logprobs) for one in firsts])
            if not task.answer.done():
                task.answer.set_result(task.reply(task.firsts, self._clock.now()))
            self._sender.end_if_done(task)

    def _report(self, news: list[ChildProgress]) -> bool:
        """Returns whether a group has ended. Nothing more is written to its pages then."""
        ended = False
        for progress in news:
            key = progress.group_key
            if (stream := self._stream(key)) is not None:
                stream.put(progress)
            if key not in self._state.groups:
                ended = True
                self._adapters.poke()
                self._migration.abort(key, "the sequence has ended")
                self._prompts.forget(key)
                self._sources.let_go(key)
        return ended

    # ---- prompts that come

    async def prefill(self, call: PrefillCall) -> PrefillReply:
        task = await self._enter(call, self._clock.now() - call.age_seconds)
        reply = await self._answer(task, "did not prefill the prompt")
        assert isinstance(reply, PrefillReply), "its KV is sent"
        return reply

    async def cancel_prefill(self, handoff_id: int) -> None:
        await self.abort(handoff_id, "cancelled")

    async def reserve(self, call: ReserveCall) -> Reservation:
        task = await self._enter(call, self._clock.now() - call.age_seconds)
        began = self._clock.now()
        group = await self._answer(task, "had no free pages for the request")
        assert isinstance(group, SequenceGroup), "it is decoded here"
        if not group.alive:
            self._drop(group.key)
            raise self._not_held(group.key, call.attempt)
        if call.aside_seconds is not None:
            for child in group.alive:
                child.aside_seconds = call.aside_seconds + self._clock.now() - began
        self._hold(group, call.deadline_seconds)  # a restore may outlast the lease
        try:
            await self._restore(task, group)
        except BaseException:
            self._drop(group.key)
            raise
        self._cache.used(task.prompt, group.rank, group.cached_tokens, task.restored)
        cached, block = group.cached_tokens, self._kept.block_tokens
        of_prompt = task.restored.split(group.rank, min(cached, group.prompt_tokens))
        left, own = self._limits.reservation_lease_seconds, self._hello.weights
        self._hold(group, left)
        known = task.prompt.tokens if group.complete else cached
        return Reservation(group.key, self.name, group.rank, left, known, of_prompt, own, block)

    async def _enter(self, call: PrefillCall | ReserveCall, arrival: float) -> PromptTask:
        await self._compiled(call.request, call.deadline_seconds)
        async with self._adapters.held(call.request, call.deadline_seconds):
            if self._decodes and self._queue_full():
                await asyncio.sleep(0)  # the turn that is due may give pages to some
            self._check(call)
            key, now, block = self._state.new_key(), self._clock.now(), self._kept.block_tokens
            appends, continues = self._scheduler.chunk_tokens > 0, self._state.continues
            task = PromptTask.of(call, key, now, arrival, block, self._computes, appends, continues)
            self._tasks.add(task)
            named = isinstance(call, PrefillCall) or not call.whole
            self._prompts.begin(task.prompt, named=named, shared=self._computes)
        if task.handoff is not None:
            self._outgoing.open(task.handoff, lambda error: self._sent(task, error))
        self._seek(task)
        self._loop.wake()
        return task

    async def _answer(self, task: PromptTask, failure: str) -> PrefillReply | SequenceGroup:
        seconds = task.call.deadline_seconds
        try:
            return await within(task.answer, seconds)
        except TimeoutError:
            error = DeadlineExceededError(
                f"worker {self.name!r} {failure} within its {seconds:g} s"
            )
            self._give_up(task, error)
            raise error from None
        except BaseException:
            self._give_up(task, HandoffError("the caller gave the prompt up"))
            raise

    def _give_up(self, task: PromptTask, error: JdisaggError) -> None:
        if task.handoff is not None:
            self._outgoing.end(task.handoff, error)
        else:
            self._drop(task.prompt.key)

    def _seek(self, task: PromptTask) -> None:
        prompt, follows = task.prompt, self._prompts.follows(task.prompt)
        seeking, plan = self._tasks.seeking, None
        if task.handoff is not None:
            self._prompts.expect(prompt, follows or prompt.known_tokens)
            if prompt.useful and not follows:
                ahead = max(0, self._prompts.backlog.tokens - prompt.tokens + prompt.known_tokens)
                plan = self._sources.best(replace(task.query, ahead_tokens=ahead))
        if plan is not None:
            task.restoring = restoring = self._sources.begin(plan, task.restored)
            restoring.add_done_callback(lambda one: one.cancelled() or self._restored(task))
        if plan is not None or follows:
            seeking[prompt.key] = prompt
        else:
            seeking.pop(prompt.key, None)
            self._admission.enqueue(prompt)

    def _restored(self, task: PromptTask) -> None:
        prompt = task.prompt
        if self._tasks.get(prompt.key) is task:
            self._prompts.look_up(prompt)
            self._prompts.expect(prompt, prompt.known_tokens)
            self._tasks.seeking.pop(prompt.key, None)
            self._admission.enqueue(prompt)
            self._prompts.reached(prompt)
            self._loop.wake()

    async def _restore(self, task: PromptTask, group: SequenceGroup) -> None:
        prompt, kept, rank = task.prompt, self._kept, group.rank
        if group.complete or not (prompt.useful or prompt.tail):
            return
        query = task.query_of(group, self._mesh.ranks, kept.block_tokens)
        # a tail may be longer than what the client has received of the answer
        end = max(prompt.tokens, prompt.tail.end if prompt.tail else 0)
        pages = self._state.cover(group, end) or self._state.ledgers[rank].pages(group.key)
        blocks, tail = await self._sources.fill(query, group.key, pages, task.restored)
        usable = kept.usable_tokens(blocks * kept.block_tokens, prompt.computes)
        group.cached_tokens = max(group.cached_tokens, usable)
        if tail or (prompt.continues and group.cached_tokens == prompt.tokens - 1):
            group.complete, group.cached_tokens = True, prompt.tokens - 1

    def _hold(self, group: SequenceGroup, seconds: float) -> None:
        until = self._clock.now() + seconds
        group.handoff = group.handoff.expect(until)
        if (stream := self._stream(group.key)) is not None:
            stream.lease_until = until  # also if the group has ended meanwhile

    # ---- which of them are taken

    def _check(self, call: PrefillCall | ReserveCall) -> None:
        request, children = call.request, call.children
        self._check_serving(children)
        sends = isinstance(call, PrefillCall)
        if sends is self._decodes:
            raise UnavailableError(
                f"worker {self.name!r} is a {self.role.value} worker now; try another"
            )
        if sends:
            if call.weights != self._hello.weights:
                raise UnavailableError(
                    f"worker {self.name!r} has weights {self._hello.weights!r} and"
                    f" {call.destination!r} has {call.weights!r}: they cannot hand over KV"
                )
            if call.handoff_id in self._outgoing:
                raise HandoffError(
                    f"hand-off {call.handoff_id} exists already; give each its own id"
                )
        self._attempts.take(request, children, call.attempt, self._clock.now())
        self._supersede(call)
        self._admission.check(
            request, children, sends or call.computes, call.from_token if sends else None
        )
        if self._queue_full():
            waiting = [*self._admission.queue, *self._tasks.seeking.values()]
            check_queue(self.name, waiting, request.priority, self._config.queue_limit)

    def _queue_full(self) -> bool:
        return len(self._admission.queue) + len(self._tasks.seeking) >= self._config.queue_limit

    def _supersede(self, call: PrefillCall | ReserveCall) -> None:
        for task in self._tasks.superseded(call, self._state.groups):
            self.counters.add("attempts_superseded")
            text = f"attempt {task.prompt.attempt} was superseded by attempt {call.attempt}"
            self._fail(task, HandoffError(text))

    # ---- sequences

    def _stream(self, key: int) -> SpanStream | None:
        task = self._tasks.get(key)
        return task.stream if task is not None else None

    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        stream = self._stream(call.reservation_id)
        if stream is None or stream.taken or stream.attempt != call.attempt:
            raise self._not_held(call.reservation_id, call.attempt)
        stream.taken = True
        group = self._state.groups.get(call.reservation_id)
        try:
            if group is not None:
                group.until = self._clock.now() + call.deadline_seconds
                self._state.advance(group, HandoffEvent.GENERATE, group.until)
                self._begin(group, call.source)
            stream.begun.set()
            while (span := await stream.next()) is not None:
                yield span
        finally:
            self._drop(call.reservation_id)

    def _begin(self, group: SequenceGroup, source: HandoffSource | None) -> None:
        if source is not None or group.complete:
            self._prompts.forget(group.key)
        if source is not None:
            return self._incoming.begin(group, source)
        group.request = group.request.without_pixels()  # only a queued prompt needs the pixels
        if group.complete:
            self.counters.add("answers_continued")
            return self._take_over(group, tuple(group.children[0].generated))
        cached, samples = group.cached_tokens, [child.sample_spec() for child in group.alive]
        self._prompts.add(group.key, group.rank, tuple(samples), cached, group.epoch)
        if not self._computes:
            self.counters.add("prompts_appended")
            self.counters.add("tokens_appended", len(group.known_tokens) - cached)
        self._loop.wake()

    async def resume_source(self, call: ResumeCall) -> int | None:
        stream = self._stream(call.reservation_id)
        if stream is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.timeouts.handoff.resume_seconds):
                    await stream.begun.wait()  # this call may have arrived before `generate`
        group = self._state.groups.get(call.reservation_id)
        if (
            group is None
            or stream is None
            or stream.attempt != call.attempt
            or group.handoff.state is HandoffState.RESERVED
        ):
            raise self._not_held(call.reservation_id, call.attempt)
        return self._incoming.replace_source(group, call.source, call.firsts)

    def _not_held(self, reservation_id: int, attempt: int) -> HandoffError:
        return HandoffError(
            f"worker {self.name!r}: reservation {reservation_id} is not held for attempt {attempt}"
            " (any more): its lease passed"
        )

    def kv_complete(self, group: SequenceGroup, received: Received) -> None:
        task = self._tasks[group.key]
        stream, end = task.stream, received.end
        assert stream is not None, "its sequences have pages"
        stream.kv_bytes_moved = received.bytes_moved
        stream.exposed_seconds = received.exposed_seconds
        stream.prompt_logprobs = end.prompt_logprobs
        if not end.moved:
            if group.epoch == self._kept.epoch and not self._kept.snapshots:
                self._kept.keep(group.rank, group.key, group.chain)
            tokens = len(group.known_tokens) - group.cached_tokens
            self._sources.computed_in(tokens, received.exposed_seconds, "receive")
            firsts = [
                SampledToken(group.key, first.child, first.token_id, first.logprobs)
                for first in end.firsts
            ]
            self._sampled(task, firsts)
        else:
            self._take_over(group, end.moved)
        self._loop.wake()

    def _take_over(self, group: SequenceGroup, generated: tuple[int, ...]) -> None:
        if not self._scheduler.batches.take_over(group, generated, group.until):
            text = f"worker {self.name!r} cannot go on with the sequence that moved to it"
            self.fail(group, HandoffError(text))
        self._loop.wake()

    def kv_lost(self, group: SequenceGroup, lost: SourceLost) -> None:
        if (stream := self._stream(group.key)) is not None:
            stream.announce(lost=lost)

    def migrate_out(self, reservation_id: int) -> bool:
        """Offers a running sequence to other decode workers. Until one of them has taken it over,
        it continues on this worker. Returns False if the sequence cannot migrate now."""
        group, stream = self._state.groups.get(reservation_id), self._stream(reservation_id)
        if group is None or stream is None or not (stream.taken and self._migration.movable(group)):
            return False
        handoff_id = self._migration.begin(group)
        own = self.address, self.boot_id, self._hello.weights
        stream.announce(moving=HandoffSource(self.name, handoff_id, *own))
        return True

    # ---- how they end

    async def cancel(
        self, reservation_id: int, child: int | None = None, awaited: bool = False
    ) -> None:
        group = self._state.groups.get(reservation_id)
        if child is None:
            self._drop(reservation_id, awaited)
        elif group is not None:
            for sequence in group.alive:
                if sequence.child == child:
                    self._state.end_child(sequence, FinishReason.CANCELLED)
            self._report(self._state.take_news())
        self._loop.wake()

    def _end(self, group: SequenceGroup, preempted: bool = False, awaited: bool = False) -> None:
        self._state.end_group(group, preempted, awaited=awaited)
        self._report(self._state.take_news())

    def _drop(self, key: int, awaited: bool = False) -> None:
        group, task = self._state.groups.get(key), self._tasks.get(key)
        if group is not None:
            self._end(group, awaited=awaited)
        elif task is not None and task.stream is None:
            self._admission.withdraw(key)
        self._prompts.forget(key)
        self._tasks.end(key)
        self._adapters.poke()
        self._freed()

    def fail(self, group: SequenceGroup, error: JdisaggError) -> None:
        self._fail(self._tasks[group.key], error)

    def _fail(self, task: PromptTask, error: JdisaggError) -> None:
        group = self._state.groups.get(task.prompt.key)
        if isinstance(error, BrokenModelError):
            # its blocks may be the cause of a result that is no number
            self._cache.forget(task.prompt.rank if group is None else group.rank, "broken")
        if task.handoff is not None:
            self._outgoing.end(task.handoff, error)
        elif task.stream is None:  # it waits for pages
            self._drop(task.prompt.key)
            task.fail(error)
        elif group is not None:
            task.stream.fail(error)
            self._end(group)
        self._freed()

    def _sent(self, task: PromptTask, error: JdisaggError | None) -> None:
        if task.restoring is not None:
            task.restoring.cancel()
        self._admission.release(task.prompt)
        self._drop(task.prompt.key)
        if error is not None:
            task.fail(error)

    # ---- all of them

    def _hand_on(self) -> None:
        """Offers running sequences to other workers. A prompt is not worth moving."""
        for key in list(self._state.groups):
            stream = self._stream(key)
            if stream is not None and stream.moves < MOST_MOVES:
                stream.moves += self.migrate_out(key)

    def _end_everything(self, error: UnavailableError) -> None:
        for task in list(self._tasks.values()):
            self._fail(task, UnavailableError(error.message))
        self._incoming.stop()
        self._outgoing.end_all(error)

    def _end_old(self, keep: bool) -> None:
        self._prompts.rename()
        for group in list(self._state.groups.values()):
            if not keep or any(child.stage is Stage.RESERVED for child in group.alive):
                self._end(group, preempted=True)
        self._loop.wake()
        for task in self._tasks.values():
            if task.stream is not None:
                task.stream.weights = self._hello.weights

    def _sweep(self, now: float) -> None:
        for group in self._state.overdue(now):
            self.counters.add("leases_expired")
            self.fail(group, overdue(group))
        for key, task in list(self._tasks.items()):
            stream = task.stream
            if stream is not None and not stream.taken and stream.lease_until < now:
                self._drop(key)
        super()._sweep(now)

"""Sends the KV of this mesh: of prompts, while they are computed, and of running sequences that
migrate to another worker.

A chunk's KV is offered as soon as the chunk is issued. Cached positions that the receiver lacks are
extracted from pages after the last chunk, so that this work does not delay the first token.

Most KV of a migrating sequence is sent while the sequence runs; then the sequence is stopped and
the rest is sent. The last message contains all generated tokens. After a failed migration the
sequence continues on this worker.

Invariant: an extraction is issued after the steps that wrote its positions, because only positions
whose tokens were read back are offered."""

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from jdisagg.errors import HandoffError, JdisaggError
from jdisagg.layout.kv_spec import KvKind
from jdisagg.messages.ports import HandoffEnd, Offer
from jdisagg.messages.step_commands import PrefillChunk, PrefillResult, PrefillRow, StepResult
from jdisagg.scheduler.admission import Admission
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.sequences import Sequence, SequenceGroup, Stage
from jdisagg.settings.timeouts import HandoffTimeouts
from jdisagg.telemetry import Counters
from jdisagg.worker.block_moves import offers_of_pages, snapshot_offers
from jdisagg.worker.outgoing_kv import OutgoingHandoff, OutgoingKv
from jdisagg.worker.step_loop import StepLoop
from jdisagg.worker.tasks import PromptTask


@dataclass(slots=True, eq=False, repr=False)
class PromptSender:
    """Offers the KV of prompts to decode workers."""

    _state: DecodeState
    _admission: Admission
    _outgoing: OutgoingKv
    _loop: StepLoop
    _ids: Callable[[], int]
    _checksum_key: int
    unsent: deque[PromptTask] = field(default_factory=deque)  # whose last chunk is issued

    def announce(
        self, chunk: PrefillChunk, tasks: Mapping[int, PromptTask], now: float
    ) -> PrefillChunk:
        """Offers the blocks of a chunk that is about to be issued, and returns the chunk with the
        key of their checksums."""
        sent = False
        for row in chunk.rows:
            task = tasks[row.sequence]
            if task.handoff is None:
                continue
            sent = True
            if task.started_at is None:
                task.started_at = now
            task.handoff.announce(_offers_of_row(row))
            if row.samples:
                task.extracting = 1  # until it is known how many
                self.unsent.append(task)
        return msgspec.structs.replace(chunk, checksum_key=self._checksum_key) if sent else chunk

    def computed(
        self, chunk: PrefillChunk, result: PrefillResult, tasks: Mapping[int, PromptTask]
    ) -> None:
        """Announces the checksums of a chunk's blocks."""
        sums = {entry.offer_id: entry for entry in result.checksums}
        for row in chunk.rows if sums else ():
            task = tasks.get(row.sequence)
            if task is not None and task.handoff is not None:
                offers = [one.offer_id for one in row.offers]
                task.handoff.announce_checksums([sums[one] for one in offers if one in sums])

    def send_cached(self) -> None:
        """Offers the cached positions of the prompts whose last chunk is issued."""
        while self.unsent:
            self._send_cached(self.unsent.popleft())

    def _send_cached(self, task: PromptTask) -> None:
        prompt, handoff, limits = task.prompt, task.handoff, self._state.limits
        assert handoff is not None, "only such tasks are queued"
        if handoff.over:
            return
        offers: list[Offer] = []
        if prompt.offers_from is not None:
            start, cached = prompt.offers_from, prompt.cached_tokens
            offers += offers_of_pages(limits, prompt.rank, start, cached, self._ids)
            offers += snapshot_offers(limits, prompt.rank, prompt.tokens, self._ids)
        task.extracting += len(offers) - 1
        for offer in offers:
            pages = prompt.pages
            if offer.kind is not KvKind.POSITIONS:
                pages = self._state.room.place(offer.kind, prompt.rank, prompt.key, prompt.tokens)
            extracting = self._outgoing.extract(handoff, offer, pages)
            extracting.add_done_callback(functools.partial(self._extracted, task))
        self.end_if_done(task)

    def _extracted(self, task: PromptTask, extracting: "asyncio.Future[StepResult]") -> None:
        error = None if extracting.cancelled() else extracting.exception()
        if error is not None:
            self._loop.break_down(error)
        task.extracting -= 1
        self.end_if_done(task)

    def end_if_done(self, task: PromptTask) -> None:
        """Releases the pages of a prompt as soon as its first tokens are sampled and all its cached
        blocks are extracted."""
        handoff, firsts, prompt = task.handoff, task.firsts, task.prompt
        if handoff is None or firsts is None or task.extracting or handoff.over:
            return
        fresh = prompt.epoch == self._state.residency.epoch
        self._admission.release(prompt, prompt.chain if fresh else ())
        self._admission.prompts.forget(prompt.key)
        self._loop.wake()
        tokens, scores = prompt.tokens, prompt.all_scores
        self._outgoing.finish(
            handoff, lambda offers: HandoffEnd(offers, tokens, firsts, prompt_logprobs=scores)
        )


MOST_ROUNDS = 4


@dataclass(slots=True)
class _Migration:
    child: Sequence
    handoff: OutgoingHandoff
    task: "asyncio.Task[None]"


@dataclass(slots=True, eq=False, repr=False)
class MigrationSender:
    _state: DecodeState
    _outgoing: OutgoingKv
    _loop: StepLoop
    _ids: Callable[[], int]
    _timeouts: HandoffTimeouts
    _counters: Counters
    _migrations: dict[int, _Migration] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def movable(self, group: SequenceGroup) -> bool:
        """Returns whether a group can migrate: it is not migrating yet, has one child, and all its
        KV has arrived."""
        return (
            group.key not in self._migrations
            and len(group.children) == 1
            and group.children[0].stage in (Stage.READY, Stage.RUNNING)
            and group.children[0].position < group.children[0].limit
        )

    def begin(self, group: SequenceGroup) -> int:
        """Starts the migration of a `movable` group. Returns the id of its KV transfer."""
        child = group.children[0]
        handoff = OutgoingHandoff(self._ids(), group.attempt, group.key, group.until)
        self._outgoing.open(handoff, lambda error: self._ended(group.key, error))
        task = asyncio.get_running_loop().create_task(self._run(child, handoff))
        self._migrations[group.key] = _Migration(child, handoff, task)
        self._counters.add("moves_begun")
        return handoff.handoff_id

    def poke(self) -> None:
        if self._migrations:
            self._changed.set()

    def abort(self, key: int, reason: str) -> None:
        migration = self._migrations.get(key)
        if migration is not None:
            self._outgoing.end(migration.handoff, HandoffError(reason))

    def _ended(self, key: int, error: JdisaggError | None) -> None:
        migration = self._migrations.pop(key)
        if migration.task is not asyncio.current_task():
            migration.task.cancel()
        self._state.thaw(migration.child)
        if migration.child.stage is Stage.ENDED:
            return
        if error is None:
            self._counters.add("sequences_moved")
            self._state.end_child(migration.child, moved=True)
        else:
            self._counters.add("moves_failed")

    async def _run(self, child: Sequence, handoff: OutgoingHandoff) -> None:
        try:
            async with asyncio.timeout(self._timeouts.migration_seconds):
                await handoff.has_receiver.wait()
            sent = await self._offer_while_it_runs(child, handoff)
            self._state.freeze(child)
            self._loop.wake()  # ends a span of its steps early
            await self._wait(
                lambda: child.stage is not Stage.RUNNING or child.issued_position == child.position
            )
            if child.stage is not Stage.ENDED:
                await self._offer(child, handoff, sent, child.position)
                await self._offer_whole(child, handoff)
                tokens, generated = child.position, tuple(child.generated)
                self._outgoing.finish(
                    handoff, lambda offers: HandoffEnd(offers, tokens, (), generated)
                )
                while not handoff.over:
                    await self._heartbeat(handoff, handoff.acknowledgements)
        except Exception as error:  # after any error, the sequence must not stay frozen
            text = f"hand-off {handoff.handoff_id}: the sequence could not be moved: {error!r}"
            self._outgoing.end(handoff, HandoffError(text))

    async def _offer_while_it_runs(self, child: Sequence, handoff: OutgoingHandoff) -> int:
        sent = 0
        for _ in range(MOST_ROUNDS):
            whole = child.position - child.position % self._state.limits.granule_tokens
            if whole == sent:
                break
            await self._offer(child, handoff, sent, whole)
            sent = whole
            await self._wait(lambda: not handoff.outstanding_tokens)
        return sent

    async def _heartbeat(self, handoff: OutgoingHandoff, known: int) -> None:
        await self._wait(
            lambda: handoff.over or handoff.acknowledgements > known, self._timeouts.frozen_seconds
        )

    async def _wait(self, met: Callable[[], bool], seconds: float | None = None) -> None:
        async with asyncio.timeout(seconds or self._timeouts.migration_seconds):
            while not met():
                self._changed.clear()
                await self._changed.wait()

    async def _offer(self, child: Sequence, handoff: OutgoingHandoff, start: int, end: int) -> None:
        pages = self._state.ledgers[child.rank].pages(child.key)
        # issued without an await in between, so that the pages still belong to the sequence
        offers = offers_of_pages(self._state.limits, child.rank, start, end, self._ids)
        await self._sent([self._outgoing.extract(handoff, offer, pages) for offer in offers])

    async def _offer_whole(self, child: Sequence, handoff: OutgoingHandoff) -> None:
        """Windows and recurrent state change with each step, so they are sent last."""
        rank, end, place = child.rank, child.position, self._state.room.place
        offers = snapshot_offers(self._state.limits, rank, end, self._ids)
        places = [(one, place(one.kind, rank, child.key, end)) for one in offers]
        await self._sent([self._outgoing.extract(handoff, *one) for one in places])

    async def _sent(self, extracts: "list[asyncio.Future[StepResult]]") -> None:
        await asyncio.gather(*map(asyncio.shield, extracts))


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

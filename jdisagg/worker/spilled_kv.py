"""Swaps the KV of preempted and suspended sequences out to host memory and back in.

`scheduler/spills.py` decides which sequences are swapped; this module issues the copy commands.
The last positions are copied first. Their copy is queued on the mesh when the sequence loses its
pages, so these pages can be reused immediately. A sequence continues from the last token that was
read back, and results of steps in flight are dropped.

If a checksum differs, a copy is lost, or no page becomes free in time, the sequence ends as
preempted and is recomputed by another attempt. These failures never change tokens."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from jdisagg.errors import JdisaggError
from jdisagg.layout.kv_spec import KvKind
from jdisagg.messages.step_commands import ExtractResult, StepResult
from jdisagg.messages.worker_status import KeptTier
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.host_blocks import HostPiece, TierRoom
from jdisagg.scheduler.prices import Prices
from jdisagg.scheduler.sequences import Sequence, SequenceGroup, Stage
from jdisagg.scheduler.spills import Spill, Spills, batch_ranges
from jdisagg.telemetry import Counters
from jdisagg.worker.background import BackgroundTasks
from jdisagg.worker.host_pieces import HostPieces
from jdisagg.worker.mesh_worker import WorkerContext
from jdisagg.worker.outgoing_kv import offers_of_pages, snapshot_offers
from jdisagg.worker.step_loop import StepLoop


class SpilledKv:
    """Swaps the sequences of one decode mesh out and in."""

    def __init__(
        self,
        state: DecodeState,
        loop: StepLoop,
        mesh: MeshLimits,
        context: WorkerContext,
        counters: Counters,
        changed: Callable[[], None],
        most_seconds: float,
    ) -> None:
        room: TierRoom = context.tiers
        self.prices = Prices(room.always)
        self.spills = Spills(mesh, room.host_bytes, self.prices)
        self._state = state
        self._loop = loop
        self._mesh = mesh
        self._context = context
        self._counters = counters
        self._changed = changed
        self._most_seconds = most_seconds
        self._pieces = HostPieces(loop, mesh.page_size, context.ids() >> 1)
        # reserves this number of bytes of host memory for swapped-out sequences, which evicts
        # cached blocks; returns False if cached blocks still use some of these bytes
        self.lend: Callable[[int], bool] = lambda nbytes: True
        self._suspended: dict[int, SequenceGroup] = {}
        self._moving: dict[int, asyncio.Task[None]] = {}
        self._tasks = BackgroundTasks()

    def __len__(self) -> int:
        return len(self.spills)

    @property
    def quiet(self) -> bool:
        return self._tasks.quiet

    def stats(self) -> tuple[KeptTier, ...]:
        spills = self.spills
        if not spills.room_bytes:
            return ()
        pieces = sum([len(spill.offer_ids) for spill in spills])
        return (KeptTier("host", pieces, spills.bytes, spills.room_bytes),)

    def coming_pages(self) -> tuple[int, ...]:
        """Returns, for each rank, the number of pages that become free when copies in flight have
        ended."""
        pages = [0] * self._mesh.ranks
        for spill in self.spills:
            if spill.guest:
                pages[spill.rank] += self._state.ledgers[spill.rank].count(spill.guest)
        return tuple(pages)

    def stop(self) -> None:
        self._tasks.cancel()

    # ---- suspended requests

    def suspend(self, group: SequenceGroup, until: float | None) -> None:
        """Pauses a group and keeps its KV until time `until`. If `until` is None, resumes the
        group."""
        group.suspended_until = until
        if until is None:
            self._suspended.pop(group.key, None)
            until = self._context.clock.now() + self._most_seconds
        else:
            self._suspended[group.key] = group
        for spill in self.spills:
            if spill.child.group is group:
                spill.until = until

    def rest(self) -> None:
        """Swaps out the sequences of paused requests whose KV has all arrived, a few at a time.
        Ends those that do not fit into host memory."""
        for key, group in list(self._suspended.items()) if self._suspended else ():
            if key not in self._state.groups:
                del self._suspended[key]
            for child in group.alive:
                waits = child.stage not in (Stage.READY, Stage.RUNNING)
                if waits or self.spills.refusal(child) == "busy":
                    continue
                if not self._state.spill(child):
                    self._state.end_child(child, preempted=True, counted=False)

    def end_suspended(self) -> None:
        """Ends paused requests as preempted, so that they resume on another worker."""
        for group in list(self._suspended.values()):
            for child in group.alive:
                self._state.end_child(child, preempted=True, counted=False)
        self._changed()

    # ---- out

    def take(self, child: Sequence) -> bool:
        """Swaps a sequence out. Returns False if the sequence should be recomputed later
        instead."""
        cause = self.spills.refusal(child) if self._loop.failure is None else "off"
        if not cause:
            spill = self._new_spill(child)
            taken = self.spills.bytes
            if self.spills.has_room(spill.bytes) and self.lend(taken + spill.bytes):
                ledger = self._state.ledgers[child.rank]
                pages = ledger.pages(child.key)
                copies = self._copy_out(spill, 0, pages)
                slot = self._state.states.slot(child.rank, child.key)
                copies += [
                    self._pieces.copy_out(piece.offer, self._beside(piece, spill, slot))
                    for piece in spill.whole
                ]
                child.steps_count = self.spills.steps_count
                if count := self._pages_before(spill, 0):
                    spill.guest = self._state.residency.guest()
                    ledger.share(child.key, spill.guest, count)
                self._state.set_aside(child)
                self.spills.add(spill)
                self._moving[child.key] = self._tasks.spawn(self._write(spill, copies, pages))
                return True
            self.lend(taken)
            cause = "room"
        if cause != "off":
            self._counters.add("spills_declined", cause=cause)
        return False

    def _new_spill(self, child: Sequence) -> Spill:
        residency, tokens, mesh = self._state.residency, child.position, self._mesh
        if self.spills.steps_count and child.stage is Stage.RUNNING:
            tokens = child.issued_position
        chain, size = self._state.chain_to_keep(child), self._state.residency.block_tokens
        batches = [
            tuple(
                [
                    HostPiece(offer)
                    for start, end in batch
                    for offer in offers_of_pages(
                        self._mesh, child.rank, start, end, self._context.ids
                    )
                ]
            )
            for batch in batch_ranges(self._mesh, len(chain) * size, size, tokens)
        ]
        until = child.group.suspended_until or self._context.clock.now() + self._most_seconds
        if child.yielded_at is not None:
            until = max(until, child.group.until)  # requests of higher priority may run that long
        offers = snapshot_offers(mesh, child.rank, tokens, self._context.ids)
        whole = tuple(map(HostPiece, offers))
        nbytes = self.spills.bytes_of([*batches, whole])
        epoch = residency.epoch
        return Spill(child, child.rank, batches, tokens, nbytes, chain, epoch, until, whole=whole)

    def _beside(self, piece: HostPiece, spill: Spill, slot: int) -> tuple[int, ...]:
        if piece.offer.kind is KvKind.STATE:
            return (slot,)
        return self._mesh.ring(slot, spill.tokens)

    def _copy_out(
        self, spill: Spill, number: int, pages: tuple[int, ...]
    ) -> "list[asyncio.Future[StepResult]]":
        return [self._pieces.copy_out(piece.offer, pages) for piece in spill.batches[number]]

    def _pages_before(self, spill: Spill, number: int) -> int:
        return spill.batches[number][0].offer.start // self._mesh.page_size

    async def _write(
        self, spill: Spill, copies: "list[asyncio.Future[StepResult]]", pages: tuple[int, ...]
    ) -> None:
        """Copies a sequence's KV to host memory in batches, so that little device memory is needed
        for the copies. Pages become free after each batch."""
        for number, batch in enumerate(spill.batches):
            try:
                if number:
                    copies = self._copy_out(spill, number, pages)
                    self._let_go(spill, self._pages_before(spill, number))
                    self._changed()
                results = await asyncio.gather(*copies)
            except JdisaggError:
                return  # the mesh failed, and all its sequences have ended
            sums = [one.checksum.checksum for one in results if isinstance(one, ExtractResult)]
            pieces = (*batch, *spill.whole) if not number else batch
            summed = [replace(one, checksum=sum_) for one, sum_ in zip(pieces, sums, strict=True)]
            spill.batches[number] = tuple(summed[: len(batch)])
            spill.whole = tuple(summed[len(batch) :]) or spill.whole
        del self._moving[spill.child.key]
        spill.written = True
        self._counters.add("sequences_spilled")
        self._counters.add("spilled_tokens", spill.tokens)
        self._changed()

    def _let_go(self, spill: Spill, pages: int) -> None:
        ledger, before = self._state.ledgers[spill.rank], spill.guest
        if before:
            spill.guest = self._state.residency.guest() if pages else 0
            if pages:
                ledger.share(before, spill.guest, pages)
            ledger.free(before)

    # ---- back

    def bring_back(self, spill: Spill, pages: tuple[int, ...], cached_tokens: int) -> None:
        """The KV of the first `cached_tokens` positions is already in `pages`."""
        returning = self._tasks.spawn(self._back(spill, pages, cached_tokens))
        self._moving[spill.child.key] = returning

    async def _back(self, spill: Spill, pages: tuple[int, ...], cached_tokens: int) -> None:
        child, began, intact = spill.child, self._context.clock.now(), True
        try:
            for batch in reversed(spill.batches):
                missing = [piece for piece in batch if piece.offer.start >= cached_tokens]
                intact = intact and await self._pieces.bring_back(missing, child.rank, pages)
            slot = self._state.states.slot(child.rank, child.key)
            # the results of steps in flight arrive before those of the copies, which were issued
            # later
            assert child.position == spill.tokens or child.stage is Stage.ENDED
            for piece in spill.whole:
                beside = self._beside(piece, spill, slot)
                intact = intact and await self._pieces.bring_back([piece], child.rank, beside)
        except JdisaggError:
            return  # see above
        del self._moving[child.key]
        if intact:
            tokens = spill.tokens - cached_tokens
            self.prices.moved_in(tokens, self._context.clock.now() - began)
            self._counters.add("spills_restored")
            self._counters.add("spilled_tokens_restored", tokens)
            self.spills.forget(spill)
            self.lend(self.spills.bytes)
            self._pieces.release(spill.offer_ids)
            self._state.become_ready(child)
        else:
            self._miss(spill, "broken")
        self._changed()

    # ---- gone

    def settle(self) -> bool:
        """Drops the swapped-out KV of sequences that were cancelled or expired, before their pages
        are reused. Returns whether any sequence is still swapped out."""
        if not len(self.spills):
            return False
        for spill in self.spills.ended():
            if task := self._moving.pop(spill.child.key, None):
                task.cancel()
            self._let_go(spill, 0)
            self._pieces.release(spill.offer_ids)
        self.lend(self.spills.bytes)
        return len(self.spills) > 0

    def sweep(self, now: float) -> None:
        for spill in self.spills:
            if spill.child.stage is Stage.SPILLED and spill.until < now:
                late = spill.child.group.suspended_until is None
                self._miss(spill, "late" if late else "expired")

    def _miss(self, spill: Spill, cause: str) -> None:
        self._counters.add("spills_missed", cause=cause)
        self._state.end_child(spill.child, preempted=True, counted=False)

"""The receiving side of a hand-off: listens to the sender's offers, pulls each block, inserts it, verifies it, acknowledges it.

Works on one reservation, whose pages are given; knows no batches and no slots. A bounded number of blocks is in flight. A pull that
failed or came late, and a block whose pages do not sum to what the sender computed, is pulled again, a few times, because the sender
keeps a block until it is acknowledged. A block that was pulled but will not be inserted is dropped, also when this task is cancelled
midway. While it lasts, the sender hears every now and then that we are still at it, and we that the sender lives.

At the end it is checked that every layer group got every position exactly once. Nothing counts as come before it is verified.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from jdisagg.clock import within
from jdisagg.dispatch.ports import FirstToken, HandoffEnd, HandoffSource, Offer, OfferChecksum, PeerPort, close_stream
from jdisagg.errors import HandoffError, JdisaggError, UnavailableError, first_error
from jdisagg.scheduler.commands import DropBlocks, InsertBlock, InsertResult, PullBlock, PullResult, StepResult
from jdisagg.telemetry import Counters
from jdisagg.worker.peers import Link
from jdisagg.worker.step_loop import StepLoop

PULLS_IN_FLIGHT = 12
BLOCKS_IN_FLIGHT = 16
PULL_TRIES = 3
HEARTBEAT_SECONDS = 2.0
HEARTBEATS_MISSED = 2


@dataclass(slots=True)
class Received:
    """What came: the tokens sampled by the sender (or, of a moved sequence, all generated so far), bytes, and the time from the
    sender's last word to the last verified block."""

    firsts: tuple[FirstToken, ...] = ()
    moved: tuple[int, ...] = ()
    bytes_moved: int = 0
    exposed_seconds: float = 0.0
    blocks: list[Offer] = field(default_factory=list)


@dataclass(slots=True)
class Receiver:
    """One hand-off to dp rank `rank`. `pages(n)` are those of positions [0, n), or raises HandoffError. The positions below
    `cached_tokens` are here already. `speak` runs a message to the sender that nobody waits for."""

    loop: StepLoop
    peer: PeerPort
    source: HandoffSource
    attempt: int
    rank: int
    pages: Callable[[int], tuple[int, ...]]
    layer_groups: int
    cached_tokens: int
    pull_seconds: float
    counters: Counters
    now: Callable[[], float]
    speak: Callable[[Callable[[], Awaitable[None]]], None]
    link: Link = Link()
    pulling: int = 0
    inserting: int = 0
    last_insertion: int = 0
    closed: bool = False
    received: Received = field(default_factory=Received)
    _sums: dict[int, "asyncio.Future[int]"] = field(default_factory=dict)
    _said_all: bool = False
    _fetching: int = 0
    _untold: list[int] = field(default_factory=list)
    _telling: bool = False

    def close(self) -> None:
        """The pages are no longer ours: from this moment nothing is inserted, even before the task that receives has ended."""
        self.closed = True

    @property
    def completing(self) -> bool:
        """Whether nothing is missing but the results of insertions, the newest of which is command `last_insertion`."""
        return self._said_all and self._fetching == self.inserting and not self.closed

    def kept_tokens(self) -> int:
        """Positions [0, n) that are here in every layer group."""
        return min(self._contiguous(group) for group in range(self.layer_groups))

    async def receive(self) -> Received:
        """Returns when all KV is in its pages. Raises HandoffError, or UnavailableError when a mesh failed."""
        beats: list[asyncio.Task[None]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                # Most hand-offs are over before the first beat is due. A group that is ending takes no more tasks.
                us = asyncio.current_task()
                assert us is not None

                def begin() -> None:
                    if not us.cancelling():
                        beats.append(tasks.create_task(self._keep_alive()))

                timer = asyncio.get_running_loop().call_later(HEARTBEAT_SECONDS, begin)
                try:
                    end, ended_at = await self._follow(tasks)
                finally:
                    timer.cancel()
                    for beat in beats:
                        beat.cancel()
        except BaseExceptionGroup as group:
            raise _typed(group) from group
        received = self.received
        self._check_coverage(end)
        received.firsts, received.moved = end.firsts, end.moved
        received.exposed_seconds = self.now() - ended_at
        if end.moved:  # a running sequence waits for this word; those for each block may have been lost
            ids = tuple(block.offer_id for block in received.blocks)
            self.speak(lambda: self.peer.acknowledge(self.source.handoff_id, ids))
        return received

    async def _follow(self, tasks: asyncio.TaskGroup) -> tuple[HandoffEnd, float]:
        room = _Room(asyncio.Semaphore(PULLS_IN_FLIGHT), asyncio.Semaphore(BLOCKS_IN_FLIGHT))
        offers = self.peer.offers(self.source.handoff_id, self.attempt)
        end, ended_at = None, 0.0
        fetches: list[asyncio.Task[None]] = []
        try:
            async for message in offers:
                if isinstance(message, HandoffEnd):
                    end, ended_at = message, self.now()
                    break
                if isinstance(message, OfferChecksum):
                    expected = self._sum(message.offer_id)
                    if not expected.done():
                        expected.set_result(message.checksum)
                else:
                    self._fetching += 1
                    fetches.append(tasks.create_task(self._fetch(message, room)))
            self._no_more_sums()
            for fetch in fetches:
                await fetch
        finally:
            await close_stream(offers)
        if end is None:
            raise HandoffError(f"hand-off {self.source.handoff_id}: {self.source.worker!r} stopped offering before the end")
        return end, ended_at

    async def _keep_alive(self) -> None:
        """The sender's lease goes on; a sender that does not answer is given up."""
        missed = 0
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self.peer.acknowledge(self.source.handoff_id, ())
                missed = 0
                if self._untold and not self._telling:
                    self._telling = True
                    self.speak(self._tell)
            except (JdisaggError, TimeoutError) as error:
                missed += 1
                if missed == HEARTBEATS_MISSED:
                    raise HandoffError(f"hand-off {self.source.handoff_id}: {self.source.worker!r} does not answer") from error
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _fetch(self, offer: Offer, room: "_Room") -> None:
        problem, tries, again = "", 0, False
        while tries < PULL_TRIES:
            if again:
                self.counters.add("blocks_pulled_again")
            again = True
            async with room.blocks:
                async with room.pulls:
                    began = self.now()
                    problem = await self._pull(offer)
                # What is not computed yet, or what our own mesh has not got to, cannot come in time: that is no failure of its sender.
                late = problem and self.now() - began >= self.pull_seconds
                tries += not (late and (self._computing(offer) or self.loop.behind(began)))
                if problem:
                    continue
                if self.closed:
                    self._drop(offer)
                    return
                try:
                    command = self._insert_command(offer)
                except HandoffError:
                    self._drop(offer)
                    raise
                inserted = await self._insert(command)
            problem = await self._compare(offer, inserted)
            if not problem:
                self._fetching -= 1
                self.received.blocks.append(offer)
                self._acknowledge(offer.offer_id)
                return
        raise HandoffError(f"hand-off {self.source.handoff_id}: a block could not be had in {PULL_TRIES} tries: {problem}")

    def _acknowledge(self, offer_id: int) -> None:
        """The sender frees the block. One word at a time is under way; what comes meanwhile goes together with the next."""
        self._untold.append(offer_id)
        if not self._telling:
            self._telling = True
            self.speak(self._tell)

    async def _tell(self) -> None:
        ids, self._untold = self._untold, []
        try:
            await self.peer.acknowledge(self.source.handoff_id, tuple(ids))
        except BaseException:  # said again after a heartbeat that is answered: who moves a sequence waits for it
            self._untold = [*ids, *self._untold]
            self._telling = False
            raise
        self._telling = bool(self._untold)
        if self._telling:
            self.speak(self._tell)

    def _insert_command(self, offer: Offer) -> InsertBlock:
        return InsertBlock(
            step=self.loop.next_number(),
            offer_id=offer.offer_id,
            rank=self.rank,
            group=offer.group,
            groups=offer.groups,
            block_tokens=offer.block_tokens,
            valid_tokens=offer.valid_tokens,
            start=offer.start,
            pages=self.pages(offer.start + offer.valid_tokens),
            checksum_key=self.link.checksum_key,
            peer=self.link.peer,
            codec=self.link.codec,
        )

    async def _insert(self, command: InsertBlock) -> StepResult:
        self.inserting += 1
        self.last_insertion = command.step
        try:
            return await self.loop.submit(command)
        finally:
            self.inserting -= 1

    async def _pull(self, offer: Offer) -> str:
        """Pulls once; returns what went wrong, if anything."""
        number, seconds, link = self.loop.next_number(), self.pull_seconds, self.link
        where = (self.rank, offer.group, offer.block_tokens)
        command = PullBlock(number, offer.offer_id, *where, seconds, link.peer, link.codec, offer.rank, offer.groups)
        future = self.loop.submit(command)
        self.pulling += 1
        try:
            result = await within(future, 1.25 * seconds)
        except TimeoutError:
            self._drop(offer, future)
            self.counters.add("pulls_timed_out")
            return f"it did not arrive within {seconds:g} s"
        except asyncio.CancelledError:
            self._drop(offer, future)
            raise
        finally:
            self.pulling -= 1
        assert isinstance(result, PullResult)
        if result.error:
            self._drop(offer)
            self.counters.add("pulls_failed")
        else:
            self.received.bytes_moved += result.bytes_moved
        return result.error

    async def _compare(self, offer: Offer, inserted: StepResult) -> str:
        """Whether the pages hold what the sender computed; returns what is wrong with them, if anything."""
        if not self.link.verify:
            return ""
        assert isinstance(inserted, InsertResult), "a mesh that is asked to verify sums what it inserts"
        if not inserted.intact:
            self.counters.add("checksums_mismatched")
            return "it is not what its codec had packed"
        if self.link.codec != "none":
            return ""
        expected = await self._sum(offer.offer_id)
        if expected == inserted.checksum:
            return ""
        self.counters.add("checksums_mismatched")
        return f"its checksum is {inserted.checksum:#x} after insertion, and was {expected:#x} where it was computed"

    def _sum(self, offer_id: int) -> "asyncio.Future[int]":
        if offer_id not in self._sums:
            self._sums[offer_id] = asyncio.get_running_loop().create_future()
            if self._said_all:
                self._no_more_sums()
        return self._sums[offer_id]

    def _computing(self, offer: Offer) -> bool:
        """Whether the sender has not said yet that the block is computed."""
        known = self._sums.get(offer.offer_id)
        return self.link.verify and not self._said_all and not (known is not None and known.done())

    def _no_more_sums(self) -> None:
        """The sender has said all: a checksum that has not come never will."""
        self._said_all = True
        for expected in self._sums.values():
            if not expected.done():
                expected.set_exception(HandoffError(f"hand-off {self.source.handoff_id}: no checksum came for a block"))
                expected.exception()

    def _drop(self, offer: Offer, pull: "asyncio.Future[StepResult] | None" = None) -> None:
        """Forgets a block, also one that is still on its way; nobody will read how its pull ended."""
        if pull is not None:
            pull.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.loop.fire(DropBlocks(self.loop.next_number(), (offer.offer_id,)))

    def _contiguous(self, group: int) -> int:
        at = self.cached_tokens
        blocks = (block for block in self.received.blocks if block.group <= group < block.group + block.groups)
        for block in sorted(blocks, key=lambda block: block.start):
            if block.start != at:
                break
            at += block.valid_tokens
        return at

    def _check_coverage(self, end: HandoffEnd) -> None:
        blocks = self.received.blocks
        each = sum(block.groups * block.valid_tokens for block in blocks) == self.layer_groups * (end.tokens - self.cached_tokens)
        whole = all(self._contiguous(group) == end.tokens for group in range(self.layer_groups))
        if not (each and whole and len(blocks) == end.offers):
            raise HandoffError(
                f"hand-off {self.source.handoff_id}: {len(blocks)} blocks came, which do not cover {end.tokens} positions of "
                f"{self.layer_groups} layer groups once each"
            )


@dataclass(frozen=True, slots=True)
class _Room:
    """How many blocks may be pulled at once, and how many may be on their way into the pages: an insertion waits for the mesh's steps."""

    pulls: asyncio.Semaphore
    blocks: asyncio.Semaphore


def _typed(group: BaseExceptionGroup[BaseException]) -> JdisaggError:
    error = first_error(group)
    return error if isinstance(error, JdisaggError) else UnavailableError(str(error))

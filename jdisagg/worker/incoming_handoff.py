"""The receiving side of one KV transfer (hand-off). Reads the sender's offers, then pulls each
block, inserts it into pages, verifies its checksum and acknowledges it.

Invariant: a block counts as received only after its checksum was verified. A hand-off is complete
when every layer group has received every position exactly once. Sliding-window layers that are sent
separately need only the positions still inside their windows. If the model has recurrent state, the
state must be received exactly once."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from jdisagg.config import LimitsConfig
from jdisagg.errors import HandoffError, JdisaggError, UnavailableError, first_error
from jdisagg.layout.kv_spec import KvKind
from jdisagg.messages.kv_plane import BlockState
from jdisagg.messages.ports import HandoffEnd, Offer, OfferChecksum, close_stream
from jdisagg.messages.step_commands import InsertResult
from jdisagg.telemetry import Counters
from jdisagg.worker.block_moves import PATIENCE, ArrivingBlocks, Destination, reach
from jdisagg.worker.peers import SenderLine
from jdisagg.worker.step_loop import StepLoop

PULLS_IN_FLIGHT = 12
BLOCKS_IN_FLIGHT = 16


@dataclass(slots=True)
class Received:
    """The result of receiving one hand-off. `end`: the sender's last message. `exposed_seconds`:
    seconds from this message to the last verified block."""

    end: HandoffEnd
    bytes_moved: int
    exposed_seconds: float
    blocks: list[Offer]


class IncomingHandoff:
    def __init__(
        self,
        loop: StepLoop,
        line: SenderLine,
        to: Destination,
        limits: LimitsConfig,
        counters: Counters,
        now: Callable[[], float],
    ) -> None:
        self.line = line
        self.closed = False
        self.task: asyncio.Task[None] | None = None  # that receives it for a reservation
        self.spoiled = False  # whether the checksum of a block differed from its sender's
        self._loop = loop
        self._to = to
        self._pull_seconds = limits.pull_seconds
        self._timeouts = limits.timeouts.handoff
        self._counters = counters
        self._now = now
        self._sums: dict[int, asyncio.Future[int]] = {}
        self._computed_at: dict[int, float] = {}  # time when each block's checksum arrived
        self._all_offered = False
        self.blocks = ArrivingBlocks(loop, to, lambda: line.link, self._pull_seconds, line.name)
        self._bytes_moved = 0
        # limits of blocks being pulled, and of blocks pulled or waiting for the mesh's insertion
        self._pulls = asyncio.Semaphore(PULLS_IN_FLIGHT)
        self._insertions = asyncio.Semaphore(BLOCKS_IN_FLIGHT)

    def close(self) -> None:
        """Prevents further insertions, because the pages now have another owner."""
        self.closed = True

    def give_up(self, reason: str) -> None:
        """Closes the hand-off and notifies the sender."""
        self.close()
        self.line.give_up(reason)

    @property
    def completing(self) -> bool:
        """Whether all blocks are offered and their insertions are issued, so that only results are
        missing."""
        count = self.blocks.count
        missing = count[BlockState.OFFERED] + count[BlockState.ASKED] + count[BlockState.LOST]
        return self._all_offered and not missing and not self.closed

    async def receive(self) -> Received:
        """Receives all KV into the destination's pages and returns the result. Raises HandoffError
        if the sender failed, or it sent incomplete KV. Raises UnavailableError if this mesh or the
        sender's failed."""
        try:
            async with asyncio.TaskGroup() as tasks:
                beats = tasks.create_task(self._keep_alive())
                try:
                    end, ended_at = await self._read_offers(tasks)
                finally:
                    beats.cancel()
        except BaseExceptionGroup as group:
            raise _typed(group) from group
        blocks = self.blocks.verified
        self._check_coverage(end)
        if end.moved or not blocks:
            self.line.acknowledge_all(tuple(block.offer_id for block in blocks))
        return Received(end, self._bytes_moved, self._now() - ended_at, blocks)

    async def _read_offers(self, tasks: asyncio.TaskGroup) -> tuple[HandoffEnd, float]:
        offers = self.line.offers()
        end, ended_at = None, 0.0
        fetches: list[asyncio.Task[None]] = []
        try:
            async for message in offers:
                if isinstance(message, HandoffEnd):
                    end, ended_at = message, self._now()
                    break
                if isinstance(message, OfferChecksum):
                    self._computed_at.setdefault(message.offer_id, self._now())
                    expected = self._sum(message.offer_id)
                    if not expected.done():
                        expected.set_result(message.checksum)
                else:
                    self.blocks.offered(message)
                    fetches.append(tasks.create_task(self._fetch(message)))
            self._no_more_sums()
            for fetch in fetches:
                await fetch
        finally:
            await close_stream(offers)
        if end is None:
            raise HandoffError(
                f"{self.line.name}: {self.line.source.worker!r} stopped offering before the end"
            )
        return end, ended_at

    async def _keep_alive(self) -> None:
        missed, seconds = 0, self._timeouts.heartbeat_seconds
        while True:
            await asyncio.sleep(seconds)
            try:
                async with asyncio.timeout(seconds):
                    await self.line.heartbeat()
                missed = 0
            except (JdisaggError, TimeoutError) as error:
                missed += 1
                if missed == self._timeouts.heartbeats_missed:
                    raise HandoffError(
                        f"{self.line.name}: {self.line.source.worker!r} does not answer"
                    ) from error

    async def _fetch(self, offer: Offer) -> None:
        problem, tries = "", 0
        while tries < self._timeouts.pull_tries:
            if problem:
                self._counters.add("blocks_pulled_again")
            async with self._insertions:
                async with self._pulls:
                    await self.line.share.begin_turn(self.line.source.handoff_id)
                    try:
                        began, computed = self._now(), not self._computing(offer)
                        problem = await self._pull(offer)
                        if computed and not self._loop.behind(began):
                            self.line.share.took(self._now() - began, self._pull_seconds)
                    finally:
                        self.line.share.end_turn()
                # A late block is no failure of the sender if it is not computed yet, or if this
                # worker's own mesh was busy.
                late = problem and self._now() - began >= self._pull_seconds
                tries += not (late and (self._computing(offer) or self._loop.behind(began)))
                if problem:
                    continue
                if self.closed:
                    return self.blocks.give_up(offer)
                inserted = await self.blocks.insert(offer)
            problem = await self._compare(offer, inserted)
            if not problem:
                self.line.acknowledge(offer.offer_id)
                return
        raise HandoffError(
            f"{self.line.name}: a block could not be transferred in {tries} tries: {problem}"
        )

    async def _pull(self, offer: Offer) -> str:
        began = self._now()
        result = await self.blocks.pull(offer)
        if result is None:
            self._counters.add("pulls_timed_out")
            return f"it did not arrive within {PATIENCE * self._pull_seconds:g} s"
        if result.error:
            self._counters.add("pulls_failed")
            return result.error
        self._bytes_moved += result.bytes_moved
        if self.line.link.verify:
            # The checksum is sent when the block is computed, perhaps after the pull began.
            ended = self._now()
            since = max(began, self._computed_at.get(offer.offer_id, ended))
            self.line.arrived(result.bytes_moved, ended - since)
        return ""

    async def _compare(self, offer: Offer, inserted: InsertResult) -> str:
        summed = self.line.link.verify and self.blocks.codec(offer) == "none"
        expected = await self._sum(offer.offer_id) if summed else None
        problem = self.blocks.verify(offer, inserted, expected)
        if problem:
            self.spoiled = True
            self._counters.add("checksums_mismatched")
        return problem

    def _sum(self, offer_id: int) -> "asyncio.Future[int]":
        if offer_id not in self._sums:
            self._sums[offer_id] = asyncio.get_running_loop().create_future()
            if self._all_offered:
                self._no_more_sums()
        return self._sums[offer_id]

    def _computing(self, offer: Offer) -> bool:
        if not self.line.link.verify or self._all_offered:
            return False
        known = self._sums.get(offer.offer_id)
        return known is None or not known.done()

    def _no_more_sums(self) -> None:
        """Fails all waits for checksums, because no checksum follows the sender's last message."""
        self._all_offered = True
        for expected in self._sums.values():
            if not expected.done():
                expected.set_exception(
                    HandoffError(f"{self.line.name}: no checksum came for a block")
                )
                expected.exception()

    def _check_coverage(self, end: HandoffEnd) -> None:
        blocks, mesh, windows = self.blocks.verified, self._to.mesh, self._to.windows
        whole = _covers(
            [block for block in blocks if block.kind is KvKind.POSITIONS],
            mesh.layer_groups,
            self._to.cached_tokens,
            end.tokens,
        )
        if windows:
            seen = [block for block in blocks if block.kind is KvKind.WINDOW]
            whole &= _covers(seen, mesh.window_groups, mesh.seen_from(end.tokens), end.tokens)
        if not whole or len(blocks) != end.offers:
            raise HandoffError(
                f"{self.line.name}: {len(blocks)} blocks came, which do not cover {end.tokens}"
                f" positions of {mesh.layer_groups} layer groups once each"
                + (", or not what windows see" if windows else "")
            )
        states = sum(block.kind is KvKind.STATE for block in blocks)
        if states != self._to.state:
            raise HandoffError(
                f"{self.line.name}: the state came {states} times; a model that keeps some hands it"
                " over once, others never"
            )


def _covers(blocks: list[Offer], groups: int, start: int, end: int) -> bool:
    tokens = sum(block.groups * block.valid_tokens for block in blocks)
    return tokens == groups * (end - start) and reach(blocks, groups, start) == end


def _typed(group: BaseExceptionGroup[BaseException]) -> JdisaggError:
    error = first_error(group)
    return error if isinstance(error, JdisaggError) else UnavailableError(str(error))

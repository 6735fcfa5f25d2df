"""The receiving side of a hand-off: listens to the sender's offers, pulls each block, inserts it, acknowledges it.

Works on one reservation, whose pages are given; knows no batches and no slots. A bounded number of pulls is in flight; a failed
pull is tried again, a few times, because the sender keeps a block until it is acknowledged. A block that was pulled but will
not be inserted is dropped, also when this task is cancelled midway. At the end it is checked that every layer group
got every position exactly once.
"""

import asyncio
from dataclasses import dataclass, field

from jdisagg.dispatch.ports import FirstToken, HandoffEnd, HandoffSource, Offer, PeerPort
from jdisagg.errors import HandoffError, JdisaggError, UnavailableError
from jdisagg.scheduler.commands import DropBlocks, InsertBlock, PullBlock, PullResult, StepResult
from jdisagg.telemetry import Counters
from jdisagg.worker.step_loop import StepLoop

PULLS_IN_FLIGHT = 4
PULL_TRIES = 3


@dataclass(slots=True)
class Received:
    """What came: the tokens sampled by the sender, and how many bytes crossed."""

    firsts: tuple[FirstToken, ...] = ()
    bytes_moved: int = 0
    blocks: list[Offer] = field(default_factory=list)


@dataclass(slots=True)
class Receiver:
    """One hand-off into `pages` of `rank`."""

    loop: StepLoop
    peer: PeerPort
    source: HandoffSource
    attempt: int
    rank: int
    pages: tuple[int, ...]
    page_size: int
    layer_groups: int
    cached_tokens: int
    pull_seconds: float
    counters: Counters
    pulling: int = 0
    closed: bool = False

    def close(self) -> None:
        """The pages are no longer ours: from this moment nothing is inserted, even before the task that receives has ended."""
        self.closed = True

    async def receive(self) -> Received:
        """Returns when all KV is in its pages. Raises HandoffError, or UnavailableError when a mesh failed."""
        received = Received()
        try:
            end = await self._follow(received)
        except BaseExceptionGroup as group:
            raise _first_error(group) from group
        self._check_coverage(received.blocks, end)
        received.firsts = end.firsts
        return received

    async def _follow(self, received: Received) -> HandoffEnd:
        room = asyncio.Semaphore(PULLS_IN_FLIGHT)
        offers = self.peer.offers(self.source.handoff_id, self.attempt)
        end: HandoffEnd | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                async for message in offers:
                    if isinstance(message, HandoffEnd):
                        end = message
                        break
                    await room.acquire()
                    fetch = tasks.create_task(self._fetch(message, received))
                    fetch.add_done_callback(lambda _: room.release())
        finally:
            close = getattr(offers, "aclose", None)
            if close is not None:
                await close()
        if end is None:
            raise HandoffError(f"hand-off {self.source.handoff_id}: {self.source.worker!r} stopped offering before the end")
        return end

    async def _fetch(self, offer: Offer, received: Received) -> None:
        self.pulling += 1
        try:
            moved = await self._pull(offer)  # awaited first: `+= await` would read the sum before other pulls add to it
            received.bytes_moved += moved
            if self.closed:
                self.loop.fire(DropBlocks(self.loop.next_number(), (offer.offer_id,)))
                return
            insert = InsertBlock(
                step=self.loop.next_number(),
                offer_id=offer.offer_id,
                rank=self.rank,
                group=offer.group,
                block_tokens=offer.block_tokens,
                valid_tokens=offer.valid_tokens,
                start=offer.start,
                pages=self.pages[: -(-(offer.start + offer.valid_tokens) // self.page_size)],
            )
            await self.loop.submit(insert)
            received.blocks.append(offer)
            await self.peer.acknowledge(self.source.handoff_id, (offer.offer_id,))
        finally:
            self.pulling -= 1

    async def _pull(self, offer: Offer) -> int:
        name = f"hand-off {self.source.handoff_id}"
        tries = 0
        while True:
            tries += 1
            number = self.loop.next_number()
            future = self.loop.submit(PullBlock(number, offer.offer_id, self.rank, offer.group, offer.block_tokens, self.pull_seconds))
            try:
                async with asyncio.timeout(1.25 * self.pull_seconds):
                    result = await asyncio.shield(future)
            except TimeoutError:
                self._drop(offer, future)
                self.counters.add("pulls_timed_out")
                raise HandoffError(f"{name}: a block did not arrive within {self.pull_seconds:g} s") from None
            except asyncio.CancelledError:
                self._drop(offer, future)
                raise
            assert isinstance(result, PullResult)
            if not result.error:
                return result.bytes_moved
            self.counters.add("pulls_failed")
            if tries == PULL_TRIES:
                self._drop(offer, future)
                raise HandoffError(f"{name}: a block could not be pulled in {PULL_TRIES} tries: {result.error}")

    def _drop(self, offer: Offer, pull: "asyncio.Future[StepResult]") -> None:
        """Forgets a block, also one that is still on its way; nobody will read how its pull ended."""
        pull.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.loop.fire(DropBlocks(self.loop.next_number(), (offer.offer_id,)))

    def _check_coverage(self, blocks: list[Offer], end: HandoffEnd) -> None:
        whole = len(blocks) == end.offers
        for group in range(self.layer_groups):
            at = self.cached_tokens
            for block in sorted((block for block in blocks if block.group == group), key=lambda block: block.start):
                whole &= block.start == at
                at += block.valid_tokens
            whole &= at == end.tokens
        if not whole:
            raise HandoffError(
                f"hand-off {self.source.handoff_id}: {len(blocks)} blocks came, which do not cover {end.tokens} positions of "
                f"{self.layer_groups} layer groups once each"
            )


def _first_error(group: BaseExceptionGroup[BaseException]) -> JdisaggError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, JdisaggError) else UnavailableError(str(error))

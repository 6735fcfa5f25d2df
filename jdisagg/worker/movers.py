"""Running sequences on their way to another decode worker: offered from the pages while they go on, then frozen for the tail.

A move begins with its hand-off id, which the path is told; when another worker listens under it, whole granules of what is written
are extracted and offered while decoding goes on. When little is left the sequence is frozen; what its steps in flight still yield is
waited for, the tail is offered, and the last message carries all generated tokens (rule 9). When all is acknowledged the sequence ends
here as moved. A move that fails at any moment changes nothing: the sequence thaws and goes on here; soon, when the other worker, which
says every now and then that it is still at it, falls silent.

Invariant: only what was read back is offered, so an extraction comes after the steps that wrote its positions.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from jdisagg.dispatch.ports import HandoffEnd, Offer
from jdisagg.errors import HandoffError, JdisaggError
from jdisagg.scheduler.blocks import split_blocks
from jdisagg.scheduler.commands import ExtractBlock, ExtractResult, StepResult
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.page_ledger import pages_for
from jdisagg.scheduler.sequences import Group, Sequence, Stage
from jdisagg.telemetry import Counters
from jdisagg.worker.outbox import Outbox, Outboxes
from jdisagg.worker.step_loop import StepLoop

MOST_ROUNDS = 4
# Another worker may have to make room first, and blocks be pulled again; the sequence goes on meanwhile.
PATIENCE_SECONDS = 30.0
# Of a receiver's heartbeats (worker/receiver.py) three may be missing before a frozen sequence goes on.
SILENCE_SECONDS = 6.0


@dataclass(slots=True)
class _Move:
    child: Sequence
    box: Outbox
    task: "asyncio.Task[None]"


class Movers:
    """The moves from one mesh. `settle` is called when one changed what may run."""

    def __init__(
        self,
        state: DecodeState,
        boxes: Outboxes,
        loop: StepLoop,
        new_id: Callable[[], int],
        checksum_key: int,
        settle: Callable[[], None],
        counters: Counters,
    ) -> None:
        self._state = state
        self._boxes = boxes
        self._loop = loop
        self._new_id = new_id
        self._checksum_key = checksum_key
        self._settle = settle
        self._counters = counters
        self._moves: dict[int, _Move] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._moves)

    def movable(self, group: Group) -> bool:
        """Sequences that share pages are not moved; nor is one whose KV is still to come."""
        return (
            group.key not in self._moves
            and len(group.children) == 1
            and group.children[0].stage in (Stage.READY, Stage.RUNNING)
            and group.children[0].position < group.children[0].limit
        )

    def begin(self, group: Group, until: float) -> int:
        """Makes a movable group ready to be fetched, under the hand-off id that is returned."""
        child = group.children[0]
        box = Outbox(self._new_id(), group.attempt, until, lambda error: self._ended(group, error))
        self._boxes.open(box)
        task = asyncio.get_running_loop().create_task(self._run(child, box))
        self._moves[group.key] = _Move(child, box, task)
        self._counters.add("moves_begun")
        return box.handoff_id

    def poke(self) -> None:
        """Something changed that a move may wait for."""
        self._changed.set()

    def abort(self, key: int, reason: str) -> None:
        """Idempotent."""
        move = self._moves.get(key)
        if move is not None:
            self._boxes.abort_box(move.box, HandoffError(reason))

    def _ended(self, group: Group, error: JdisaggError | None) -> None:
        move = self._moves.pop(group.key)
        if move.task is not asyncio.current_task():
            move.task.cancel()
        move.child.frozen = False
        if move.child.stage is Stage.ENDED:
            return
        if error is None:
            self._counters.add("sequences_moved")
            self._state.end_child(move.child, moved=True)
        else:
            self._counters.add("moves_failed")
        self._settle()

    async def _run(self, child: Sequence, box: Outbox) -> None:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await box.heard.wait()
            sent = 0
            for _ in range(MOST_ROUNDS):
                whole = child.position - child.position % self._state.limits.granule_tokens
                if whole == sent:
                    break
                await self._offer(child, box, sent, whole)
                sent = whole
                await self._wait(lambda: not box.outstanding)
            child.frozen = True
            self._loop.wake()  # a span of its steps ends early
            await self._wait(lambda: child.stage is not Stage.RUNNING or child.issued_position == child.position)
            if child.stage is not Stage.ENDED:
                await self._offer(child, box, sent, child.position)
                tokens, generated = child.position, tuple(child.generated)
                self._boxes.finish(box, lambda offers: HandoffEnd(offers, tokens, (), generated))
                while not box.handoff.state.final:
                    heard = box.acknowledgements
                    await self._wait(lambda heard=heard: box.handoff.state.final or box.acknowledgements > heard, SILENCE_SECONDS)
        except Exception as error:  # whatever it was, the sequence must not stay frozen
            self._boxes.abort_box(box, HandoffError(f"hand-off {box.handoff_id}: the sequence could not be moved: {error!r}"))

    async def _wait(self, met: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
        async with asyncio.timeout(seconds):
            while not met():
                self._changed.clear()
                await self._changed.wait()

    async def _offer(self, child: Sequence, box: Outbox, start: int, end: int) -> None:
        """Extracts positions [start, end) in all layer groups; returns when all are computed."""
        limits = self._state.limits
        pages = self._state.ledgers[child.rank].pages(child.key)
        waiting: list[Coroutine[None, None, None]] = []
        largest = limits.chunk_buckets[-1]
        for first in range(start, end, largest):
            for at, block_tokens, valid_tokens in split_blocks(min(largest, end - first), limits.granule_tokens, limits.whole_blocks):
                for band in limits.bands(block_tokens):
                    offer = Offer(self._new_id(), band.start, first + at, valid_tokens, block_tokens, child.rank, len(band))
                    command = ExtractBlock(
                        step=self._loop.next_number(),
                        offer_id=offer.offer_id,
                        rank=child.rank,
                        group=band.start,
                        groups=len(band),
                        start=offer.start,
                        valid_tokens=valid_tokens,
                        block_tokens=block_tokens,
                        pages=pages[: pages_for(offer.start + valid_tokens, limits.page_size)],
                        checksum_key=self._checksum_key,
                    )
                    box.announce((offer,))
                    waiting.append(self._announce_sum(self._loop.submit(command), box))  # submitted here, so that pages are still ours
        await asyncio.gather(*waiting)

    async def _announce_sum(self, extracting: "asyncio.Future[StepResult]", box: Outbox) -> None:
        result = await asyncio.shield(extracting)
        assert isinstance(result, ExtractResult)
        if box.error is None and self._checksum_key:
            box.announce_checksums((result.checksum,))

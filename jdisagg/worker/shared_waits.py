"""Lets requests wait for blocks that an earlier prompt computes, on a worker that prefills and
decodes (`scheduler/shared_prompts.py`). A request waits before pages are reserved for it."""

import asyncio
import contextlib
from collections.abc import Callable

from jdisagg.messages.ports import ReserveCall
from jdisagg.scheduler.residency import Chain, Residency
from jdisagg.scheduler.sequences import wanted_of_prompt
from jdisagg.scheduler.shared_prompts import ChunkTimes, Leader, SharedPrompts, waiting_pays
from jdisagg.telemetry import Counters


class SharedWaits:
    def __init__(
        self,
        kept: Residency,
        queued: Callable[[], list[int]],
        times: ChunkTimes,
        counters: Counters,
    ) -> None:
        self._kept = kept
        self._queued = queued
        self._times = times
        self._counters = counters
        self._shared = SharedPrompts()
        self._waiting: dict[int, asyncio.Event] = {}
        self._left: dict[int, int] = {}  # tokens that each prompt would compute
        self._ranks: dict[int, int] = {}  # of prompts that have begun
        self._orphans: set[int] = set()  # prompts whose leader has ended
        self._last_key = 0

    def __len__(self) -> int:
        """Returns the number of requests that wait."""
        return len(self._waiting)

    async def join(self, call: ReserveCall, arrival: float) -> int:
        """Registers a prompt and returns its key. If other prompts compute blocks of this prompt,
        waits for these blocks as long as that is faster than computing them."""
        kept, request, accepted = self._kept, call.request, call.children[0].accepted
        tokens = request.prompt_token_ids + accepted
        chain, key = kept.chain(request, tokens), self._last_key + 1
        self._last_key = key
        self._shared.begin(key, (arrival, key), chain)
        whole = wanted_of_prompt(request, accepted) is not None
        count = 0 if whole else kept.usable_tokens(len(tokens) - 1, True) // kept.block_tokens
        orphaned = False
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(call.deadline_seconds):
                    while leader := self._leader(key, chain[:count], len(tokens)):
                        await self._wait(key, leader)
                        orphaned = key in self._orphans
                        self._orphans.discard(key)
        except BaseException:
            self.end(key)
            raise
        if orphaned:
            self._counters.add("prefix_waits_taken_over")
        return key

    def _leader(self, key: int, useful: Chain, tokens: int) -> Leader | None:
        kept = self._kept
        known = max([kept.match(rank, useful) for rank in range(len(self._queued()))])
        reuse = kept.usable_tokens(known * kept.block_tokens, to_compute=True)
        self._left[key] = tokens - reuse
        leader = self._shared.leader(key, useful, known)
        if leader is None or kept.snapshots:
            return None  # a hit needs a snapshot, which is cached when the sequence ends
        common = kept.usable_tokens(leader.blocks * kept.block_tokens, to_compute=True) - reuse
        rank, ahead = self._ranks.get(leader.key), self._left[leader.key]
        left = self._left[key]
        pays = waiting_pays(self._times, self._queued(), rank, ahead, left, common)
        return leader if common > 0 and pays else None

    async def _wait(self, key: int, leader: Leader) -> None:
        self._shared.follow(key, leader)
        self._counters.add("prefix_waits")
        event = self._waiting[key] = asyncio.Event()
        try:
            await event.wait()
        finally:
            del self._waiting[key]

    def began(self, key: int, rank: int) -> None:
        self._ranks[key] = rank
        self._shared.started(key)

    def issued(self, key: int, blocks: int) -> None:
        self._wake(self._shared.reached(key, blocks))

    def end(self, key: int) -> None:
        self._orphans.discard(key)
        self._left.pop(key, None)
        self._ranks.pop(key, None)
        free = self._shared.end(key)
        self._orphans.update(free)
        self._wake(free)

    def end_all(self) -> None:
        self._wake(tuple(self._waiting))

    def _wake(self, keys: tuple[int, ...]) -> None:
        for key in keys:
            if (event := self._waiting.get(key)) is not None:
                event.set()

"""Where a reservation's KV comes from: a prefill worker, and when that fails, another. The reservation and what has come are kept.

Whoever notices first that a source fails, the prefill's call or the decode worker's pulls, the decode worker is told of the next one and
answers from which position on it still needs the KV; the new prefill computes all and sends the rest. First tokens that went out hold:
the decode worker is told them, so that nothing is sampled twice. Bounded: after `MOST_SOURCES` the leg fails, and the
decode worker is avoided, too.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import TYPE_CHECKING

from jdisagg.clock import to_the_end
from jdisagg.dispatch.ports import HandoffSource, PrefillCall, ResumeCall, SourceLost
from jdisagg.dispatch.trip import CLOSE_SECONDS, FAILED_CLOSE_SECONDS, Hold, Retried, Waited, quietly
from jdisagg.errors import HandoffError, InvalidRequestError, OverloadedError, UnavailableError

if TYPE_CHECKING:
    from jdisagg.dispatch.leg import Leg

MOST_SOURCES = 4
BACKOFF_SECONDS = 0.05


class Sources:
    """The hand-off into reservation `hold` of `leg`."""

    def __init__(self, leg: "Leg", hold: Hold) -> None:
        self._leg = leg
        self._hold = hold
        self._trip = leg.trip
        self._used = 1
        self._news = asyncio.Event()

    async def run(self, worker: str) -> None:
        """Prefills at `worker`, or another, and decodes; returns when the decoding ended. Raises what ends the leg."""
        leg = self._leg
        source = self._source(worker)
        leg.on_lost = self._news.set
        decoding = self._begin(leg.decode(self._hold, source))
        computing: asyncio.Task[None] | None = self._begin(self._prefill(source, 0))
        try:
            while (trouble := await self._trouble(decoding, computing, source)) is not None:
                if self._used == MOST_SOURCES:
                    leg.failed.add(self._hold.worker)  # so many cannot all be at fault
                    raise HandoffError(f"{MOST_SOURCES} sources failed, the last one so: {trouble.message}") from trouble
                await self._give_up(computing, source, FAILED_CLOSE_SECONDS)
                leg.failed.add(source.worker)
                self._used += 1
                source = self._source(await self._trip.choose_prefill(frozenset(leg.failed)))
                if source.worker in leg.failed:
                    await asyncio.sleep(BACKOFF_SECONDS * 2**self._used)
                kept = await self._resume(source, decoding)
                computing = None if kept is None else self._begin(self._prefill(source, kept))
            decoding.result()
            if computing is not None and not computing.done():
                await self._give_up(computing, source)
        except BaseException:
            await to_the_end(self._end(decoding, computing, source))
            raise

    def _begin(self, part: Coroutine[object, object, None]) -> "asyncio.Task[None]":
        """A task whose end is news."""
        task = asyncio.create_task(part)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, _: "asyncio.Task[None]") -> None:
        self._news.set()

    async def _trouble(
        self, decoding: "asyncio.Task[None]", computing: "asyncio.Task[None] | None", source: HandoffSource
    ) -> UnavailableError | OverloadedError | None:
        """Waits until the decoding ended (None) or the source failed (why). Raises what no other source would make good."""
        while True:
            self._news.clear()
            if decoding.done():
                return None
            while self._leg.lost:
                lost = self._leg.lost.popleft()
                if lost.handoff_id == source.handoff_id:
                    return _lost(lost, source)
            if computing is not None and computing.done() and not _succeeded(computing):
                error = computing.exception()
                if isinstance(error, HandoffError):
                    # The receiver gave up: because it preempted us, then it says so, or because the source failed it, then too.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(CLOSE_SECONDS):
                            await self._news.wait()
                    if decoding.done():
                        return None
                if isinstance(error, UnavailableError) or (isinstance(error, OverloadedError) and self._used > 1):
                    return error
                if isinstance(error, InvalidRequestError):
                    self._leg.refused.add(source.worker)
                if error is not None:
                    raise error
            await self._news.wait()

    async def _resume(self, source: HandoffSource, decoding: "asyncio.Task[None]") -> int | None:
        call = ResumeCall(self._hold.key, self._hold.attempt, source, self._leg.posted_firsts)
        try:
            with self._leg.blaming(self._hold.worker):
                kept = await self._hold.port.resume_source(call)
        except HandoffError:
            # The reservation has ended, and its stream says why.
            await asyncio.wait({decoding}, timeout=CLOSE_SECONDS)
            if not decoding.done():
                raise
            return None
        self._trip.post(Retried("sources_replaced"))
        return kept

    def _source(self, worker: str) -> HandoffSource:
        self._leg.source = worker
        cluster = self._trip.cluster
        return HandoffSource(worker, self._trip.new_id(), cluster.address(worker), cluster.boot_id(worker))

    async def _prefill(self, source: HandoffSource, from_token: int) -> None:
        call = PrefillCall(
            request=self._trip.request,
            attempt=self._leg.attempt,
            children=self._leg.children,
            handoff_id=source.handoff_id,
            destination=self._hold.worker,
            from_token=from_token,
            deadline_seconds=self._trip.remaining(),
            age_seconds=self._trip.age(),
        )
        self._leg.notes.prefill_sent()
        reply = await self._trip.cluster.prefill_port(source.worker).prefill(call)
        self._trip.post(Waited(reply.queue_seconds))
        self._leg.post_firsts(reply.tokens)

    async def _end(self, decoding: "asyncio.Task[None]", computing: "asyncio.Task[None] | None", source: HandoffSource) -> None:
        decoding.cancel()
        await asyncio.gather(decoding, return_exceptions=True)
        await self._give_up(computing, source)

    async def _give_up(self, computing: "asyncio.Task[None] | None", source: HandoffSource, seconds: float = CLOSE_SECONDS) -> None:
        """Frees what the source holds for us, if it can still hear."""
        if computing is not None:
            computing.cancel()
            await asyncio.gather(computing, return_exceptions=True)
        port = self._trip.cluster.prefill.get(source.worker)
        if port is not None:
            await quietly(port.cancel_prefill(source.handoff_id), seconds)


def _succeeded(task: "asyncio.Task[None]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _lost(lost: SourceLost, source: HandoffSource) -> HandoffError:
    return HandoffError(f"the KV from {source.worker!r} does not come: {lost.reason}")

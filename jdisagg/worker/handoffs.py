"""The hand-offs that a decode worker is receiving: one task each, begun, aborted and reported here.

An aborted hand-off is told to its sender, so that it frees at once; a sender that cannot hear (it may be stopped) is told again until
its own lease has done it. Knows no batches: what came is reported to `done` or `failed`.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass

from jdisagg.clock import limit
from jdisagg.dispatch.ports import HandoffSource
from jdisagg.errors import JdisaggError, UnavailableError
from jdisagg.scheduler.commands import MeshLimits
from jdisagg.scheduler.sequences import Group
from jdisagg.telemetry import Counters
from jdisagg.worker.peers import Peers
from jdisagg.worker.receiver import Received, Receiver
from jdisagg.worker.step_loop import StepLoop

SPEAK_SECONDS = 5.0
FAREWELL_TRIES = 10
FAREWELL_PAUSE_SECONDS = 1.0


@dataclass(slots=True)
class _Running:
    receiver: Receiver
    task: "asyncio.Task[None]"


class Handoffs:
    """Receives for one mesh. `pull_seconds` bounds each try of a pull."""

    def __init__(
        self,
        loop: StepLoop,
        peers: Peers,
        limits: MeshLimits,
        pull_seconds: float,
        now: Callable[[], float],
        counters: Counters,
    ) -> None:
        self._loop = loop
        self._peers = peers
        self._limits = limits
        self._pull_seconds = pull_seconds
        self._now = now
        self._counters = counters
        self._running: dict[int, _Running] = {}
        self._spoken: set[asyncio.Task[object]] = set()
        self._stopping = asyncio.Event()

    def __len__(self) -> int:
        return len(self._running)

    @property
    def coming(self) -> bool:
        """Whether blocks are being pulled, or on their way into the pages."""
        return any([running.receiver.pulling or running.receiver.inserting for running in self._running.values()])

    def completing_before(self, step: int) -> bool:
        """Whether a hand-off will be complete as soon as insertions have ended that were issued before command `step`."""
        receivers = [running.receiver for running in self._running.values()]
        return any([receiver.completing and receiver.last_insertion < step for receiver in receivers])

    def peers(self) -> set[str]:
        """Whom blocks are being received from, by their names in commands."""
        return {running.receiver.link.peer for running in self._running.values()}

    def begin(
        self,
        group: Group,
        source: HandoffSource,
        pages: Callable[[int], tuple[int, ...]],
        cached_tokens: int,
        done: Callable[[Received], None],
        failed: Callable[[JdisaggError, int], None],
    ) -> None:
        """Starts receiving into `pages`; ends in exactly one call of `done` or `failed` (with how many positions are here), unless it
        is aborted."""
        try:
            peer = self._peers.find(source)
        except JdisaggError as error:
            failed(error, cached_tokens)
            return
        receiver = Receiver(
            loop=self._loop,
            peer=peer,
            source=source,
            attempt=group.attempt,
            rank=group.rank,
            pages=pages,
            layer_groups=self._limits.layer_groups,
            cached_tokens=cached_tokens,
            pull_seconds=self._pull_seconds,
            counters=self._counters,
            now=self._now,
            speak=self._speak,
        )
        task = asyncio.get_running_loop().create_task(self._receive(group.key, receiver, done, failed))
        self._running[group.key] = _Running(receiver, task)

    def abort(self, key: int, reason: str) -> int | None:
        """Nothing is inserted from now on; the sender is told. Returns how many positions are here; None when none is under way."""
        running = self._running.pop(key, None)
        if running is None:
            return None
        running.receiver.close()
        running.task.cancel()
        self._say_farewell(running.receiver, reason)
        return running.receiver.kept_tokens()

    async def stop(self) -> None:
        self._stopping.set()
        for key in list(self._running):
            self.abort(key, "the receiver stops")
        while self._spoken:  # a word may be followed by one more
            await asyncio.gather(*self._spoken, return_exceptions=True)

    async def _receive(
        self, key: int, receiver: Receiver, done: Callable[[Received], None], failed: Callable[[JdisaggError, int], None]
    ) -> None:
        try:
            receiver.link = await self._peers.greet(receiver.source, receiver.peer)
            received = await receiver.receive()
            if not receiver.closed:
                del self._running[key]
                done(received)
        except Exception as error:
            if receiver.closed:
                return  # aborted: another may be receiving into this reservation by now
            self._counters.add("handoffs_failed")
            self._running.pop(key, None)
            receiver.close()
            self._say_farewell(receiver, str(error))
            known = error if isinstance(error, JdisaggError) else UnavailableError(f"hand-off failed: {type(error).__name__}: {error}")
            failed(known, receiver.kept_tokens())

    def _say_farewell(self, receiver: Receiver, reason: str) -> None:
        peer, handoff_id = receiver.peer, receiver.source.handoff_id
        self._aside(self._bid_farewell(lambda: peer.abort(handoff_id, reason)))

    async def _bid_farewell(self, message: Callable[[], Awaitable[None]]) -> None:
        for _ in range(FAREWELL_TRIES):
            if await self._say(message):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_PAUSE_SECONDS):
                    await self._stopping.wait()
                    return

    def _speak(self, message: Callable[[], Awaitable[None]]) -> None:
        """Runs a message to a sender that nobody waits for; when it is lost, the sender's lease makes up for it."""
        self._aside(self._say(message))

    async def _say(self, message: Callable[[], Awaitable[None]]) -> bool:
        try:
            with limit(SPEAK_SECONDS):
                await message()
        except (JdisaggError, TimeoutError):
            self._counters.add("messages_to_senders_lost")
            return False
        return True

    def _aside(self, speaking: Coroutine[None, None, object]) -> None:
        task = asyncio.get_running_loop().create_task(speaking)
        self._spoken.add(task)
        task.add_done_callback(self._spoken.discard)

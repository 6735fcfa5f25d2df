"""The leader's bookkeeping of its follower processes: which have joined, are ready and are alive.
The failure of one follower fails the whole instance.

Each follower's stream is a `FollowerSession` on any transport, so that this module needs only
asyncio. Invariants: every follower receives every command, in the same order. A follower cannot
join twice, after the start, or without the secret. After the first failure, no command is sent, and
`failure` has the reason."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable

from jdisagg.clock import Clock
from jdisagg.errors import InvalidRequestError, UnavailableError
from jdisagg.instance.liveness import SilenceWatch
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.instance import (
    Beat,
    Begin,
    Failed,
    FollowerMessage,
    Join,
    LeaderMessage,
    Ordered,
    Ready,
    Reported,
    Stop,
)
from jdisagg.messages.packed import pack
from jdisagg.messages.step_commands import StepCommand
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, InstanceTimeouts


class FollowerSession:
    """The leader's end of the stream to one follower."""

    def __init__(self, membership: "Followers", join: Join, now: float) -> None:
        self.process, self.end = join.process, join.end
        self.ready = asyncio.Event()
        self.watch = SilenceWatch(now)
        self._membership = membership
        self._outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()

    def send(self, packed: bytes) -> None:
        self._outgoing.put_nowait(packed)

    def close(self) -> None:
        """Ends the stream after all queued messages have been sent."""
        self._outgoing.put_nowait(None)

    async def outgoing(self) -> AsyncIterator[bytes]:
        while (packed := await self._outgoing.get()) is not None:
            yield packed

    def received(self, message: FollowerMessage) -> None:
        self.watch.heard()
        match message:
            case Ready():
                self.ready.set()
            case Reported() | Failed():
                self._membership.told(self.process, message)
            case Join():
                raise InvalidRequestError(
                    f"instance: process {self.process} joined twice on one stream"
                )

    def ended(self, reason: str) -> None:
        """Called when the follower's stream has ended. Fails the instance for this reason."""
        self._membership.fail(f"process {self.process}: {reason}")


class Followers:
    """The followers of one instance. Use it on one event loop only."""

    def __init__(
        self, processes: int, clock: Clock, timeouts: InstanceTimeouts = DEFAULT_TIMEOUTS.instance
    ) -> None:
        self.processes = processes
        self.failure: UnavailableError | None = None
        self.secret = secrets.randbits(64)
        self._clock = clock
        self._timeouts = timeouts
        self._sessions: dict[int, FollowerSession] = {}
        self._changed = asyncio.Event()
        self._failed = asyncio.Event()
        self._on_failure: list[Callable[[UnavailableError], None]] = []
        self._on_told: Callable[[int, Reported | Failed], None] | None = None
        self._number = 0
        self._running = self._stopped = False
        self._pulse: asyncio.Task[None] | None = None

    def join(self, join: Join) -> FollowerSession:
        """Adds a follower. Raises `InvalidRequestError` if the follower does not belong to this
        instance, and `UnavailableError` after the start or a failure."""
        if join.secret != self.secret:
            raise InvalidRequestError(
                "instance: the secret of a joining process is not this instance's; start all"
                " processes together"
            )
        if not 1 <= join.process < self.processes:
            raise InvalidRequestError(
                f"instance: process {join.process} must be in [1, {self.processes})"
            )
        if self.failure or self._stopped:
            raise UnavailableError(
                f"instance: it is over ({self.failure or 'stopped'}); restart all its processes"
            )
        if join.process in self._sessions:
            raise InvalidRequestError(
                f"instance: process {join.process} has joined already; restart all processes"
            )
        session = self._sessions[join.process] = FollowerSession(self, join, self._clock.now())
        if self._pulse is None:
            self._pulse = asyncio.get_running_loop().create_task(self._beat_and_watch())
        self._changed.set()
        return session

    async def all_ready(self, timeout_seconds: float) -> None:
        """Waits until every follower has joined and compiled its programs. Then sends `Begin` to
        all followers. Raises `UnavailableError` if the instance fails, or if a follower is not
        ready within `timeout_seconds`."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while len(self._sessions) < self.processes - 1 and not self.failure:
                    self._changed.clear()
                    await self._changed.wait()
                for session in self._sessions.values():
                    await self._or_failure(session.ready)
        except TimeoutError:
            missing = sorted(
                number
                for number in range(1, self.processes)
                if number not in self._sessions or not self._sessions[number].ready.is_set()
            )
            self.fail(f"processes {missing} were not ready within {timeout_seconds} s")
        if self.failure:
            raise self.failure
        self._running = True
        self._send_all(Begin())

    def ends(self, own: KvEnd | None) -> tuple[KvEnd, ...]:
        """Returns the KV endpoints of all processes, in the order of their index. Returns () if a
        process has none. `own` is the leader's endpoint."""
        ends = [own, *(self._sessions[number].end for number in sorted(self._sessions))]
        return tuple(end for end in ends if end) if all(ends) else ()

    def order(self, command: StepCommand) -> int:
        self._number += 1
        self._send_all(Ordered(self._number, command))
        return self._number

    def when_told(self, callback: Callable[[int, Reported | Failed], None]) -> None:
        self._on_told = callback

    def when_failed(self, callback: Callable[[UnavailableError], None]) -> None:
        self._on_failure.append(callback)

    async def failed(self) -> UnavailableError:
        """Waits until the instance fails, and returns the error. All processes must then exit,
        because collectives may hang."""
        await self._failed.wait()
        assert self.failure
        return self.failure

    def told(self, process: int, message: Reported | Failed) -> None:
        if self._on_told and not self.failure:
            self._on_told(process, message)

    def fail(self, why: str) -> None:
        """Fails the instance for the reason `why`. Has no effect if the instance has already failed
        or stopped."""
        if self.failure or self._stopped:
            return
        self.failure = UnavailableError(
            f"the instance failed: {why}; all its processes end; restart them"
        )
        self._failed.set()
        self._changed.set()
        for callback in self._on_failure:
            callback(self.failure)
        self._close()

    def stop(self) -> None:
        """Stops the followers after they have run their queued commands. Idempotent."""
        if not self._stopped and not self.failure:
            self._stopped = True
            self._send_all(Stop())
            self._close()

    def _close(self) -> None:
        for session in self._sessions.values():
            session.close()
        if self._pulse:
            self._pulse.cancel()

    def _send_all(self, message: LeaderMessage) -> None:
        packed = pack(message)
        for session in self._sessions.values():
            session.send(packed)

    async def _or_failure(self, event: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(self._failed.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await wait

    async def _beat_and_watch(self) -> None:
        next_beat = self._clock.now()
        while True:
            now = self._clock.now()
            if now >= next_beat:
                self._send_all(Beat())
                next_beat = now + self._timeouts.beat_seconds
            limit = (
                self._timeouts.silence_seconds
                if self._running
                else self._timeouts.starting_silence_seconds
            )
            for session in self._sessions.values():
                if session.watch.look(now) > limit:
                    self.fail(f"process {session.process} was silent for {limit} s")
                    return
            await asyncio.sleep(self._timeouts.look_seconds)

"""The main loop of a follower, a process that runs the leader's commands in order on its own part
of the mesh.

The loop returns when the leader stops the follower. It raises `UnavailableError` if the leader ends
or sends no messages, or if a command breaks the mesh. The process must then exit at once, because
programs may hang in a collective."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from jdisagg.clock import Clock
from jdisagg.errors import HandoffError, IncompatiblePeerError, UnavailableError
from jdisagg.instance.liveness import SilenceWatch
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
from jdisagg.messages.step_commands import IN_PARTS, StepResult
from jdisagg.scheduler.executor import Executor
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, InstanceTimeouts


class LeaderLink(Protocol):
    """The follower's end of the bidirectional stream to the leader."""

    def send(self, message: FollowerMessage) -> None:
        """Queues a message for the leader. Never blocks."""
        ...

    def received(self) -> AsyncIterator[LeaderMessage]:
        """Yields the leader's messages. Raises `JdisaggError` if the stream fails."""
        ...

    async def close(self) -> None: ...


async def run_follower(
    link: LeaderLink,
    join: Join,
    executor: Executor,
    prepare: Callable[[], Awaitable[None]],
    clock: Clock,
    timeouts: InstanceTimeouts = DEFAULT_TIMEOUTS.instance,
) -> None:
    """Joins the leader, awaits `prepare`, and then runs commands until the leader stops this
    follower.

    Args:
        prepare: Function that compiles the programs. It must run the same collectives in all
            processes of the instance.

    Raises:
        UnavailableError: The instance failed. The process must exit at once.
    """
    await _Follower(link, executor, clock, timeouts).run(join, prepare)


class _Follower:
    def __init__(
        self, link: LeaderLink, executor: Executor, clock: Clock, timeouts: InstanceTimeouts
    ) -> None:
        self._link, self._executor, self._clock, self._timeouts = link, executor, clock, timeouts
        self._watch = SilenceWatch(clock.now())
        self._running = False
        self._next = 1
        self._under_way: set[asyncio.Future[StepResult]] = set()

    async def run(self, join: Join, prepare: Callable[[], Awaitable[None]]) -> None:
        self._link.send(join)
        obey = asyncio.ensure_future(self._obey())
        broken: list[BaseException] = []

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()):
                broken.append(error)
                obey.cancel()

        helpers = [
            asyncio.create_task(self._beat_and_watch()),
            asyncio.create_task(self._prepare(prepare)),
        ]
        for helper in helpers:
            helper.add_done_callback(ended)
        try:
            await obey
        except asyncio.CancelledError:
            if broken:
                raise broken[0] from None
            raise
        finally:
            for helper in helpers:
                helper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._link.close()

    async def _prepare(self, prepare: Callable[[], Awaitable[None]]) -> None:
        await prepare()
        self._link.send(Ready())

    async def _obey(self) -> None:
        async for message in self._link.received():
            self._watch.heard()
            match message:
                case Begin():
                    self._running = True
                case Ordered():
                    self._run(message)
                case Stop():
                    if self._under_way:
                        await asyncio.wait(
                            set(self._under_way), timeout=self._timeouts.silence_seconds
                        )
                    return
                case Beat():
                    pass
        raise UnavailableError(
            "the instance failed: the leader's stream ended; restart all processes of the instance"
        )

    def _run(self, order: Ordered) -> None:
        if order.number != self._next:
            raise UnavailableError(
                f"the instance failed: command {self._next} is missing, {order.number} came;"
                " restart the instance"
            )
        self._next += 1
        future = asyncio.ensure_future(self._executor.run(order.command))
        self._under_way.add(future)
        future.add_done_callback(lambda done: self._report(order, done))

    def _report(self, order: Ordered, done: "asyncio.Future[StepResult]") -> None:
        self._under_way.discard(done)
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            expected = isinstance(error, (HandoffError, IncompatiblePeerError))
            self._link.send(Failed(order.number, str(error), fatal=not expected))
        elif isinstance(order.command, IN_PARTS):
            self._link.send(Reported(order.number, done.result()))

    async def _beat_and_watch(self) -> None:
        next_beat = self._clock.now()
        while True:
            now = self._clock.now()
            if now >= next_beat:
                self._link.send(Beat())
                next_beat = now + self._timeouts.beat_seconds
            limit = (
                self._timeouts.silence_seconds
                if self._running
                else self._timeouts.starting_silence_seconds
            )
            if self._watch.look(now) > limit:
                raise UnavailableError(
                    f"the instance failed: the leader was silent for {limit} s; restart it"
                )
            await asyncio.sleep(self._timeouts.look_seconds)

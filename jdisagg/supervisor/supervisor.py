"""Keeps groups of child processes running, and stops them in order.

A group is what lives and dies as one: a router, a worker, or the processes of one instance. When a
member ends unasked, the others are killed and the group is started again after a pause, which
doubles with each quick death and starts anew after a long life. A member that ends with
`EXIT_CONFIG` cannot work as it was told to: it is not started again, and `failed` is told.

Pure asyncio; knows nothing of what the processes do. All on one event loop. Invariants: no child
outlives `stop` of its group; `stop` ends within its seconds and a kill; nothing is started after
`stop` began."""

import asyncio
import contextlib
import enum
import errno
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jdisagg.clock import Clock
from jdisagg.supervisor.child_process import ChildProcess, Command, TakeLine
from jdisagg.timeouts import DEFAULT_TIMEOUTS, ProcessTimeouts

EXIT_CONFIG = os.EX_CONFIG
EXIT_BROKEN = 3  # of a process whose mesh broke: start it again
# no processes, memory or files just now
_PASSING = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class GroupState(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True)
class GroupSpec:
    """`commands` is asked at each start, so that what must be fresh (a coordinator's port) can
    be."""

    name: str
    commands: Callable[[], Sequence[Command]]


class SupervisedGroup:
    """One group, from `start` to `stop`. `say(name, text)` hears what happens to it."""

    def __init__(
        self,
        spec: GroupSpec,
        clock: Clock,
        take_line: TakeLine,
        say: TakeLine,
        failed: Callable[[str], None],
        timeouts: ProcessTimeouts = DEFAULT_TIMEOUTS.process,
    ) -> None:
        self.name = spec.name
        self.state = GroupState.STARTING
        self.restarts = 0
        self.children: list[ChildProcess] = []
        self._spec = spec
        self._clock = clock
        self._take_line = take_line
        self._say = say
        self._failed = failed
        self._timeouts = timeouts
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._run(), name=f"group {self.name}")

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the members that run."""
        return tuple(child.pid for child in self.children if child.status is None)

    async def stop(self, seconds: float) -> None:
        """SIGTERM, and after `seconds` SIGKILL, to all members. Idempotent; a later call with fewer
        seconds hurries the first."""
        self._stopping.set()
        self.state = GroupState.ENDED if self.state is GroupState.ENDED else GroupState.STOPPING
        for child in self.children:
            child.signal(signal.SIGTERM)
        if self._task is None:
            return
        await asyncio.wait({self._task}, timeout=seconds)
        if not self._task.done():
            if seconds > 0:  # else it was not given any time
                self._say(self.name, f"did not end within {seconds:g} s of SIGTERM: killed")
            self.kill()
        await asyncio.wait({self._task})
        self._task.result()

    def kill(self) -> None:
        """SIGKILL to all members; what follows is up to whether the group is being stopped."""
        for child in self.children:
            child.kill()

    async def _run(self) -> None:
        ends = 0  # in a row, each after a short life
        while not self._stopping.is_set():
            began = self._clock.now()
            last = await self._live()
            if last == EXIT_CONFIG and not self._stopping.is_set():
                self._failed(self.name)
                break
            if self._stopping.is_set():
                break
            lived_long = self._clock.now() - began > self._timeouts.long_life_seconds
            ends = 1 if lived_long else ends + 1
            pause = self._timeouts.restart.seconds(ends)
            self.state = GroupState.PAUSED
            self._say(self.name, f"starts again in {pause:g} s")
            await self._pause(pause)
            self.restarts += 1
        self.state = GroupState.ENDED

    async def _live(self) -> int | None:
        """From the start of all members to the end of all; the exit status of the first that
        ended."""
        ends: dict[asyncio.Task[int], ChildProcess] = {}
        first: int | None = None
        self.state = GroupState.STARTING
        self.children = []
        try:
            for command in self._spec.commands():
                if self._stopping.is_set():
                    break
                child = await ChildProcess.start(command, self._take_line)
                self.children.append(child)
                ends[asyncio.create_task(child.ended())] = child
            self.state = GroupState.RUNNING
            if self._stopping.is_set():  # it was asked to while the members were being started
                for child in self.children:
                    child.signal(signal.SIGTERM)
            while ends:
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    child = ends.pop(task)
                    status = task.result()
                    first = status if first is None else first
                    if not self._stopping.is_set() or status:
                        self._say(child.name, f"process {child.pid} ended: {end_in_words(status)}")
                if not self._stopping.is_set():
                    self.kill()  # the others cannot go on without it
        except OSError as error:
            self._say(self.name, f"cannot be started: {error}")
            first = os.EX_OSERR if error.errno in _PASSING else EXIT_CONFIG
        finally:
            self.kill()
            if ends:
                await asyncio.wait(ends)
        return first

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)


def end_in_words(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"

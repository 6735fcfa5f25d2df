"""Runs groups of child processes, restarts groups that end, and stops them in order.

A group consists of the processes of one router or one worker (its members). When a member ends
without being stopped, the others are killed, and the group is restarted after a pause. If a member
ends with `EXIT_CONFIG`, its configuration is unusable. The group is then not restarted, and
`failed` is called.

All methods run on one asyncio event loop. Invariants: when `stop` returns, no member runs. `stop`
kills members after its time limit. No member is started after `stop` was called."""

import asyncio
import contextlib
import enum
import errno
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jdisagg.clock import Clock
from jdisagg.errors import ConfigError
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, ProcessTimeouts
from jdisagg.supervisor.child_process import ChildProcess, Command, TakeLine

EXIT_CONFIG = os.EX_CONFIG
EXIT_BROKEN = 3  # the mesh of a process failed, and the process is restarted
# Errors of a temporary lack of processes, memory, files or disk space.
_PASSING = (
    *(errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
    *(errno.ENOSPC, errno.EDQUOT),
)


class GroupState(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True)
class GroupSpec:
    """Name of a group, and the function `commands` that returns the commands of its members. It is
    called at each start and restart, so that the commands can contain new values, such as the port
    of a JAX coordinator. It may raise OSError or ConfigError."""

    name: str
    commands: Callable[[], Sequence[Command]]


class Member(Protocol):
    """A process of a group, running or ended. It is a `ChildProcess`, or a process on another host
    with the same interface."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int: ...

    @property
    def status(self) -> int | None: ...

    async def ended(self) -> int: ...

    def signal(self, number: signal.Signals) -> None: ...

    def kill(self) -> None: ...


StartMember = Callable[[Command, TakeLine], Awaitable[Member]]


async def start_here(command: Command, take_line: TakeLine) -> Member:
    return await ChildProcess.start(command, take_line)


class SupervisedGroup:
    """One supervised group.

    Args:
        say: Callback for messages about starts and ends, with a name and the message.
        failed: Callback if the configuration is unusable, with the group's name.
    """

    def __init__(
        self,
        spec: GroupSpec,
        clock: Clock,
        take_line: TakeLine,
        say: TakeLine,
        failed: Callable[[str], None],
        timeouts: ProcessTimeouts = DEFAULT_TIMEOUTS.process,
        start_child: StartMember = start_here,
    ) -> None:
        self._start_child = start_child
        self.name = spec.name
        self.state = GroupState.STARTING
        self.restarts = 0
        self.children: list[Member] = []
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
        return tuple(child.pid for child in self.children if child.status is None)

    async def stop(self, seconds: float) -> None:
        """Stops all members: sends SIGTERM, and SIGKILL after `seconds` to those that still run.
        Returns when all have ended. Idempotent. A second call with fewer seconds shortens the
        wait."""
        self._stopping.set()
        self.state = GroupState.ENDED if self.state is GroupState.ENDED else GroupState.STOPPING
        for child in self.children:
            child.signal(signal.SIGTERM)
        if self._task is None:
            return
        await asyncio.wait({self._task}, timeout=seconds)
        if not self._task.done():
            if seconds > 0:  # with 0 the group had no time to end
                self._say(self.name, f"did not end within {seconds:g} s of SIGTERM: killed")
            self.kill()
        await asyncio.wait({self._task})
        self._task.result()

    def kill(self) -> None:
        """Sends SIGKILL to all members. The group then restarts, except during `stop`."""
        for child in self.children:
            child.kill()

    async def _run(self) -> None:
        ends = 0  # number of consecutive short runs
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
        ends: dict[asyncio.Task[int], Member] = {}
        first: int | None = None
        self.state = GroupState.STARTING
        self.children = []
        try:
            for command in self._spec.commands():
                if self._stopping.is_set():
                    break
                child = await self._start_child(command, self._take_line)
                self.children.append(child)
                ends[asyncio.create_task(child.ended())] = child
            self.state = GroupState.RUNNING
            if self._stopping.is_set():  # stop was called while the members were being started
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
                    self.kill()  # the other members cannot continue without it
        except (OSError, ConfigError) as error:
            self._say(self.name, f"cannot be started: {error}")
            passing = isinstance(error, OSError) and error.errno in _PASSING
            first = os.EX_OSERR if passing else EXIT_CONFIG
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

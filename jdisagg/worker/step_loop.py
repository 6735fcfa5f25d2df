"""The commands of one mesh on their way: issued in order, read back in order, two in flight (or
`depth`).

The worker takes a turn when a result has come and when `wake` was called: it reads back what has
`finished` and issues what comes next while there `is_room`. Between turns nothing runs. Commands
outside this rhythm (pulls, inserts, copies, releases) go through `submit` and `fire`; they take
their place in the mesh's order at the moment of the call."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import get_args

from jdisagg.errors import JdisaggError, UnavailableError
from jdisagg.messages.step_commands import (
    DiskCommand,
    ExtractBlock,
    PullBlock,
    StepCommand,
    StepResult,
)
from jdisagg.scheduler.executor import Executor

DEPTH = 2
_IN_BACKGROUND = frozenset((PullBlock, *get_args(DiskCommand)))

_log = logging.getLogger(__name__)


class StepLoop:
    """Issues commands to `executor` until stopped or broken. `turn` is called to plan; `failed`
    once, when the mesh broke. `depth`: planned commands in flight, at most."""

    def __init__(
        self,
        executor: Executor,
        turn: Callable[[], None],
        failed: Callable[[UnavailableError], None],
        now: Callable[[], float] = lambda: 0.0,
        depth: int = DEPTH,
    ) -> None:
        self._executor = executor
        self._turn = turn
        self._on_failure = failed
        self._now = now
        self._depth = depth
        self._steps = 0
        self._turn_due = False
        self._flight: deque[tuple[StepCommand, asyncio.Future[StepResult]]] = deque()
        # all commands but those in the background that have not ended: when each was issued, and
        # its kind
        self._running: deque[tuple[float, type, asyncio.Future[StepResult]]] = deque()
        self._ended_at = 0.0  # when one of them was last seen to have ended
        self._events: asyncio.AbstractEventLoop | None = None  # while it is started
        self.failure: UnavailableError | None = None

    def start(self) -> None:
        assert self._events is None, "started twice"
        self._events = asyncio.get_running_loop()
        self.wake()

    async def stop(self) -> None:
        """Stops planning; commands in flight run out on the mesh, unread."""
        self._events = None

    def wake(self) -> None:
        """A turn is taken soon."""
        if not self._turn_due and self._events is not None:
            self._turn_due = True
            self._events.call_soon(self._take_turn)

    def has_finished(self) -> bool:
        """Whether `finished` has any to tell of."""
        return bool(self._flight) and self._flight[0][1].done()

    def finished(self) -> Iterator[tuple[StepCommand, StepResult]]:
        """Planned commands that have ended, in order of issue, each taken out of flight. What wakes
        the loop meanwhile need not: the turn goes on to plan."""
        self._turn_due = True
        while self._flight and self._flight[0][1].done():
            command, future = self._flight.popleft()
            yield command, future.result()
        self._turn_due = False

    def is_room(self) -> bool:
        """Whether one more planned command may be issued."""
        return len(self._flight) < self._depth and self.failure is None

    def issue(self, command: StepCommand) -> None:
        """Enqueues a planned command; its result comes with `finished`."""
        future = self.submit(command)
        future.add_done_callback(self._came_back)
        self._flight.append((command, future))

    def next_number(self) -> int:
        self._steps += 1
        return self._steps

    def in_flight(self, kind: type) -> bool:
        """Whether a planned command of this kind was issued and its result not yet applied."""
        return any([isinstance(command, kind) for command, _ in self._flight])

    def newest(self, kind: type) -> int:
        """The number of the planned command of this kind that was issued last and is in flight; 0:
        there is none."""
        for command, _ in reversed(self._flight):
            if isinstance(command, kind):
                return command.step
        return 0

    def check(self) -> None:
        """Raises what broke the mesh, if it is broken: a fresh error for each caller."""
        if self.failure is not None:
            raise UnavailableError(self.failure.message) from self.failure

    def submit(self, command: StepCommand) -> "asyncio.Future[StepResult]":
        """Enqueues a command now; the future gives its result or raises."""
        if self.failure is not None:
            self.check()
        result = self._executor.run(command)
        future = result if isinstance(result, asyncio.Future) else asyncio.ensure_future(result)
        # these have deadlines of their own, and block nothing; nor does a copy to host memory
        kind = type(command)
        if kind not in _IN_BACKGROUND and not (
            isinstance(command, ExtractBlock) and command.to_host
        ):
            self._forget_done()
            self._running.append((self._now(), kind, future))
        return future

    def break_if_stalled(self, seconds: float) -> None:
        """A command that takes longer than `seconds` will never end: the mesh hangs, and the worker
        with it. How long it waited behind others does not count."""
        self._forget_done()
        if self._running and self._now() - max(self._running[0][0], self._ended_at) > seconds:
            name = self._running[0][1].__name__
            self.break_down(
                UnavailableError(f"{name} did not end within {seconds:g} s (limits.step_seconds)")
            )

    def behind(self, instant: float) -> bool:
        """Whether the mesh is still busy with what was issued by then, so that what was issued
        later may not have begun."""
        self._forget_done()
        return bool(self._running) and self._running[0][0] <= instant

    def _forget_done(self) -> None:
        """Commands end in their order, but for a few."""
        running = self._running
        if running and running[0][2].done():
            while running and running[0][2].done():
                running.popleft()
            self._ended_at = self._now()

    def fire(self, command: StepCommand) -> None:
        """Enqueues a command whose result carries nothing; when it fails, the mesh is broken."""
        if self.failure is None:
            try:
                future = self.submit(command)
                if future.done():
                    self._check(future)
                else:
                    future.add_done_callback(self._check)
            except Exception as error:
                self.break_down(error)

    def break_down(self, error: BaseException) -> None:
        """The mesh failed: nothing on it can be trusted any more. Reported once."""
        if self.failure is not None:
            return
        text = (
            error.message if isinstance(error, JdisaggError) else f"{type(error).__name__}: {error}"
        )
        self.failure = UnavailableError(f"the mesh's program failed: {text}; restart the worker")
        self.failure.__cause__ = error
        _log.error("%s", self.failure.message, exc_info=error)
        self._on_failure(self.failure)

    def _came_back(self, future: "asyncio.Future[StepResult]") -> None:
        if not future.cancelled():
            future.exception()  # seen: it is raised when its turn to be read comes, if it does
        self._take_turn()

    def _check(self, future: "asyncio.Future[StepResult]") -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self.break_down(error)

    def _take_turn(self) -> None:
        self._turn_due = False
        if self._events is not None and self.failure is None:
            try:
                self._turn()
            except Exception as error:
                self.break_down(error)

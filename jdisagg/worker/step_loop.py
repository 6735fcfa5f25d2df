"""Issues the commands of one mesh in order and reads their results in order.

The loop runs when the result of a planned command (prefill or decode) has arrived and when `wake`
was called. It processes finished results and takes turns (`scheduler/turn.py`) until `depth`
commands are in flight or a turn has none. It takes at least one turn.
Other commands (pulls, inserts, copies, releases) are issued by `submit` and `fire`, which append
them to the mesh's queue before they return."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import get_args

from jdisagg.errors import JdisaggError, UnavailableError
from jdisagg.messages.step_commands import (
    DecodeSteps,
    DiskCommand,
    ExtractBlock,
    OfferWeights,
    PrefillChunk,
    PullBlock,
    ReadAdapter,
    ReadWeights,
    SleepMesh,
    StepCommand,
    StepResult,
    WakeMesh,
)
from jdisagg.scheduler.executor import Executor

DEPTH = 2
PATCHES = 2048  # image patches for which a command gets `limits.step_seconds` more time
_IN_BACKGROUND = frozenset(
    (PullBlock, ReadAdapter, ReadWeights, OfferWeights, SleepMesh, WakeMesh, *get_args(DiskCommand))
)

_log = logging.getLogger(__name__)


class StepLoop:
    """Issues commands to one executor until it is stopped or the mesh fails.

    Args:
        turn: Function that takes a turn and returns the next command, given its number, or None if
            no work is ready. The number is None if enough commands are in flight.
        apply: Function that is called with each command from `turn` and its result, in the order in
            which the commands were issued.
        depth: Largest number of commands from `turn` in flight.
        before: Function that is called before each command is issued. It may issue others.

    Attributes:
        took: Seconds that the command of the newest result took. Counted from the command's issue
            or from the previous result, whichever is later.
    """

    def __init__(
        self,
        executor: Executor,
        turn: Callable[[int | None], StepCommand | None],
        apply: Callable[[StepCommand, StepResult], None],
        failed: Callable[[UnavailableError], None],
        now: Callable[[], float] = lambda: 0.0,
        depth: int = DEPTH,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._executor = executor
        self._turn = turn
        self._apply = apply
        self._on_failure = failed
        self._now = now
        self._depth = depth
        self._before = before
        self._steps = 0
        self._turn_due = False
        self._flight: deque[tuple[StepCommand, asyncio.Future[StepResult], float]] = deque()
        self._applied_at = self.took = 0.0
        # unfinished foreground commands: time of issue, command, result
        self._running: deque[tuple[float, StepCommand, asyncio.Future[StepResult]]] = deque()
        self._ended_at = 0.0  # when one of them was last found finished
        self._events: asyncio.AbstractEventLoop | None = None  # while it is started
        self.failure: UnavailableError | None = None

    def start(self) -> None:
        assert self._events is None, "started twice"
        self._events = asyncio.get_running_loop()
        self.wake()

    async def stop(self) -> None:
        """Stops planning. Results of commands in flight are not read."""
        self._events = None

    def wake(self) -> None:
        if not self._turn_due and self._events is not None:
            self._turn_due = True
            self._events.call_soon(self._take_turn)

    def next_number(self) -> int:
        self._steps += 1
        return self._steps

    def newest(self, kind: type) -> int:
        """Returns the number of the newest command of this kind in flight; 0 if there is none."""
        for command, _, _ in reversed(self._flight):
            if isinstance(command, kind):
                return command.step
        return 0

    def check(self) -> None:
        if self.failure is not None:
            raise UnavailableError(self.failure.message) from self.failure

    def submit(self, command: StepCommand) -> "asyncio.Future[StepResult]":
        """Appends a command to the mesh's queue. Raises UnavailableError if the mesh has failed."""
        if self.failure is not None:
            self.check()
        self._before()
        result = self._executor.run(command)
        future = result if isinstance(result, asyncio.Future) else asyncio.ensure_future(result)
        # background commands and copies to host memory have their own deadlines and block nothing
        if type(command) not in _IN_BACKGROUND and not (
            isinstance(command, ExtractBlock) and command.to_host
        ):
            self._forget_done()
            self._running.append((self._now(), command, future))
        return future

    def break_if_stalled(self, seconds: float) -> None:
        """A command with images may run longer (`patience`). Time in which the command waits for
        earlier commands does not count."""
        self._forget_done()
        if not self._running:
            return
        issued_at, command, _ = self._running[0]
        most = seconds * patience(command)
        if self._now() - max(issued_at, self._ended_at) > most:
            name = type(command).__name__
            self.break_down(
                UnavailableError(f"{name} did not end within {most:g} s (limits.step_seconds)")
            )

    def behind(self, instant: float) -> bool:
        self._forget_done()
        return bool(self._running) and self._running[0][0] <= instant

    def _forget_done(self) -> None:
        running = self._running
        if running and running[0][2].done():
            while running and running[0][2].done():
                running.popleft()
            self._ended_at = self._now()

    def fire(self, command: StepCommand) -> None:
        """If the command fails, the mesh counts as failed."""
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
            future.exception()  # marks the error as retrieved; the turn raises it
        self._take_turn()

    def _check(self, future: "asyncio.Future[StepResult]") -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self.break_down(error)

    def _take_turn(self) -> None:
        self._turn_due = False
        if self._events is not None and self.failure is None:
            try:
                self._turn_due = True  # a `wake` within `apply` needs no additional turn
                while self._flight and self._flight[0][1].done():
                    self._share_time()
                    command, future, _ = self._flight.popleft()
                    self._apply(command, future.result())
                self._turn_due = False
                self._issue_more()
            except Exception as error:
                self.break_down(error)

    def _share_time(self) -> None:
        """If several results arrive together, their time is divided equally among them."""
        now, (_, _, issued_at) = self._now(), self._flight[0]
        if now > self._applied_at:
            one = len(self._flight) == 1
            done = 1 if one else sum([future.done() for _, future, _ in self._flight])
            self.took = (now - max(issued_at, self._applied_at)) / done
        self._applied_at = now

    def _issue_more(self) -> None:
        more = True
        while more and self.failure is None:
            free = len(self._flight) < self._depth
            command = self._turn(self.next_number() if free else None)
            if command is None or self.failure is not None:
                return
            future = self.submit(command)
            future.add_done_callback(self._came_back)
            self._flight.append((command, future, self._now()))
            more = len(self._flight) < self._depth


def patience(command: StepCommand) -> float:
    """Returns the time limit of a command in units of `limits.step_seconds`. It is 1, and 1 more
    for each `PATCHES` image patches that the vision encoder computes in the command."""
    chunk = command.chunk if isinstance(command, DecodeSteps) else command
    if not isinstance(chunk, PrefillChunk):
        return 1.0
    return 1 + sum([image.patches for row in chunk.rows for image in row.images]) / PATCHES

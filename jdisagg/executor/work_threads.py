"""The two threads of a mesh. The dispatch thread issues programs in order, and the completion
thread waits for their results.

The event loop never calls JAX. `submit` queues a job for the dispatch thread, which calls `issue()`
to start device work. `issue()` returns an object to wait for. The completion thread waits for
computations in order and for transfers as they arrive. It then resolves the caller's future on the
event loop."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from jdisagg.errors import JdisaggError, UnavailableError
from jdisagg.messages.step_commands import StepResult

POLL_SECONDS = 2e-4


class Waiting(Protocol):
    """Work in progress on the device, with a result to wait for."""

    in_order: bool

    def is_ready(self) -> bool: ...

    def result(self) -> StepResult:
        """Returns the result. Blocks until the result is ready. The results of steps are read in
        the order of their issue."""
        ...


@dataclass(frozen=True)
class _Job:
    issue: Callable[[], Waiting]
    future: asyncio.Future[StepResult]
    loop: asyncio.AbstractEventLoop


class WorkThreads:
    """`submit` must be called on an event loop. Jobs are issued in the order of the calls."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._issued: queue.SimpleQueue[tuple[_Job, Waiting] | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._dispatch, name=f"{name}-dispatch", daemon=True),
            threading.Thread(target=self._complete, name=f"{name}-complete", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, issue: Callable[[], Waiting]) -> asyncio.Future[StepResult]:
        """Queues a job for the dispatch thread: a function that starts device work. Returns a
        future of the result, on the running event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StepResult] = loop.create_future()
        if self._closed:
            future.set_exception(
                UnavailableError("the mesh's executor is closed; send the work to another worker")
            )
        else:
            self._jobs.put(_Job(issue, future, loop))
        return future

    def close(self) -> None:
        """Completes the issued jobs and ends both threads. Blocks until they have ended."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            for thread in self._threads:
                thread.join()

    def _dispatch(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._issued.put((job, job.issue()))
            except Exception as error:
                _resolve(job, error)
            del job
        self._issued.put(None)

    def _complete(self) -> None:
        """Keeps no reference to a completed job, because that would keep the job's executor
        alive."""
        steps: list[tuple[_Job, Waiting]] = []
        transfers: list[tuple[_Job, Waiting]] = []
        open_ = True
        while open_ or steps or transfers:
            open_ = (
                self._sort(steps, transfers, block=open_ and not steps and not transfers) and open_
            )
            busy = _finish_ready(transfers)
            if steps and (not transfers or steps[0][1].is_ready()):
                _finish(*steps.pop(0))
                busy = True
            if transfers and not busy:
                time.sleep(POLL_SECONDS)

    def _sort(
        self, steps: list[tuple[_Job, Waiting]], transfers: list[tuple[_Job, Waiting]], block: bool
    ) -> bool:
        taken = self._take(block)
        for item in taken:
            if item is not None:
                (steps if item[1].in_order else transfers).append(item)
        return None not in taken

    def _take(self, block: bool) -> list[tuple[_Job, Waiting] | None]:
        taken: list[tuple[_Job, Waiting] | None] = []
        try:
            taken.append(self._issued.get(block=block))
            while True:
                taken.append(self._issued.get_nowait())
        except queue.Empty:
            return taken


def _finish_ready(transfers: list[tuple[_Job, Waiting]]) -> bool:
    ready = [item for item in transfers if item[1].is_ready()]
    for item in ready:
        transfers.remove(item)
        _finish(*item)
    return bool(ready)


def _finish(job: _Job, waiting: Waiting) -> None:
    try:
        _resolve(job, waiting.result())
    except Exception as error:
        _resolve(job, error)


def _resolve(job: _Job, outcome: StepResult | Exception) -> None:
    def settle() -> None:
        if job.future.done():
            return
        if not isinstance(outcome, Exception):
            job.future.set_result(outcome)
        elif isinstance(outcome, JdisaggError):
            job.future.set_exception(outcome)
        else:
            error = UnavailableError(
                f"a program on the mesh failed: {type(outcome).__name__}: {outcome}"
            )
            error.__cause__ = outcome
            job.future.set_exception(error)

    try:
        job.loop.call_soon_threadsafe(settle)
    except RuntimeError:
        return  # the event loop has ended, and with it the caller

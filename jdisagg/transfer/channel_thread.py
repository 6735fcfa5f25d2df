"""The two threads of a channel. `ChannelThread` runs short jobs in order, and a periodic function.
`ComputeWait` waits until device arrays are computed.

JAX calls that may take long run on these threads. A job that raises is logged and dropped, so jobs
must report their failures themselves."""

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import jax

_log = logging.getLogger(__name__)


class ChannelThread:
    """Runs jobs in order on one daemon thread, and between them a periodic function. `regularly`:
    function that the thread calls after each job, and also if no job arrives for some time. It
    returns this time in seconds. It must return quickly, because jobs wait for it."""

    def __init__(self, name: str, regularly: Callable[[], float]) -> None:
        self._regularly = regularly
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._closed = False
        self._pause = 0.25
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], object]) -> None:
        """Queues a job. Thread-safe; never blocks. After `close` jobs are dropped."""
        if not self._closed:
            self._jobs.put(job)

    def close(self, last: Callable[[], object]) -> None:
        """Runs the queued jobs and then `last`, and ends the thread. Blocks for at most 10 s.
        Idempotent."""
        if not self._closed:
            self._jobs.put(last)
            self._jobs.put(None)
            self._closed = True
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10.0)

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            try:
                job = self._jobs.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                job = _nothing
            if job is None:
                return
            self._guarded(job)
            del job  # it holds arrays, which must not live until the next job
            self._guarded(self._regular)
            due = time.monotonic() + self._pause

    def _regular(self) -> None:
        self._pause = self._regularly()

    def _guarded(self, job: Callable[[], object]) -> None:
        try:
            job()
        except Exception:
            _log.exception("a job of the transfer channel failed")


class ComputeWait:
    """A thread that waits until arrays are computed and then calls a job. It waits for arrays with
    lower numbers first. Numbers follow the order in which the mesh computes, so that the job of a
    computed array is not delayed by an array that is computed later."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.PriorityQueue[
            tuple[float, int, Sequence[jax.Array], Callable[[], object]]
        ]
        self._jobs = queue.PriorityQueue()
        self._count = itertools.count()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def then(self, number: int, arrays: Sequence[jax.Array], job: Callable[[], object]) -> None:
        """Queues a job. Thread-safe; never blocks.

        Args:
            number: Index of the arrays in the order in which the mesh computes.
            job: Short function to call after the wait, even if the computation failed.
        """
        self._jobs.put((number, next(self._count), arrays, job))

    def close(self) -> None:
        """Ends the thread after its current wait. Blocks for at most 5 s."""
        self._jobs.put((-1, next(self._count), (), _nothing))
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            number, _, arrays, job = self._jobs.get()
            if number < 0:
                return
            with contextlib.suppress(Exception):  # the job meets the error again
                jax.block_until_ready(list(arrays))
            job()
            del arrays, job  # arrays must not live until the next job


def _nothing() -> None:
    pass

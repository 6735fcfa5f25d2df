"""A channel's own thread: runs small jobs in order, and something else every so often. JAX calls
that may take a while go here.

A job that raises is logged and forgotten: jobs must turn their failures into answers themselves."""

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
    """`regularly` runs after each job, and gives the seconds until it wants to run again if no job
    comes; it must be quick."""

    def __init__(self, name: str, regularly: Callable[[], float]) -> None:
        self._regularly = regularly
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._closed = False
        self._pause = 0.25
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], object]) -> None:
        """From any thread; never blocks. After `close` jobs are dropped."""
        if not self._closed:
            self._jobs.put(job)

    def close(self, last: Callable[[], object]) -> None:
        """Runs what is queued, then `last`, and ends. Idempotent. Waits for it, for a while."""
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
            del job  # what it holds must not live until the next one
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
    """A thread that waits for arrays to be computed, those with lower numbers first, and calls what
    is to follow. A mesh computes in order, so numbers that follow that order keep nothing
    waiting that is there."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.PriorityQueue[
            tuple[float, int, Sequence[jax.Array], Callable[[], object]]
        ]
        self._jobs = queue.PriorityQueue()
        self._count = itertools.count()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def then(self, number: int, arrays: Sequence[jax.Array], job: Callable[[], object]) -> None:
        """From any thread; never blocks. `job` must be quick, and is called also where the
        computation failed."""
        self._jobs.put((number, next(self._count), arrays, job))

    def close(self) -> None:
        """Ends when what it waits for is there. Waits for it, for a while."""
        self._jobs.put((-1, next(self._count), (), _nothing))
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            number, _, arrays, job = self._jobs.get()
            if number < 0:
                return
            with contextlib.suppress(Exception):  # who reads the arrays meets it again
                jax.block_until_ready(list(arrays))
            job()
            del arrays, job  # what they hold must not live until the next one


def _nothing() -> None:
    pass

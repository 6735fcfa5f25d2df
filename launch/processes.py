"""Simulates the candidates of a plan on all cores, one candidate per process at a time.

The results are the same as in a single process, because candidates do not affect each other and
each simulation depends only on its seed. On Linux the processes are forked, which avoids repeated
imports. Forking is safe here, because this process has no threads and uses no devices. On other
systems the processes are spawned."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.context import BaseContext

from jdisagg.simulator.planning.measure import Measurer, Task
from jdisagg.simulator.planning.planner import Spread, in_turn
from jdisagg.simulator.planning.verdict import Finding

_measurer: Measurer | None = None


def usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


def on_cores(processes: int) -> Spread:
    if processes <= 1:
        return in_turn

    def spread(measurer: Measurer, tasks: Sequence[Task]) -> Iterator[tuple[int, Finding | None]]:
        # The pool ends its processes when this block is left, also by an exception.
        with _context().Pool(min(processes, len(tasks)), _begin, (measurer,)) as pool:
            yield from pool.imap_unordered(_measure, enumerate(tasks))
            # Processes end by themselves, because terminating one that waits for work can hang.
            pool.close()
            pool.join()

    return spread


def _context() -> BaseContext:
    return multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


def _begin(measurer: Measurer) -> None:
    global _measurer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # undoes the inherited handler
    _measurer = measurer


def _measure(task: tuple[int, Task]) -> tuple[int, Finding | None]:
    assert _measurer is not None
    index, what = task
    return index, _measurer.measured(what)

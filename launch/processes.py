"""Candidates of a plan on all cores: each process simulates one at a time.

Results are those of one process: candidates are independent, and each run follows from its seed.
On Linux processes are forked (nothing here has threads of its own or a device), so that nothing is
imported twice; elsewhere they start anew."""

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
    """`processes` at once; 1: in this one."""
    if processes <= 1:
        return in_turn

    def spread(measurer: Measurer, tasks: Sequence[Task]) -> Iterator[tuple[int, Finding | None]]:
        # Leaving it in whatever way ends its processes.
        with _context().Pool(min(processes, len(tasks)), _begin, (measurer,)) as pool:
            yield from pool.imap_unordered(_measure, enumerate(tasks))
            # each leaves by itself: one that is ended as it waits for work was seen to stay
            pool.close()
            pool.join()

    return spread


def _context() -> BaseContext:
    return multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


def _begin(measurer: Measurer) -> None:
    global _measurer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends them
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # at once, whatever handler it has itself
    _measurer = measurer


def _measure(task: tuple[int, Task]) -> tuple[int, Finding | None]:
    assert _measurer is not None
    index, what = task
    return index, _measurer.measured(what)

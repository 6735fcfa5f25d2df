"""The two threads of a mesh hold nothing of what is done: a job holds its executor, and that a
model's weights."""

import asyncio
import gc
import threading
import weakref
from dataclasses import dataclass

import pytest

from jdisagg.executor.work_threads import Waiting, WorkThreads
from jdisagg.messages.step_commands import Done, StepResult


class Weights:
    pass


@dataclass
class Held:
    in_order: bool
    holds: Weights

    def is_ready(self) -> bool:
        return True

    def result(self) -> StepResult:
        return Done(1)


@pytest.mark.parametrize("in_order", [True, False])
async def test_what_a_job_held_is_let_go_when_it_is_done(in_order: bool) -> None:
    threads = WorkThreads("t")
    try:

        def job() -> tuple[weakref.ref[Weights], "weakref.ref[Waiting]"]:
            weights = Weights()
            waiting = Held(in_order, weights)
            futures.append(threads.submit(lambda: waiting))
            return weakref.ref(weights), weakref.ref(waiting)

        futures = []
        held = job()
        assert await futures.pop() == Done(1)
        async with asyncio.timeout(60):  # a collection may take seconds where a process holds much
            while any(ref() is not None for ref in held):
                gc.collect()
                await asyncio.sleep(0.01)
    finally:
        threads.close()


async def test_threads_are_quiet_when_what_was_asked_is_done_whatever_runs_beside() -> None:
    threads, go_on = WorkThreads("t"), threading.Event()
    try:

        def job() -> Waiting:
            assert go_on.wait(60)
            return Held(True, Weights())

        asked = threads.submit(job)
        quiet = asyncio.ensure_future(threads.quiet(0.01))
        await asyncio.sleep(0.1)
        assert not quiet.done(), "a job is under way"
        go_on.set()
        assert await asked == Done(1)
        await quiet
        go_on.clear()
        beside = threads.submit(job, beside=True)
        async with asyncio.timeout(60):
            await threads.quiet(0.01)
        assert not beside.done()
        go_on.set()
        await beside
    finally:
        go_on.set()
        threads.close()

"""The two threads of a mesh hold nothing of what is done: a job holds its executor, and that a
model's weights."""

import asyncio
import gc
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

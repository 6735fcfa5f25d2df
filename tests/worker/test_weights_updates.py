"""Sleep of a worker whose caller leaves."""

import asyncio
from typing import cast

import pytest

from jdisagg.messages.step_commands import Done, SleepMesh, StepCommand, StepResult, WakeMesh
from jdisagg.messages.weights import SleepCall
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.telemetry import Counters
from jdisagg.worker.step_loop import StepLoop
from jdisagg.worker.weights_updates import ServedWeights, WeightsUpdates, WorkerOfWeights

TAKES = 1.0


class Mesh:
    """Runs each command in `TAKES` seconds, and raises `error` if it is given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asleep = False
        self.error = error

    def next_number(self) -> int:
        return 1

    def check(self) -> None: ...

    def submit(self, command: StepCommand) -> "asyncio.Task[StepResult]":
        if self.error is None:
            self.asleep = isinstance(command, SleepMesh)
        assert isinstance(command, SleepMesh | WakeMesh)
        return asyncio.create_task(self._run(command))

    async def _run(self, command: StepCommand) -> StepResult:
        await asyncio.sleep(TAKES)
        if self.error is not None:
            raise self.error
        return Done(command.step)


class Quiet:
    name = "w"

    def forget_weights(self, keep: bool, identity: str) -> None: ...

    def at_rest(self) -> bool:
        return True

    async def status(self) -> WorkerStatus:
        return cast(WorkerStatus, None)


def updates(mesh: Mesh) -> WeightsUpdates:
    served = ServedWeights(start_folder="/model")
    parts = cast(WorkerOfWeights, Quiet()), served, cast(StepLoop, mesh)
    return WeightsUpdates(*parts, Counters(), asyncio.get_running_loop().time)


async def test_a_worker_whose_caller_leaves_knows_whether_the_mesh_sleeps() -> None:
    mesh = Mesh()
    weights = updates(mesh)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(TAKES / 2):
            await weights.sleep(SleepCall(1, 60.0))
    assert weights.asleep is mesh.asleep is True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(TAKES / 2):
            await weights.wake(60.0)
    assert weights.asleep is mesh.asleep is False


async def test_a_worker_whose_mesh_cannot_sleep_stays_awake() -> None:
    weights = updates(Mesh(MemoryError("no host memory")))
    with pytest.raises(MemoryError):
        await weights.sleep(SleepCall(1, 60.0))
    assert not weights.asleep

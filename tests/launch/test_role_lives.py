"""A worker process changes its role: the same weights in another layout, everything else afresh, and back again when that fails.

The process runs inside the test, on its loop; it is asked over gRPC as a router would ask.
"""

import asyncio
import contextlib
import gc
import signal
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Sequence

import jax
import pytest

from jdisagg.clock import MonotonicClock
from jdisagg.config import InstanceConfig, ModelConfig, ServiceConfig
from jdisagg.dispatch.ports import WorkerRole
from jdisagg.dispatch.roles import SwitchCall, SwitchReport, SwitchState
from jdisagg.engine.instance import Instance, Loaded, WorkerConfig
from jdisagg.errors import ConfigError, InvalidRequestError, JdisaggError, LayoutError, UnavailableError
from jdisagg.executor.mesh_executor import MeshExecutor
from jdisagg.executor.programs import Programs
from jdisagg.instance.processes import ProcessGroup
from jdisagg.layout.axes import Layout
from jdisagg.model_api import Device
from jdisagg.service.remote_ports import RemoteWorker
from jdisagg.service.role_services import RemoteRolePort
from launch.cluster_plan import free_ports
from launch.role_keeper import Role, RoleKeeper, fixed_because
from launch.worker_life import EXIT_BROKEN, WorkerSpec
from launch.worker_process import Relayout, WorkerProcess
from models.checkpoint import LoadedModel, load_model
from models.relayout import relayout
from tests.end_to_end.clusters import LLAMA

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


def real(loaded: Loaded, layout: Layout, devices: Sequence[Device]) -> Loaded:
    assert isinstance(loaded, LoadedModel)
    return relayout(loaded, layout, devices)


def failing(loaded: Loaded, layout: Layout, devices: Sequence[Device]) -> Loaded:
    raise MemoryError("no room for it")


class Running:
    def __init__(self, address: str, task: "asyncio.Task[int]") -> None:
        self.port = RemoteRolePort(address)
        self.address = address
        self.task = task

    async def report(self) -> SwitchReport:
        """As soon as it answers."""
        async with asyncio.timeout(120):
            while not self.task.done():
                with contextlib.suppress(UnavailableError):
                    return await self.port.switch_report()
                await asyncio.sleep(0.02)
        raise AssertionError(f"the process ended with {self.task.result()}")

    async def switch(self, number: int, role: WorkerRole, layout: str) -> SwitchReport:
        await self.port.switch_role(SwitchCall(number, role, Layout.parse(layout)))
        while (report := await self.report()).state is SwitchState.DRAINING:
            await asyncio.sleep(0.02)
        return report


@contextlib.asynccontextmanager
async def worker(
    relay: Relayout | None = real, role: WorkerRole = PREFILL, layout: str = "tp=2", warm_up: bool = False
) -> AsyncIterator[Running]:
    port = free_ports("127.0.0.1", 1)[0]
    config = WorkerConfig(
        model=ModelConfig(str(LLAMA), context_tokens=512),
        instance=InstanceConfig(
            layout=Layout.parse(layout), page_size=16, slots_per_rank=1, chunk_tokens=16, min_chunk_tokens=16, layer_groups=1
        ),
        service=ServiceConfig(port=port, drain_seconds=5),
        warm_up=warm_up,
        compilation_cache="",
    )
    loads: list[str] = []

    def load(layout: Layout, devices: Sequence[Device]) -> Loaded:
        loads.append(str(layout))
        return load_model(LLAMA, layout, devices)

    process = WorkerProcess(WorkerSpec("w", role, (), "llama", "tiny", "f00"), config)
    task = asyncio.create_task(process.run(ProcessGroup(0, 1), load, jax.devices()[:2], relay))
    running = Running(f"127.0.0.1:{port}", task)
    running.loads = loads  # type: ignore[attr-defined]
    try:
        await running.report()
        yield running
    finally:
        if not task.done():
            signal.raise_signal(signal.SIGTERM)
        await asyncio.wait({task}, timeout=30)
        await running.port.aclose()


async def role_of(running: Running, role: WorkerRole) -> tuple[str, str]:
    """What its own port of that role says; raises where it serves none."""
    remote = RemoteWorker(running.address)
    try:
        status = await (remote.prefill if role is PREFILL else remote.decode).status()
        return status.role.value, status.layout
    finally:
        await remote.aclose()


async def test_a_worker_changes_its_role_and_back_without_reading_its_files_again() -> None:
    async with worker() as running:
        first = await running.report()
        assert (first.state, first.role, first.switch_id) == (SwitchState.NONE, PREFILL, 0)
        assert await role_of(running, PREFILL) == ("prefill", "dp=1,tp=2,ep=1")
        there = await running.switch(7, DECODE, "dp=2")
        assert (there.state, there.switch_id, there.role, there.layout) == (SwitchState.DONE, 7, DECODE, Layout(dp=2)), there.reason
        assert there.boot_id != first.boot_id and there.total_seconds > 0
        assert await role_of(running, DECODE) == ("decode", "dp=2,tp=1,ep=1")
        with pytest.raises(JdisaggError):
            await role_of(running, PREFILL)
        back = await running.switch(8, PREFILL, "tp=2")
        assert (back.state, back.role, back.layout) == (SwitchState.DONE, PREFILL, Layout(tp=2)), back.reason
        assert running.loads == ["dp=1,tp=2,ep=1"]  # type: ignore[attr-defined]
    assert running.task.result() == 0


async def least_bytes_on_devices() -> int:
    """Within two seconds: what a mesh's threads, and those of tests before, have in hand at one instant is gone at another."""
    least = sys.maxsize
    for _ in range(20):
        gc.collect()
        least = min(least, sum(shard.data.nbytes for array in jax.live_arrays() for shard in array.addressable_shards))
        await asyncio.sleep(0.1)
    return least


async def test_memory_on_the_devices_does_not_grow_with_changes_of_role_and_programs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_, compiled = Programs.compile, list[int]()
    monkeypatch.setattr(Programs, "compile", lambda *args, **named: (compiled.append(1), compile_(*args, **named))[1])
    async with worker(warm_up=True) as running:
        seen, counts = [], [len(compiled)]
        for number in range(1, 5):
            report = await running.switch(number, (DECODE, PREFILL)[(number - 1) % 2], ("dp=2", "tp=2")[(number - 1) % 2])
            assert report.state is SwitchState.DONE, report.reason
            counts.append(len(compiled))
            seen.append(await least_bytes_on_devices())
        assert seen[0] == seen[2] and seen[1] == seen[3], seen
        assert 0 < counts[0] < counts[1] == counts[-1], f"compiled once for each role: {counts}"


async def test_a_change_that_fails_midway_brings_the_old_role_back() -> None:
    async with worker(failing) as running:
        report = await running.switch(7, DECODE, "dp=2")
        assert (report.state, report.role, report.layout) == (SwitchState.FAILED, PREFILL, Layout(tp=2))
        assert "MemoryError: no room for it" in report.reason
        assert await role_of(running, PREFILL) == ("prefill", "dp=1,tp=2,ep=1")
        assert len(running.loads) == 2, "what is left of the weights is not known: they are read again"  # type: ignore[attr-defined]


async def test_a_life_that_fails_as_it_warms_up_keeps_neither_threads_nor_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    executors: list[weakref.ref[MeshExecutor]] = []

    async def fails_the_second_time(instance: Instance, progress: object) -> None:
        executors.append(weakref.ref(instance.executor))
        if len(executors) == 2:
            raise MemoryError("no room for it")

    monkeypatch.setattr("launch.worker_life.warm_up", fails_the_second_time)
    async with worker(warm_up=True) as running:
        report = await running.switch(7, DECODE, "dp=2")
        assert (report.state, report.role) == (SwitchState.FAILED, PREFILL)
        gc.collect()
        assert [executor() is None for executor in executors] == [True, True, False]
        assert len([thread for thread in threading.enumerate() if thread.name == "w-dispatch"]) == 1


async def test_a_worker_that_cannot_come_back_ends_so_that_it_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker(failing) as running:
        monkeypatch.setattr("models.checkpoint.load_config", None)
        monkeypatch.setattr(f"{__name__}.load_model", failing)
        await running.port.switch_role(SwitchCall(7, DECODE, Layout(dp=2)))
        await asyncio.wait({running.task}, timeout=30)
        assert running.task.result() == EXIT_BROKEN


@pytest.mark.parametrize(
    ("role", "layout", "kind", "message"),
    [
        (DECODE, "dp=4", LayoutError, "needs 4 devices, and worker 'w' has 2"),
        (PREFILL, "tp=1", InvalidRequestError, "is prefill and was asked to be prefill"),
        (WorkerRole.MIXED, "tp=1", InvalidRequestError, "change places alone"),
        (DECODE, "dp=2,ep=2", LayoutError, "no experts"),
    ],
)
async def test_what_cannot_work_is_refused_before_anything_is_given_up(role: WorkerRole, layout: str, kind: type, message: str) -> None:
    async with worker() as running:
        before = await running.report()
        with pytest.raises(kind, match=message):
            await running.port.switch_role(SwitchCall(7, role, Layout.parse(layout)))
        assert await running.report() == before


async def test_a_worker_that_was_not_told_how_keeps_its_role() -> None:
    async with worker(None) as running:
        with pytest.raises(JdisaggError, match="cannot change its role"):
            await running.port.switch_role(SwitchCall(7, DECODE, Layout(dp=2)))


async def test_of_an_instance_of_several_processes_none_changes_and_what_helps_is_said() -> None:
    keeper = RoleKeeper("w", Role(PREFILL, Layout(tp=2)), 2, MonotonicClock(), fixed_because(2, True))
    with pytest.raises(ConfigError, match="worker 'w' cannot change its role: its instance has 2 processes.*end it and start it as"):
        await keeper.switch_role(SwitchCall(7, DECODE, Layout(dp=2)))
    assert not keeper.asked.is_set() and (await keeper.switch_report()).state is SwitchState.NONE


async def test_a_signal_between_two_lives_ends_the_process() -> None:
    def interrupted(loaded: Loaded, layout: Layout, devices: Sequence[Device]) -> Loaded:
        signal.raise_signal(signal.SIGTERM)
        return real(loaded, layout, devices)

    async with worker(interrupted) as running:
        await running.port.switch_role(SwitchCall(7, DECODE, Layout(dp=2)))
        await asyncio.wait({running.task}, timeout=30)
        assert running.task.result() == 0

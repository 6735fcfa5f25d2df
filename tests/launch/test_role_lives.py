"""A worker process changes its role: on its layout as it runs; on another layout with the same
weights, everything else afresh, and back again when that fails.

The process runs inside the test, on its loop; it is asked over gRPC as a router would ask."""

import asyncio
import gc
import json
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from jdisagg.assembly import WorkerHost
from jdisagg.clock import MonotonicClock
from jdisagg.config import LimitsConfig, WorkerConfig
from jdisagg.dispatch.ids import random_id
from jdisagg.engine.replica import Loaded, Replica
from jdisagg.errors import (
    ConfigError,
    InvalidRequestError,
    JdisaggError,
    LayoutError,
    UnavailableError,
)
from jdisagg.executor.mesh_executor import MeshExecutor
from jdisagg.executor.programs import Programs
from jdisagg.layout.axes import Layout
from jdisagg.messages.roles import SwitchCall, SwitchState
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.model_api import Device
from jdisagg.node.role_state import Role, RoleState, fixed_because
from jdisagg.service.internal.registry import RegistryClient
from jdisagg.service.internal.remote_ports import RemoteWorker
from jdisagg.settings.timeouts import Timeouts
from jdisagg.supervisor.supervisor import EXIT_BROKEN
from jdisagg.transfer.transfer_engine import EngineOptions
from jdisagg.worker.mesh_worker import WorkerContext
from tests import time_scale
from tests.fakes.fake_executor import toy_limits
from tests.launch.role_lives import DECODE, PREFILL, Running, failing, real, worker
from tests.worker.calls import prefill_call, reserve_call


async def role_of(running: Running, role: WorkerRole) -> tuple[str, str]:
    """What it says. It takes no prompts of the other role."""
    remote = RemoteWorker(running.address)
    try:
        with pytest.raises(UnavailableError, match=f"is a {role.value} worker now"):
            if role is DECODE:
                await remote.prefill.prefill(prefill_call())
            else:
                await remote.decode.reserve(reserve_call())
        status = await remote.decode.status()
        return status.role.value, status.layout
    finally:
        await remote.aclose()


@pytest.mark.ci
@pytest.mark.parametrize("elastic", [False, True])
async def test_a_worker_changes_its_role_on_its_layout_as_it_runs(
    elastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, pages and programs stay; those that are missing are compiled before, and once."""
    compiled, compile_ = list[int](), Programs.compile
    monkeypatch.setattr(
        Programs, "compile", lambda *args, **named: compiled.append(1) or compile_(*args, **named)
    )
    async with worker(layout="tp=1", warm_up=True, elastic=elastic) as running:
        first, counts = await running.report(), [len(compiled)]
        for number, role in enumerate((DECODE, PREFILL, DECODE), 1):
            report = await running.switch(number, role, "tp=1")
            found = (report.state, report.role, report.boot_id)
            assert found == (SwitchState.DONE, role, first.boot_id), report.reason
            assert report.build_seconds == 0.0 < report.total_seconds
            assert await role_of(running, role) == (role.value, "dp=1,tp=1,ep=1")
            counts.append(len(compiled))
        assert len(running.loads) == 1  # type: ignore[attr-defined]
        assert counts[1] == counts[2] == counts[3] > 0
        assert (counts[0] == counts[1]) is elastic
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("w-dispatch") == 1
    assert running.task.result() == 0


@pytest.mark.ci
async def test_a_role_whose_programs_cannot_be_compiled_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fails(*_: object, beside: bool = False, **__: object) -> None:
        if beside:
            raise MemoryError("no room for it")

    monkeypatch.setattr("jdisagg.node.worker.warm_up", fails)
    async with worker(layout="tp=1", warm_up=True) as running:
        before = await running.report()
        report = await running.switch(7, DECODE, "tp=1")
        found = (report.state, report.role, report.boot_id)
        assert found == (SwitchState.FAILED, PREFILL, before.boot_id)
        assert report.reason == "MemoryError: no room for it"
        assert await role_of(running, PREFILL) == ("prefill", "dp=1,tp=1,ep=1")


class MeasuredForLong:
    """The executor of a mesh whose programs are measured for longer than the test waits."""

    def __init__(self) -> None:
        self.limits, self.chosen = toy_limits(), list[bool]()

    def choose_chunks(self, every_prompt: bool) -> None:
        self.chosen.append(every_prompt)

    async def on_dispatch_thread(self, work: Callable[[], object]) -> None:
        if work.__name__ == "measure":
            await asyncio.Event().wait()
        work()


async def test_a_role_change_that_is_cut_short_leaves_the_chunks_of_the_old_role() -> None:
    mesh, context = MeasuredForLong(), WorkerContext("w", MonotonicClock(), random_id)
    host = WorkerHost(context, PREFILL, WorkerConfig())
    instance = Replica(host, cast(MeshExecutor, mesh), cast(Loaded, None))
    changing = asyncio.create_task(instance.take_role(DECODE))
    await asyncio.sleep(0.01)
    changing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await changing
    assert mesh.chosen == [False, True] and instance.host.role is PREFILL


@pytest.mark.ci
async def test_a_worker_changes_its_role_and_back_without_reading_its_files_again() -> None:
    async with worker() as running:
        first = await running.report()
        assert (first.state, first.role, first.switch_id) == (SwitchState.NONE, PREFILL, 0)
        assert await role_of(running, PREFILL) == ("prefill", "dp=1,tp=2,ep=1")
        there = await running.switch(7, DECODE, "dp=2")
        found = (there.state, there.switch_id, there.role, there.layout)
        assert found == (SwitchState.DONE, 7, DECODE, Layout(dp=2)), there.reason
        assert there.boot_id != first.boot_id and there.total_seconds > 0
        assert await role_of(running, DECODE) == ("decode", "dp=2,tp=1,ep=1")
        back = await running.switch(8, PREFILL, "tp=2")
        found = (back.state, back.role, back.layout)
        assert found == (SwitchState.DONE, PREFILL, Layout(tp=2)), back.reason
        assert running.loads == ["dp=1,tp=2,ep=1"]  # type: ignore[attr-defined]
    assert running.task.result() == 0


@pytest.mark.slow
async def test_memory_on_the_devices_does_not_grow_with_changes_of_role_and_programs_are_kept() -> (
    None
):
    """In a process of its own: what threads of tests before still hold is not the worker's."""
    lives = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.launch.role_lives", stdout=asyncio.subprocess.PIPE
    )
    output, _ = await lives.communicate()
    assert lives.returncode == 0, output.decode()
    measured = json.loads(output.splitlines()[-1])
    seen, counts = measured["bytes"], measured["compiled"]
    # The first life in the second role begins before that role's optional programs are compiled.
    assert seen[1] == seen[3] and seen[2] == seen[4] and seen[0] <= seen[2], seen
    assert 0 < counts[0] < counts[1] == counts[-1], f"compiled once for each role: {counts}"


@pytest.mark.ci
async def test_a_change_that_fails_midway_brings_the_old_role_back() -> None:
    async with worker(failing) as running:
        report = await running.switch(7, DECODE, "dp=2")
        found = (report.state, report.role, report.layout)
        assert found == (SwitchState.FAILED, PREFILL, Layout(tp=2))
        assert "MemoryError: no room for it" in report.reason
        assert await role_of(running, PREFILL) == ("prefill", "dp=1,tp=2,ep=1")
        # what is left of the weights is not known: they are read again
        assert len(running.loads) == 2  # type: ignore[attr-defined]


@pytest.mark.ci
async def test_a_life_that_fails_as_it_warms_up_keeps_neither_threads_nor_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executors: list[weakref.ref[MeshExecutor]] = []

    async def fails_the_second_time(replicas: list[Replica], *_: object) -> None:
        executors.append(weakref.ref(replicas[0].executor))
        if len(executors) == 2:
            raise MemoryError("no room for it")

    monkeypatch.setattr("jdisagg.node.worker.warm_up", fails_the_second_time)
    async with worker(warm_up=True) as running:
        report = await running.switch(7, DECODE, "dp=2")
        assert (report.state, report.role) == (SwitchState.FAILED, PREFILL)
        gc.collect()
        assert [executor() is None for executor in executors] == [True, True, False]
        assert len([thread for thread in threading.enumerate() if thread.name == "w-dispatch"]) == 1


@pytest.mark.ci
async def test_a_worker_that_cannot_come_back_ends_so_that_it_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with worker(failing) as running:
        monkeypatch.setattr("models.checkpoint.load_config", None)
        monkeypatch.setattr("tests.launch.role_lives.load_model", failing)
        await running.port.switch_role(SwitchCall(7, DECODE, Layout(dp=2)))
        await asyncio.wait({running.task}, timeout=time_scale.seconds(30))
        assert running.task.result() == EXIT_BROKEN


REFUSED: list[tuple[WorkerRole, str, type[Exception], str]] = [
    (DECODE, "dp=4", LayoutError, "needs 4 devices, and worker 'w' has 2"),
    (DECODE, "pp=2", LayoutError, "without pipeline stages"),
    (PREFILL, "tp=1", InvalidRequestError, "is prefill and was asked to be prefill"),
    (WorkerRole.MIXED, "tp=1", InvalidRequestError, "only prefill and decode"),
    (DECODE, "dp=2,ep=2", LayoutError, "no experts"),
]


async def test_what_cannot_work_is_refused_before_anything_is_given_up() -> None:
    async with worker() as running:
        before = await running.report()
        for role, layout, kind, message in REFUSED:
            with pytest.raises(kind, match=message):
                await running.port.switch_role(SwitchCall(7, role, Layout.parse(layout)))
            assert await running.report() == before


async def test_a_worker_that_was_not_told_how_keeps_its_role() -> None:
    async with worker(None) as running:
        with pytest.raises(JdisaggError, match="cannot change its role"):
            await running.port.switch_role(SwitchCall(7, DECODE, Layout(dp=2)))


async def test_of_an_instance_of_several_processes_none_changes_and_what_helps_is_said() -> None:
    role = Role(PREFILL, Layout(tp=2))
    keeper = RoleState("w", role, 2, MonotonicClock(), fixed_because(2, True))
    said = "worker 'w' cannot change its role: its instance has 2 processes.*end it and start it in"
    with pytest.raises(ConfigError, match=said):
        await keeper.switch_role(SwitchCall(7, DECODE, Layout(dp=2)))
    assert not keeper.asked.is_set() and (await keeper.switch_report()).state is SwitchState.NONE


async def test_a_signal_between_two_lives_ends_the_process() -> None:
    def interrupted(loaded: Loaded, layout: Layout, devices: Sequence[Device]) -> Loaded:
        signal.raise_signal(signal.SIGTERM)
        return real(loaded, layout, devices)

    async with worker(interrupted) as running:
        await running.port.switch_role(SwitchCall(7, DECODE, Layout(dp=2)))
        await asyncio.wait({running.task}, timeout=time_scale.seconds(30))
        assert running.task.result() == 0


@pytest.mark.ci
async def test_a_worker_waits_as_long_as_it_is_configured_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[object] = []
    register, engine = RegistryClient.__init__, EngineOptions.__post_init__

    def registers(client: RegistryClient, *given: object, **named: object) -> None:
        register(client, *given, **named)  # type: ignore[arg-type]
        waits.append(client._timeouts)

    def transfers(options: EngineOptions) -> None:
        engine(options)
        waits.append(options.timeouts)

    monkeypatch.setattr(RegistryClient, "__init__", registers)
    monkeypatch.setattr(EngineOptions, "__post_init__", transfers)
    times = Timeouts().scaled(2.0)
    async with worker(layout="tp=1", limits=LimitsConfig(timeouts=times)):
        assert waits == [times.transfer, times.membership]

"""A worker process on the loop of whoever asks for one, asked over gRPC as a router would ask; and,
as a script, what it keeps.

`python -m tests.launch.role_lives`: five changes of role, to and fro; the last line is JSON: the
bytes of all arrays on devices after each, and how many programs had been compiled at the start and
after each."""

import asyncio
import contextlib
import gc
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import jax

from jdisagg.config import InstanceConfig, LimitsConfig, ModelConfig, ServiceConfig, WorkerConfig
from jdisagg.engine.replica import Loaded
from jdisagg.errors import UnavailableError
from jdisagg.executor.programs import Programs
from jdisagg.instance.processes import ProcessGroup
from jdisagg.layout.axes import Layout
from jdisagg.messages.roles import RolePort, SwitchCall, SwitchReport, SwitchState
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.model_api import Device
from jdisagg.node.cluster_plan import free_ports
from jdisagg.node.deployment import Relayout
from jdisagg.node.run_files import WorkerProcessConfig
from jdisagg.node.worker_process import run_worker
from jdisagg.service.internal.role_services import worker_roles
from launch.model import model_source
from models.checkpoint import LoadedModel, load_model
from models.relayout import relayout
from tests import time_scale
from tests.end_to_end.clusters import GOLDEN

MODEL = GOLDEN / "llama_tied"  # of two layers: every life compiles programs of its own
PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


def real(loaded: Loaded, layout: Layout, devices: Sequence[Device]) -> Loaded:
    assert isinstance(loaded, LoadedModel)
    return relayout(loaded, layout, devices)


def failing(loaded: Loaded, layout: Layout, devices: Sequence[Device]) -> Loaded:
    raise MemoryError("no room for it")


class Running:
    def __init__(self, address: str, port: RolePort, task: "asyncio.Task[int]") -> None:
        self.port = port
        self.address = address
        self.task = task

    async def report(self) -> SwitchReport:
        """As soon as it answers."""
        async with asyncio.timeout(time_scale.seconds(600)):
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
    relay: Relayout | None = real,
    role: WorkerRole = PREFILL,
    layout: str = "tp=2",
    warm_up: bool = False,
    autotune_results: str = "",
    elastic: bool = False,
    limits: LimitsConfig | None = None,
) -> AsyncIterator[Running]:
    port = free_ports("127.0.0.1", 1)[0]
    config = WorkerConfig(
        model=ModelConfig(str(MODEL), context_tokens=256),
        instance=InstanceConfig(
            layout=Layout.parse(layout),
            page_size=16,
            slots_per_rank=1,
            chunk_tokens=16,
            min_chunk_tokens=16,
            layer_groups=1,
        ),
        service=ServiceConfig(port=port, drain_seconds=5),
        limits=limits or LimitsConfig(),
        warm_up=warm_up,
        compilation_cache="",
        autotune_results=autotune_results,
    )
    loads: list[str] = []

    def load(layout: Layout, devices: Sequence[Device]) -> Loaded:
        loads.append(str(layout))
        return load_model(MODEL, layout, devices)

    source = replace(model_source(config.model), load=load, relayout=relay)
    process = WorkerProcessConfig("w", role, (), config, devices=2, place="", elastic=elastic)
    running = run_worker(process, source, ProcessGroup(0, 1), jax.devices()[:2])
    task = asyncio.create_task(running)
    address = f"127.0.0.1:{port}"
    async with worker_roles(address) as role_port:
        running = Running(address, role_port, task)
        running.loads = loads  # type: ignore[attr-defined]
        try:
            await running.report()
            yield running
        finally:
            if not task.done():
                signal.raise_signal(signal.SIGTERM)
            await asyncio.wait({task}, timeout=time_scale.seconds(30))


async def least_bytes_on_devices() -> int:
    """Within two seconds: what a mesh's threads have in hand at one instant is gone at another."""
    least = sys.maxsize
    for _ in range(20):
        gc.collect()
        least = min(
            least,
            sum(
                shard.data.nbytes
                for array in jax.live_arrays()
                for shard in array.addressable_shards
            ),
        )
        await asyncio.sleep(0.1)
    return least


async def main() -> None:
    compile_, compiled = Programs.compile, list[int]()
    Programs.compile = lambda *args, **named: (compiled.append(1), compile_(*args, **named))[1]
    async with worker(warm_up=True) as running:
        seen, counts = [], [len(compiled)]
        for number in range(1, 6):
            report = await running.switch(
                number, (DECODE, PREFILL)[(number - 1) % 2], ("dp=2", "tp=2")[(number - 1) % 2]
            )
            assert report.state is SwitchState.DONE, report.reason
            counts.append(len(compiled))
            seen.append(await least_bytes_on_devices())
    print(json.dumps({"bytes": seen, "compiled": counts}))


if __name__ == "__main__":
    asyncio.run(main())

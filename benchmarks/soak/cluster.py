"""A cluster of real processes that faults can be injected into: router and workers as in `jdisagg
cluster`, with workers that take orders from the test.

The supervisor restarts processes as usual. All output is written to one log file."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from benchmarks.soak.orders import OrderDesk
from jdisagg.client import AsyncClient
from jdisagg.clock import MonotonicClock
from jdisagg.config import EngineConfig
from jdisagg.errors import JdisaggError
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.node.cluster_plan import ClusterConfig, plan_cluster
from jdisagg.node.recipes import ClusterShape
from jdisagg.settings.declared import assignment, changed
from jdisagg.settings.timeouts import Backoff, ProcessTimeouts
from jdisagg.supervisor.child_process import Command
from jdisagg.supervisor.supervisor import GroupSpec, SupervisedGroup
from launch.shipped import SHIPPED_MODEL
from tests import time_scale

HOST = "127.0.0.1"
ROUTER = "router"
START_SECONDS = time_scale.seconds(600.0)
MOST_STARTS = 3
# The supervisor lets who dies again and again wait ever longer; here they die because they are
# killed.
PAUSE_SECONDS = 0.4


@dataclass(frozen=True)
class Shape:
    """The cluster to start. `rate`: fault rate of every worker's channel. Without `warm_up`,
    processes serve earlier and compile when a program is needed."""

    prefill: int = 2
    decode: int = 2
    prefill_layout: str = "tp=1"
    decode_layout: str = "tp=1"
    processes: int = 1
    codec: str = "none"
    rate: float = 0.0
    seed: int = 0
    drain_seconds: float = 20.0
    warm_up: bool = True
    # All limits are the defaults: it is with those that leases must end in time.
    settings: tuple[str, ...] = ("model.context_tokens=512", "instance.growth_tokens=64")


class ChaosCluster:
    """The running cluster. `folder` has the log and the socket of orders; `cache` has the compiled
    programs."""

    def __init__(self, shape: Shape, folder: Path, cache: str) -> None:
        self.shape = shape
        self.log = folder / "processes.log"
        self.desk = OrderDesk(str(folder / "orders"))
        limits = tuple(text for text in shape.settings if not text.startswith("instance."))
        both = (
            *(text.partition(".")[2] for text in shape.settings if text.startswith("instance.")),
            *("page_size=16", "slots_per_rank=4", "chunk_tokens=64", "min_chunk_tokens=64"),
            f"codec={shape.codec}",
        )
        engine = changed(
            EngineConfig(),
            map(
                assignment,
                [
                    f"prefill.layout={shape.prefill_layout}",
                    f"decode.layout={shape.decode_layout}",
                    f"service.drain_seconds={shape.drain_seconds}",
                    f"warm_up={shape.warm_up}",
                    f"compilation_cache={cache}",
                    *limits,
                    *(f"{side}.{text}" for side in ("prefill", "decode") for text in both),
                ],
            ),
        )
        engine = replace(engine, service=replace(engine.service, port=0))
        config = ClusterConfig(
            engine,
            ClusterShape(shape.prefill, shape.decode),
            SHIPPED_MODEL,
            processes=shape.processes,
        )
        self.plan = plan_cluster(config, folder)
        specs = [self.plan.router(), *self.plan.workers()]
        self.groups = {
            spec.name: SupervisedGroup(
                self._with_orders(spec),
                MonotonicClock(),
                self._write,
                self._write,
                self._failed,
                ProcessTimeouts(restart=Backoff(0.2, PAUSE_SECONDS)),
            )
            for spec in specs
        }
        self.failed: list[str] = []
        self._serving: dict[str, int] = {}
        self._warm: dict[str, int] = {}
        self.served_at: dict[str, float] = {}
        self._out = self.log.open("a", buffering=1)

    @property
    def address(self) -> str:
        return self.plan.address

    @property
    def control_ports(self) -> set[int]:
        """Returns the gRPC ports. Other ports of a worker belong to the transfer engine."""
        return {
            *self.plan.ports,
            *(port for instance in self.plan.instances for port in instance.ports),
        }

    @property
    def workers(self) -> list[str]:
        return [name for name in self.groups if name != ROUTER]

    def of_role(self, role: str) -> list[str]:
        return [name for name in self.groups if name.startswith(role)]

    async def start(self) -> None:
        await self.desk.start()
        for group in self.groups.values():
            group.start()

        def live(statuses: dict[str, WorkerStatus]) -> bool:
            failing = [name for name, group in self.groups.items() if group.restarts > MOST_STARTS]
            assert not failing, f"{failing} cannot be started; last words:\n{self.last_words()}"
            return statuses.keys() >= set(self._serving) >= set(self.workers)

        await self.until(live, START_SECONDS, "the cluster should serve")

    async def stop(self) -> None:
        for name in self.groups:  # a stopped process would not hear SIGTERM
            self.signal(name, signal.SIGCONT)
        await self.groups[ROUTER].stop(5)
        await asyncio.gather(*(group.stop(5) for group in self.groups.values()))
        await self.desk.stop()
        self._out.close()

    def processes(self, name: str) -> list[psutil.Process]:
        return [psutil.Process(pid) for pid in self.groups[name].pids]

    def signal(
        self, name: str, number: signal.Signals, member: int | None = None
    ) -> list[psutil.Process]:
        """Sends a signal to one process of a group, or to all. Returns the processes that received
        it."""
        pids = list(self.groups[name].pids)
        # before they can be gone
        hit = [
            psutil.Process(pid) for pid in (pids if member is None else pids[member : member + 1])
        ]
        for process in hit:
            process.send_signal(number)
        return hit

    async def stop_process(self, name: str) -> None:
        """Sends SIGSTOP and waits until the process has stopped. `signal(name, SIGCONT)` continues
        it."""
        assert self.signal(name, signal.SIGSTOP), f"{name} does not run"
        assert await stand_still(self.processes(name)), f"{name} goes on after SIGSTOP"

    def forget_start(self, name: str) -> None:
        """Marks the worker's current start as ended: the worker counts as live only after the next
        start has reported that it serves."""
        self._serving.pop(name, None)

    async def statuses(self) -> dict[str, WorkerStatus]:
        """Returns the statuses of the workers from the router, or none if it does not answer."""
        async with AsyncClient(self.address, connect_seconds=1.0, timeout_seconds=2.0) as client:
            try:
                return {status.name: status for status in await client.status()}
            except JdisaggError:
                return {}

    async def until_live(self, names: Sequence[str], seconds: float) -> float:
        """Waits until the router lists all these workers as serving. Returns the seconds."""

        def live(statuses: dict[str, WorkerStatus]) -> bool:
            """Returns the live workers. A worker counts only if its newest start has reported that
            it serves, because the router may not have detected a death yet."""
            started = all(self._serving.get(name) == self.groups[name].restarts for name in names)
            return started and all(
                name in statuses and not statuses[name].draining for name in names
            )

        return await self.until(live, seconds, f"{', '.join(names)} should serve")

    async def until_warm(self, names: Sequence[str], seconds: float) -> float:
        """Waits until all these workers have loaded their programs. A worker that was warm before
        serves earlier, and slowly at first."""

        def warm(_: dict[str, WorkerStatus]) -> bool:
            return all(self._warm.get(name) == self.groups[name].restarts for name in names)

        return (
            await self.until(warm, seconds, f"{', '.join(names)} should be warm")
            if self.shape.warm_up
            else 0.0
        )

    async def until_quiet(self, seconds: float) -> float:
        """Waits until every live worker has all its pages free and runs no work. Returns the
        seconds."""

        def quiet(statuses: dict[str, WorkerStatus]) -> bool:
            busy = [
                one
                for one in statuses.values()
                if one.running or one.waiting or one.handoffs or one.free_pages != one.total_pages
            ]
            return bool(statuses) and not busy

        return await self.until(quiet, seconds, "all pages should be free")

    async def until(
        self, what: Callable[[dict[str, WorkerStatus]], bool], seconds: float, words: str
    ) -> float:
        began = time.monotonic()
        statuses: dict[str, WorkerStatus] = {}
        while time.monotonic() - began < seconds:
            if self.failed:
                raise AssertionError(
                    f"{self.failed} cannot work; see {self.log}:\n{self.last_words()}"
                )
            statuses = await self.statuses()
            if what(statuses):
                return time.monotonic() - began
            await asyncio.sleep(0.1)
        shown = "\n".join(map(str, statuses.values()))
        raise AssertionError(
            f"{words} within {seconds:g} s; statuses:\n{shown}\nlast words:\n{self.last_words()}"
        )

    def last_words(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _with_orders(self, spec: GroupSpec) -> GroupSpec:
        return GroupSpec(
            spec.name, lambda: [self._with_socket(command) for command in spec.commands()]
        )

    def _with_socket(self, command: Command) -> Command:
        # Two counts of virtual devices would contradict each other.
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        arguments = command.arguments
        if "worker" in arguments:
            own = (
                "--chaos_socket=" + self.desk.path,
                f"--chaos_rate={self.shape.rate}",
                f"--chaos_seed={self.shape.seed}",
            )
            start = (sys.executable, "-u", "-m", "benchmarks.soak.worker_main")
            arguments = (*start, *own, *arguments[arguments.index("worker") + 1 :])
        return replace(command, arguments=arguments, environment=environment)

    def _write(self, name: str, line: str) -> None:
        group = name.partition(".")[0]
        if f" worker {group} " in line and " serves on " in line:
            self._serving[group] = self.groups[group].restarts
            self.served_at[group] = time.monotonic()
        if f"worker {group} is warm" in line:
            self._warm[group] = self.groups[group].restarts
        if not self._out.closed:
            self._out.write(f"{time.strftime('%H:%M:%S')} {name}: {line}\n")

    def _failed(self, name: str) -> None:
        self.failed.append(name)


async def stand_still(processes: Sequence[psutil.Process]) -> bool:
    """Returns whether all processes have stopped. On a busy machine a signalled process must first
    be scheduled."""
    for _ in range(300):
        if all(process.status() == psutil.STATUS_STOPPED for process in processes):
            return True
        await asyncio.sleep(0.01)
    return False

"""Runs the processes of a cluster as Ray actors, one actor for each process (extra `ray`).

If a node or an actor's process is lost, Ray creates the actor again.

- A prefill and a decode worker with the same number share a placement group, which Ray packs onto
  one node if there is room. Their KV transfers then stay within one host.
- Routers have fixed addresses. Each router is therefore bound to one node. Several routers are on
  different nodes, the first one on the driver's node.
- The packages, the model, token files and certificates must have the same paths on all nodes."""

import asyncio
import contextlib
import errno
import itertools
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from ray.util.placement_group import placement_group  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from jdisagg.errors import ConfigError
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.node.cluster_plan import ClusterPlan, InstancePlan, devices_of_process, free_ports
from jdisagg.node.run_files import RouterProcessConfig, WorkerProcessConfig, write_config
from jdisagg.settings.address import host_port
from jdisagg.supervisor.child_process import ChildProcess, Command, TakeLine

ACCELERATORS = ("GPU", "TPU")  # as Ray names them, in order of preference
KILLED = -signal.SIGKILL
KILL_SECONDS = 10.0


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Context manager that connects to the Ray cluster at RAY_ADDRESS. If this is not set, connects
    to the Ray cluster of this host. At the end of the context, Ray ends all actors that were
    created in it. Raises ConfigError if there is no Ray cluster."""
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False)
    except (ConnectionError, RayError) as error:
        raise ConfigError(
            f"--on=ray: no Ray cluster ({error}); start one with `ray start --head`, or set"
            " RAY_ADDRESS"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def node_address() -> str:
    return ray.util.get_node_ip_address()


def router_nodes(count: int) -> tuple[tuple[str, str], ...]:
    """Chooses a node for each of `count` routers: the driver's node first, then the other nodes in
    turn. Returns the id and the address of each chosen node."""
    own = ray.get_runtime_context().get_node_id()
    alive = [(node["NodeID"], node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda node: node[0] != own)
    return tuple(itertools.islice(itertools.cycle(alive), count))


class _ProcessActor:
    def __init__(self) -> None:
        self._child: ChildProcess | None = None

    def coordinator(self) -> str:
        host = node_address()
        return host_port(host, free_ports(host, 1)[0])

    async def run(
        self, name: str, command: str, content: bytes, coordinator: str | None
    ) -> AsyncIterator[tuple[str, int | None]]:
        if self._child is not None:  # a driver that no longer waited for it has left it
            self._child.kill()
            await self._child.ended()
        self._child = None
        lines: asyncio.Queue[str | None] = asyncio.Queue()
        with tempfile.TemporaryDirectory(prefix="jdisagg-") as folder:
            path = Path(folder) / f"{name}.json"
            write_config(path, _here(command, content, coordinator))
            arguments = (sys.executable, "-u", "-m", "jdisagg", command, f"--config_file={path}")
            child = self._child = await ChildProcess.start(
                Command(name, arguments), lambda _, line: lines.put_nowait(line)
            )
            ending = asyncio.create_task(child.ended())
            ending.add_done_callback(lambda _: lines.put_nowait(None))
            while (line := await lines.get()) is not None:
                yield line, None
            yield "", await ending

    async def signal(self, number: int) -> None:
        if self._child is None:
            return
        if number == signal.SIGKILL:
            self._child.kill()
        else:
            self._child.signal(signal.Signals(number))


def _here(
    command: str, content: bytes, coordinator: str | None
) -> RouterProcessConfig | WorkerProcessConfig:
    if command == "router":
        return msgspec.json.decode(content, type=RouterProcessConfig)
    config = msgspec.json.decode(content, type=WorkerProcessConfig)
    host, port = node_address(), config.worker.service.port
    try:
        socket.create_server((host, port)).close()
    except OSError:  # taken on this node
        (port,) = free_ports(host, 1)
    service = replace(config.worker.service.at(host), port=port)
    return replace(
        config,
        worker=replace(config.worker, service=service),
        place=f"/{socket.gethostname()}",
        process=replace(config.process, coordinator=coordinator),
    )


class RayChild:
    """A process that a Ray actor runs, with the interface of `ChildProcess`."""

    def __init__(self, name: str, actor: Any, lines: Any, take_line: TakeLine) -> None:
        self.name, self.status, self.pid = name, None, 0
        self._actor, self._killed = actor, False
        self._ending = asyncio.create_task(self._read(lines, take_line))

    async def _read(self, lines: Any, take_line: TakeLine) -> int:
        ended = KILLED
        try:
            async for reference in lines:
                line, status = await reference
                if status is None:
                    take_line(self.name, line)
                else:
                    ended = status
        except RayError as error:
            take_line(self.name, f"lost by Ray: {str(error).splitlines()[0]}")
        except asyncio.CancelledError:
            take_line(self.name, "does not answer: Ray has no node for it, or lost the node")
        self.status = ended
        return ended

    async def ended(self) -> int:
        """Returns the exit status, or -9 if the actor or its node was lost."""
        return await asyncio.shield(self._ending)

    def signal(self, number: signal.Signals) -> None:
        if self.status is None:
            self._actor.signal.remote(int(number))

    def kill(self) -> None:
        """Kills the process. An actor does not answer if Ray has no node for it, or has lost its
        node. The process then counts as killed after `KILL_SECONDS`."""
        if self.status is None and not self._killed:
            self._killed = True
            self.signal(signal.SIGKILL)
            asyncio.get_running_loop().call_later(KILL_SECONDS, self._ending.cancel)


class RayProcesses:
    def __init__(
        self,
        plan: ClusterPlan,
        nodes: Sequence[tuple[str, str]],
        accelerators_per_process: int | None = None,
    ) -> None:
        """Creates the actors. Ray starts each of them when a node has room for it.
        `accelerators_per_process`: number of GPUs or TPU chips of each worker process. None selects
        the number that the layout needs."""
        self._per_process = accelerators_per_process
        self._coordinators: dict[str, str] = {}
        resources = ray.cluster_resources()
        self._accelerator = next((name for name in ACCELERATORS if resources.get(name)), None)
        self._actors: dict[str, Any] = {}
        for spec, (node, _) in zip(plan.routers(), nodes, strict=True):
            bound = NodeAffinitySchedulingStrategy(node, soft=False)
            self._actors[spec.name] = self._actor({"CPU": 1.0}, bound)
        for group in _together(plan.instances):
            self._place(plan, group)

    async def start(self, command: Command, take_line: TakeLine) -> RayChild:
        """Starts a process on its actor. The counterpart on one host is `ChildProcess.start`."""
        kind, path = command.arguments[-2], command.arguments[-1].partition("=")[2]
        content, coordinator = Path(path).read_bytes(), None
        if kind == "worker":
            process = msgspec.json.decode(content, type=WorkerProcessConfig).process
            instance = command.name.rpartition(".")[0]
            if process.count > 1 and not process.index:
                self._coordinators[instance] = await self._coordinator(command.name)
            coordinator = self._coordinators.get(instance) if process.count > 1 else None
        actor = self._actors[command.name]
        lines = actor.run.options(num_returns="streaming").remote(
            command.name, kind, content, coordinator
        )
        return RayChild(command.name, actor, lines, take_line)

    async def _coordinator(self, name: str) -> str:
        """Returns an address for the JAX coordinator on the node of the process `name`. Raises
        OSError if Ray has lost the process's actor, so that the supervisor tries again."""
        try:
            return await self._actors[name].coordinator.remote()
        except RayError as error:
            raise OSError(errno.EAGAIN, f"its Ray actor is not there: {error}") from error

    def _place(self, plan: ClusterPlan, instances: Sequence[InstancePlan]) -> None:
        names = [name for instance in instances for name in instance.process_names]
        bundles = [
            self._bundle(plan, instance) for instance in instances for _ in instance.process_names
        ]
        group = placement_group(bundles, strategy="PACK")
        for index, (name, bundle) in enumerate(zip(names, bundles, strict=True)):
            self._actors[name] = self._actor(
                bundle, PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            )

    def _bundle(self, plan: ClusterPlan, instance: InstancePlan) -> dict[str, float]:
        if self._accelerator is None:
            return {"CPU": 1.0}
        devices = self._per_process or devices_of_process(instance, plan.instances)
        return {"CPU": 1.0, self._accelerator: float(devices)}

    def _actor(self, needs: Mapping[str, float], strategy: Any) -> Any:
        others = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU")}
        return (
            ray.remote(_ProcessActor)
            .options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0.0),
                resources=others,
                max_restarts=-1,
                max_concurrency=4,
                scheduling_strategy=strategy,
            )
            .remote()
        )


def _together(instances: Sequence[InstancePlan]) -> list[list[InstancePlan]]:
    roles = WorkerRole.PREFILL, WorkerRole.DECODE
    sides = [[one for one in instances if one.role is role] for role in roles]
    pairs = [[one for one in pair if one is not None] for pair in itertools.zip_longest(*sides)]
    return [*pairs, *([one] for one in instances if one.role is WorkerRole.MIXED)]

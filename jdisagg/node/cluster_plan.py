"""Plans the processes of a cluster and their configurations. Starts no process.

Every process has a fixed port, which stays the same after a restart. Only the JAX coordinator of a
multi-process instance gets a new port at each start, because the old port may still be in use."""

import os
import random
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from jdisagg.config import EngineConfig, ObserveConfig, ServiceConfig
from jdisagg.engine.limits import worker_config
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.node.accelerators import accelerators_of_host
from jdisagg.node.gpus import DEVICE_FRACTION, assign_gpus, gpu_environment
from jdisagg.node.recipes import ClusterShape
from jdisagg.node.router import RouterConfig
from jdisagg.node.run_files import (
    ProcessPlace,
    RouterProcessConfig,
    WorkerProcessConfig,
    write_config,
)
from jdisagg.node.tpus import chip_environment
from jdisagg.router.elastic import ElasticConfig
from jdisagg.settings.address import EVERY_INTERFACE, host_port, is_free
from jdisagg.supervisor.child_process import Command
from jdisagg.supervisor.supervisor import GroupSpec

_DRAWN = range(20000, 32768)


@dataclass(frozen=True)
class ClusterConfig:
    """Configuration of a whole cluster.

    Attributes:
        canary_seconds: Seconds between canary requests of each router.
        decision_log: File for the first router's placement decisions, or empty.
        gpus: Indices or UUIDs of the GPUs, or indices of the TPU chips, to assign to the worker
            processes, in order. If empty, none are assigned.
        gpus_per_process: Number of GPUs of each worker process. None selects the number that the
            layout needs.
    """

    engine: EngineConfig
    shape: ClusterShape
    model: str
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    changes_roles: bool = False
    canary_seconds: float = 5.0
    routers: int = 1
    processes: int = 1
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    decision_log: str = ""
    gpus: tuple[int | str, ...] = ()
    gpus_per_process: int | None = None

    def __post_init__(self) -> None:
        if self.changes_roles and self.processes > 1:
            raise ConfigError(
                f"--elastic: workers of --processes_per_instance={self.processes} processes cannot"
                " change their roles; give each instance one process, or omit --elastic and follow"
                " the router's advice"
            )
        staged = max(self.engine.prefill.layout.pp, self.engine.decode.layout.pp)
        if self.changes_roles and staged > 1:
            raise ConfigError(
                f"--elastic: workers with pipeline stages (pp={staged}) cannot change their roles;"
                " use pp=1, or omit --elastic and follow the router's advice"
            )


@dataclass(frozen=True, slots=True)
class InstancePlan:
    """Plan of one instance (model replica). The instance has one process for each of `ports`, and
    its mesh spans all of them."""

    name: str
    role: WorkerRole
    layout: Layout
    ports: tuple[int, ...]

    @property
    def process_names(self) -> tuple[str, ...]:
        if len(self.ports) == 1:
            return (self.name,)
        return tuple(f"{self.name}.{index}" for index in range(len(self.ports)))


@dataclass(frozen=True)
class ClusterPlan:
    """All processes of a cluster.

    Attributes:
        gpus: GPUs by process name. Processes without an entry may use all GPUs.
        http_ports: HTTP port of each router. Empty if HTTP is off.
        router_hosts: Address of each router. Empty if all routers are on this host.
    """

    config: ClusterConfig
    ports: tuple[int, ...]
    instances: tuple[InstancePlan, ...]
    folder: Path
    gpus: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    http_ports: tuple[int, ...] = ()
    router_hosts: tuple[str, ...] = ()

    @property
    def host(self) -> str:
        host = self.config.engine.service.host
        return EVERY_INTERFACE.get(host, host)

    @property
    def address(self) -> str:
        return self.addresses[0]

    @property
    def addresses(self) -> tuple[str, ...]:
        hosts = self.router_hosts or (self.host,) * len(self.ports)
        return tuple(map(host_port, hosts, self.ports))

    @property
    def services(self) -> tuple[ServiceConfig, ...]:
        service, http = self.config.engine.service, self.http_ports or (None,) * len(self.ports)
        service = service if len(self.ports) > 1 else service.alone
        hosts = self.router_hosts or (service.host,) * len(self.ports)
        return tuple(
            replace(service, host=host, port=port, http_port=http_port)
            for host, port, http_port in zip(hosts, self.ports, http, strict=True)
        )

    def router(self) -> GroupSpec:
        return self.routers()[0]

    def routers(self) -> tuple[GroupSpec, ...]:
        """Only the first router has a metrics port and changes roles."""
        names = ["router", *(f"router-{index}" for index in range(1, len(self.ports)))]
        return tuple(
            GroupSpec(name, lambda index=index, name=name: (self._router(name, index),))
            for index, name in enumerate(names)
        )

    def workers(self) -> tuple[GroupSpec, ...]:
        return tuple(
            GroupSpec(instance.name, lambda instance=instance: self._commands(instance))
            for instance in self.instances
        )

    def router_config(self, index: int) -> RouterProcessConfig:
        engine, config, service = self.config.engine, self.config, self.services[index]
        observe = replace(config.observe, metrics=service.http_port is not None)
        if index:
            observe = replace(observe, metrics_port=0)
        return RouterProcessConfig(
            RouterConfig(
                engine.limits,
                replace(engine.routing, peer_fetch=self._fetches, fetch_from_decode=self._returns),
                service,
                config.elastic,
                config.changes_roles and index == 0,
                config.canary_seconds,
                config.observe.log_requests,
            ),
            config.model,
            observe,
            config.decision_log if index == 0 else "",
        )

    def worker_configs(self, instance: InstancePlan) -> tuple[WorkerProcessConfig, ...]:
        """Returns the configuration of each process of an instance, with a new port for the JAX
        coordinator."""
        config, count = self.config, len(instance.ports)
        number = self.instances.index(instance)
        made = worker_config(config.engine, instance.role)
        metrics_port = config.observe.metrics_port
        if metrics_port:
            metrics_port += 1 + number
        coordinator = host_port(self.host, free_ports(self.host, 1)[0]) if count > 1 else None
        return tuple(
            WorkerProcessConfig(
                instance.name,
                instance.role,
                self.addresses,
                replace(
                    made,
                    model=replace(made.model, directory=config.model),
                    instance=replace(made.instance, layout=instance.layout),
                    prefix=replace(made.prefix, peer_fetch=self._fetches).of_worker(number),
                    service=replace(made.service.at(self.host), port=port, http_port=None),
                ),
                devices_of_process(instance, self.instances),
                f"/{socket.gethostname()}",
                ProcessPlace(index, count, coordinator),
                replace(config.observe, metrics_port=metrics_port),
                len(self.instances),
                config.changes_roles,
            )
            for index, port in enumerate(instance.ports)
        )

    @property
    def _fetches(self) -> bool:
        prefix = self.config.engine.prefix
        prefills = sum([one.role is WorkerRole.PREFILL for one in self.instances])
        mixed = sum([one.role is WorkerRole.MIXED for one in self.instances])
        may = prefills > 1 or (prefills + mixed > 1 or prefills > 0) and self._returns
        asked = prefix.peer_fetch
        if asked is None:  # workers of several processes fetch only if the user sets it
            return prefix.reuse is not False and may and self.config.processes == 1
        return prefix.reuse is not False and asked

    @property
    def _returns(self) -> bool:
        """Whether prefill workers also fetch cached KV from decode workers. False if the decode
        workers receive KV with a codec, because their KV has then lost precision."""
        engine = self.config.engine
        return engine.routing.fetch_from_decode and engine.decode.codec == "none"

    def _router(self, name: str, index: int) -> Command:
        return self._command(name, "router", self.router_config(index))

    def _commands(self, instance: InstancePlan) -> Sequence[Command]:
        configs = self.worker_configs(instance)
        return tuple(
            self._command(name, "worker", config)
            for name, config in zip(instance.process_names, configs, strict=True)
        )

    def _command(
        self, name: str, command: str, config: RouterProcessConfig | WorkerProcessConfig
    ) -> Command:
        path = self.folder / f"{name}.json"
        write_config(path, config)
        arguments = (sys.executable, "-u", "-m", "jdisagg", command, f"--config_file={path}")
        if name not in self.gpus:
            return Command(name, arguments)
        if accelerators_of_host().kind == "tpu":
            chips = chip_environment(os.environ, self.gpus[name], self.config.gpus)
            return Command(name, arguments, chips)
        fraction = (
            config.worker.instance.memory_fraction if isinstance(config, WorkerProcessConfig) else 0
        )
        environment = gpu_environment(
            os.environ, self.gpus[name], fraction or DEVICE_FRACTION, self.config.gpus
        )
        return Command(name, arguments, environment)


def plan_cluster(config: ClusterConfig, folder: Path) -> ClusterPlan:
    """Chooses free ports and returns the plan of a cluster. Raises ConfigError if there are too few
    GPUs or free ports, or the numbers of processes and devices do not fit."""
    engine, shape, service = config.engine, config.shape, config.engine.service
    layouts = {
        WorkerRole.PREFILL: (shape.prefill, engine.prefill.layout),
        WorkerRole.DECODE: (shape.decode, engine.decode.layout),
        WorkerRole.MIXED: (shape.mixed, engine.decode.layout),
    }
    metrics = config.observe.metrics_port
    taken = set(range(metrics, metrics + 1 + shape.instances) if metrics else ())
    ports = _router_ports("--port", service.host, service.port, config.routers, taken)
    http_ports: list[int] = []
    if service.http_port is not None:
        first = service.http_port
        http_ports = _router_ports("--http_port", service.host, first, config.routers, taken)
    instances: list[InstancePlan] = []
    for role, (count, layout) in layouts.items():
        instances += plan_instances(role, count, layout, config.processes, service.host, taken)
    gpus: dict[str, tuple[int | str, ...]] = {}
    if config.gpus or config.gpus_per_process:
        names = [name for instance in instances for name in instance.process_names]
        needs = [
            _gpus_of_process(instance, instances, config.gpus_per_process)
            for instance in instances
            for _ in instance.ports
        ]
        gpus = assign_gpus(names, needs, config.gpus)
    return ClusterPlan(config, tuple(ports), tuple(instances), folder, gpus, tuple(http_ports))


def _router_ports(flag: str, host: str, first: int, count: int, taken: set[int]) -> list[int]:
    ports = [first + index for index in range(count)] if first else free_ports(host, count, taken)
    if both := taken.intersection(ports):
        raise ConfigError(
            f"{flag}={first}: port {min(both)} is needed twice; routers and metrics use one port"
            " after the other: choose --port, --http_port and --metrics_port further apart"
        )
    taken.update(ports)
    return ports


def devices_of_process(instance: InstancePlan, instances: Sequence[InstancePlan]) -> int:
    """A prefill or decode instance of one process may change its role later. It therefore gets
    enough devices for the layouts of both roles."""
    alone = len(instance.ports) == 1 and instance.role is not WorkerRole.MIXED
    layouts = [other.layout for other in instances if alone and other.role is not WorkerRole.MIXED]
    return max(
        instance.layout.devices // len(instance.ports), *(layout.devices for layout in layouts), 1
    )


def _gpus_of_process(
    instance: InstancePlan, instances: Sequence[InstancePlan], asked: int | None
) -> int:
    needed = instance.layout.devices // len(instance.ports)
    if asked is not None and asked < needed:
        raise ConfigError(
            f"--gpus_per_worker={asked}: {instance.name} ({instance.layout}) needs {needed} a"
            " process; give more, or choose a smaller layout"
        )
    return asked or devices_of_process(instance, instances)


def plan_instances(
    role: WorkerRole, count: int, layout: Layout, processes: int, host: str, taken: set[int]
) -> tuple[InstancePlan, ...]:
    """Plans `count` instances of a role, with names like "prefill-0" and a free port for each
    process, which is added to the ports `taken` by others. Raises ConfigError if a number is out of
    range, or the layout's devices cannot be divided evenly among the processes."""
    if count < 0 or processes < 1:
        raise ConfigError(
            f"--{role.value}_workers={count} must not be negative and"
            f" --processes_per_instance={processes} must be at least 1"
        )
    if count and layout.stage_devices % processes:
        flag = "prefill" if role is WorkerRole.PREFILL else "decode"
        stage = " a pipeline stage" if layout.pp > 1 else ""
        raise ConfigError(
            f"--{flag}={layout} has {layout.stage_devices} devices{stage}, which"
            f" --processes_per_instance={processes} does not divide: each process needs as many;"
            " change one of the two"
        )
    ports = free_ports(host, count * processes, taken)
    taken.update(ports)
    return tuple(
        InstancePlan(
            f"{role.value}-{index}",
            role,
            layout,
            tuple(ports[index * processes : (index + 1) * processes]),
        )
        for index in range(count)
    )


def free_ports(host: str, count: int, taken: Collection[int] = ()) -> list[int]:
    """Returns `count` different ports on which no program listens, and that are not in `taken`.

    If another program binds a port later, the process that needs the port fails with an error. To
    make this unlikely, ports are drawn at random below the operating system's range of ephemeral
    ports (from 32768 on Linux). Raises ConfigError if too few ports are free, or if `host` is not
    an address of this machine."""
    free: list[int] = []
    for port in random.Random().sample(_DRAWN, len(_DRAWN)):
        if len(free) == count:
            return free
        try:
            if port not in taken and is_free(host, port):
                free.append(port)
        except OSError as error:
            raise ConfigError(
                f"--host={host} is nowhere to listen: {error}; give an address of this machine"
            ) from error
    raise ConfigError(
        f"--host={host} has no {count} free ports from {_DRAWN.start} to {_DRAWN.stop - 1}; give"
        " --port, or another host"
    )

"""Which processes make a cluster on one host, and their command lines: data from flags, no process is started here.

Every process keeps its port for life, so that one that is restarted is found where it was; only an instance's coordinator
listens elsewhere at each start, for its old port may still be settling.
"""

import errno
import random
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jdisagg.address import host_port
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.supervisor.child import Command
from jdisagg.supervisor.supervisor import GroupSpec

_DRAWN = range(20000, 32768)


@dataclass(frozen=True, slots=True)
class InstancePlan:
    """One instance: `layout` over `processes` processes, each with its port."""

    name: str
    role: str
    layout: Layout
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """`worker_flags` and `router_flags` go to every worker and to the router as they are; `role_flags`, by role, before them, so that they
    give way. `metrics_port`: the router's; the instances' follow it; 0: none. `more_ports`: of further routers over the same
    workers. `elastic`: the first router lets workers change their roles."""

    host: str
    port: int
    instances: tuple[InstancePlan, ...]
    worker_flags: tuple[str, ...]
    router_flags: tuple[str, ...]
    metrics_port: int = 0
    more_ports: tuple[int, ...] = ()
    role_flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    elastic: bool = False

    @property
    def address(self) -> str:
        """The first router's."""
        return self.addresses[0]

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(host_port(self.host, port) for port in (self.port, *self.more_ports))

    def router(self) -> GroupSpec:
        return self.routers()[0]

    def routers(self) -> tuple[GroupSpec, ...]:
        """The first is `router`, alone with a metrics port and the say in roles; the others are router-1 and on."""
        alone = (*((f"--metrics_port={self.metrics_port}",) if self.metrics_port else ()), *(("--elastic",) if self.elastic else ()))
        flags = [(f"--host={self.host}", f"--port={port}", *self.router_flags) for port in (self.port, *self.more_ports)]
        commands = [_command("router", "router", *flags[0], *alone)]
        commands += [_command(f"router-{index}", "router", *given) for index, given in enumerate(flags[1:], start=1)]
        return tuple(GroupSpec(command.name, lambda command=command: (command,)) for command in commands)

    def workers(self) -> tuple[GroupSpec, ...]:
        return tuple(GroupSpec(instance.name, lambda instance=instance: self._commands(instance)) for instance in self.instances)

    def _devices(self, instance: InstancePlan) -> int:
        """Of each of its processes. One that is alone may change its role: it has as many as the other role's layout wants."""
        alone = len(instance.ports) == 1 and instance.role != "mixed"
        layouts = [other.layout for other in self.instances if alone and other.role != "mixed"]
        return max([instance.layout.devices // len(instance.ports), *(layout.devices for layout in layouts)])

    def _commands(self, instance: InstancePlan) -> Sequence[Command]:
        count = len(instance.ports)
        common = (
            f"--role={instance.role}",
            f"--layout={instance.layout}",
            f"--name={instance.name}",
            f"--router={','.join(self.addresses)}",
            f"--host={self.host}",
            f"--devices={self._devices(instance)}",
            *((f"--metrics_port={self.metrics_port + 1 + self.instances.index(instance)}",) if self.metrics_port else ()),
            *self.role_flags.get(instance.role, ()),
            *self.worker_flags,
        )
        if count == 1:
            return (_command(instance.name, "worker", *common, f"--port={instance.ports[0]}"),)
        coordinator = free_ports(self.host, 1)[0]
        together = (f"--num_processes={count}", f"--coordinator={host_port(self.host, coordinator)}")
        return tuple(
            _command(f"{instance.name}.{index}", "worker", *common, *together, f"--process_id={index}", f"--port={port}")
            for index, port in enumerate(instance.ports)
        )


def plan_instances(role: str, count: int, layout: str, processes: int, host: str) -> tuple[InstancePlan, ...]:
    """`count` instances of a role, named role-0 and on, each port free at this moment. Raises ConfigError, LayoutError."""
    if count < 0 or processes < 1:
        raise ConfigError(f"--{role}={count} must not be negative and --processes_per_instance={processes} must be at least 1")
    parsed = Layout.parse(layout)
    if count and parsed.devices % processes:
        raise ConfigError(
            f"--{role}_layout={layout} has {parsed.devices} devices, which --processes_per_instance={processes} does not divide: "
            "each process needs as many; change one of the two"
        )
    ports = free_ports(host, count * processes)
    return tuple(
        InstancePlan(f"{role}-{index}", role, parsed, tuple(ports[index * processes : (index + 1) * processes])) for index in range(count)
    )


def free_ports(host: str, count: int) -> list[int]:
    """Ports that nobody listens on now, all different. Between this and their use somebody might take one: its process then says so.

    They lie below those that systems lend to connections and to listeners on port 0 (Linux: from 32768 on), and are drawn, so
    that neither a connection nor a second caller is likely to take one before its use. Raises ConfigError where none is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    free: list[int] = []
    for port in random.SystemRandom().sample(_DRAWN, len(_DRAWN)):
        if len(free) == count:
            return free
        try:
            with socket.create_server((host, port), family=family):
                free.append(port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise ConfigError(f"--host={host} is nowhere to listen: {error}; give an address of this machine") from error
    raise ConfigError(f"--host={host} has no {count} free ports from {_DRAWN.start} to {_DRAWN.stop - 1}; give --port, or another host")


def _command(name: str, module: str, *flags: str) -> Command:
    return Command(name, (sys.executable, "-u", "-m", f"launch.{module}", *flags))

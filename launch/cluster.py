"""Starts a router and workers on this host as child processes, restarts workers that die, and shows
a live table.

    jdisagg cluster --prefill_workers=2 --decode_workers=2
    jdisagg cluster --prefill=tp=4,ep=4 --decode=dp=4,ep=4 --model=models/tiny/qwen3_moe
    jdisagg ask --target=localhost:8700 --prompt="Once upon a time"

--config sets layouts, sizes, limits, worker counts and addresses from a recipe, e.g. one written by
`jdisagg plan`. Flags override it. One line on stdout reports that all workers serve.

A worker that dies is restarted under the same name and address. If the configuration of a worker
cannot work, the whole cluster stops. On SIGTERM or SIGINT the router refuses new requests, running
requests finish, and then the workers stop. A second signal stops all processes at once. If this
process dies, its child processes end too.

--on=ray starts the processes as actors of a running Ray cluster (extra `ray`). Ray chooses their
nodes. When a node is lost, Ray starts its actors on another node (docs/deployment.md#ray).

--metrics_port=9100 is the router's metrics port; the workers use the next higher ports. TLS files
and token files apply to all processes. KV itself is not encrypted (docs/security.md)."""

import asyncio
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from jdisagg.config import Mode
from jdisagg.engine.limits import worker_config
from jdisagg.errors import ConfigError
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.node.cluster import Cluster
from jdisagg.node.cluster_log import ClusterLog
from jdisagg.node.cluster_plan import ClusterConfig, ClusterPlan, plan_cluster
from jdisagg.node.recipes import ClusterShape, load_shape
from jdisagg.observe.logs import start_logging
from jdisagg.observe.process import check_ports
from jdisagg.service.server import check_address
from jdisagg.supervisor.supervisor import StartMember, start_here
from launch.console import run
from launch.flags import ENGINE, HTTP, OBSERVE, SERVICE, define, shown
from launch.settings import accelerators_of, elastic_config, engine_config, observe_config
from launch.shipped import SHIPPED_MODEL
from models.catalog import read_config
from models.hf_config import HfConfig

flags = define(
    *("prefill_workers", "decode_workers", "mixed_workers", "processes_per_instance", "routers"),
    *("on", "gpus", "gpus_per_worker"),
    *ENGINE,
    *SERVICE,
    *HTTP,
    *shown("channel"),
    *("canary_seconds", "elastic", "decision_log", "cluster_log_dir"),
    "table",
    *OBSERVE,
)


def main() -> int:
    if flags.log_format == "json":
        start_logging("json", "cluster")
    config = cluster_config()
    with tempfile.TemporaryDirectory(prefix="jdisagg-") as folder:
        if flags.on == "ray":
            return _run_on_ray(config, Path(folder))
        return asyncio.run(_run(plan(config, Path(folder)), start_here))


def _run_on_ray(config: ClusterConfig, folder: Path) -> int:
    try:
        from jdisagg.node import on_ray
    except ImportError as error:
        raise ConfigError(
            f"--on=ray needs the package ray ({error}); pip install 'jdisagg[ray]' on every node"
        ) from error
    if flags.gpus is not None:
        raise ConfigError("--gpus: with --on=ray, Ray chooses the GPUs; omit it")
    with on_ray.connected():
        nodes = on_ray.router_nodes(config.routers)
        hosts = tuple(address for _, address in nodes)
        service = config.engine.service.at(hosts[0])
        config = replace(config, engine=replace(config.engine, service=service))
        planned = replace(plan(config, folder), router_hosts=hosts)
        processes = on_ray.RayProcesses(planned, nodes, flags.gpus_per_worker)
        return asyncio.run(_run(planned, processes.start))


async def _run(planned: ClusterPlan, start_child: StartMember) -> int:
    live = sys.stderr.isatty() if flags.table is None else flags.table
    title = f"jdisagg on {planned.address}"
    log = ClusterLog(live, flags.cluster_log_dir, title, flags.log_format)
    return await Cluster(planned, log, start_child).run()


def cluster_config() -> ClusterConfig:
    """Builds the configuration of the cluster before any process starts. Raises ConfigError for a
    model, layout, size or address that cannot work."""
    by_ray = flags.on == "ray"
    gpus = () if by_ray else accelerators_of(flags)
    count = _shape(Mode(flags.mode) if flags.mode else None).instances
    engine = engine_config(flags, meshes=min(count, len(gpus)), elastic=True)
    shape = _shape(engine.mode)
    directory = engine.model.directory or SHIPPED_MODEL
    geometry = read_config(HfConfig.from_directory(Path(directory))).geometry
    for role in WorkerRole:
        if getattr(shape, role.value):
            worker_config(engine, role).instance.layout.check(geometry)
    return ClusterConfig(
        engine,
        shape,
        str(Path(directory).resolve()),
        elastic_config(flags),
        flags.elastic,
        flags.canary_seconds,
        flags.routers,
        flags.processes_per_instance,
        observe_config(flags),
        flags.decision_log,
        gpus,
        None if by_ray else flags.gpus_per_worker,
    )


def plan(config: ClusterConfig, folder: Path) -> ClusterPlan:
    planned = plan_cluster(config, folder)
    for service in planned.services:
        check_address(service)
    check_ports(config.observe, 1 + len(planned.instances))
    return planned


def _shape(mode: Mode | None) -> ClusterShape:
    given = {role.value: getattr(flags, f"{role.value}_workers") for role in WorkerRole}
    mixed, others = given["mixed"], [given["prefill"], given["decode"]]
    if mixed and any(others):
        raise ConfigError(
            f"--mixed_workers={mixed} excludes --prefill_workers and --decode_workers; give one"
            " kind, or all three in a recipe's get_cluster()"
        )
    shape = ClusterShape(mixed=1) if mixed else load_shape(flags.config, mode)
    counts = {role: count for role, count in given.items() if count is not None}
    return replace(shape, **counts)


if __name__ == "__main__":
    run(main, flags)

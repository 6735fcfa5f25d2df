"""Runs a worker, which prefills, decodes or does both on the devices of this process, and registers
with routers.

    jdisagg worker --role=prefill --layout=dp=1,tp=2 --router=localhost:8700 --port=8701
    jdisagg worker --role=decode --layout=dp=2,tp=1 --router=localhost:8700 --port=8702
    jdisagg worker --role=mixed --layout=tp=1 --router=localhost:8700 --mode=unified

The worker reads the recipe's section for its role, compiles its programs and registers. On SIGTERM
the worker accepts no new requests and drains for at most --drain_seconds. A prefill worker drains
until its KV is fetched, and a decode worker until its sequences have ended or migrated to other
workers. Exit status: 0 after draining, 3 if the mesh failed and the worker should be restarted, 78
if the configuration cannot work.

A worker of several processes needs this command once for each process, with --num_processes,
--process_id, --coordinator and a separate --port. If one of the processes ends, the others end
too."""

import asyncio
import contextlib
import os
import socket
import sys
from dataclasses import replace

from jdisagg.config import ObserveConfig
from jdisagg.engine.host_settings import hand_over_quickly
from jdisagg.engine.limits import worker_config
from jdisagg.errors import ConfigError, JdisaggError, UnavailableError
from jdisagg.instance.processes import ProcessGroup
from jdisagg.layout.axes import Layout
from jdisagg.layout.platforms import libtpu_variables
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.node.accelerators import accelerators_of_host
from jdisagg.node.deployment import prepare_runtime
from jdisagg.node.gpus import VISIBLE, parse_gpus
from jdisagg.node.run_files import ProcessPlace, WorkerProcessConfig, read_config
from jdisagg.node.signals import end_at_once
from jdisagg.node.worker_process import join, run_worker
from jdisagg.observe.logs import say, start_logging
from jdisagg.observe.process import check_ports, observing
from jdisagg.service.certificate import check_certificate
from jdisagg.service.server import check_address
from jdisagg.supervisor.supervisor import EXIT_BROKEN, EXIT_CONFIG
from launch.console import run
from launch.flags import ENGINE, OBSERVE, SERVICE, define, shown
from launch.model import model_source
from launch.settings import check_target, engine_config, observe_config
from launch.shipped import SHIPPED_MODEL

flags = define(
    *("role", "layout", "router", "name"),
    *(name for name in ENGINE if name not in ("prefill", "decode")),
    *SERVICE,
    *shown("peer", "channel"),
    *("devices", "gpus", "place", "elastic"),
    *("num_processes", "process_id", "coordinator"),
    *("config_file", *OBSERVE),
    port=0,
    gpus=(None, "GPUs or TPU chips to use, e.g. 0-3,6. Default: all that are visible."),
    elastic=(False, "Compile the programs of both roles at the start, for role changes."),
)


def main() -> None:
    end_at_once()
    try:
        file = flags.config_file
        config = read_config(file, WorkerProcessConfig) if file else _of_flags()
        check_address(config.worker.service)
        check_certificate(config.worker.service)
        if flags.gpus is not None:
            own = parse_gpus("gpus", flags.gpus, several=False)
            on_tpu = accelerators_of_host().kind == "tpu"
            visible = ",".join(map(str, own))
            os.environ.update(libtpu_variables(own) if on_tpu else {VISIBLE: visible})
        fraction = config.worker.instance.memory_fraction
        worker = config.worker
        prepare_runtime(config.devices, worker.compilation_cache, fraction, worker.kernels)
        hand_over_quickly()
        group = join(
            config.process,
            config.worker.limits.timeouts.instance,
            config.worker.service.called_host,
        )
        if group.leads:
            check_ports(config.observe, service=worker.service)
        start_logging(config.observe.log_format, config.name)
        status = asyncio.run(_run(config, group))
        if status == 0:
            group.leave()
    except JdisaggError as error:
        say(f"error: {error.message}", error=True)
        status = EXIT_BROKEN if isinstance(error, UnavailableError) else EXIT_CONFIG
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # JAX's shutdown would wait for programs and transfers that are no longer needed.
    os._exit(status)


async def _run(config: WorkerProcessConfig, group: ProcessGroup) -> int:
    worker = config.worker
    source = model_source(worker.model, worker.instance.speculate, worker.service)
    observe = config.observe if group.leads else ObserveConfig()
    async with observing(config.name, observe) as observer:
        devices = group.devices(worker.instance.layout.devices)
        return await run_worker(config, source, group, devices, observer)


def _of_flags() -> WorkerProcessConfig:
    if flags.role is None:
        raise ConfigError("--role is required: prefill, decode or mixed")
    role, routers = WorkerRole(flags.role), tuple(text for text in flags.router if text.strip())
    if not routers:
        raise ConfigError(f"--router=host:port is required for a {role.value} worker")
    for text in routers:
        check_target(text.strip(), "--router")
    # The layout of several processes spans accelerators of other hosts.
    worker = worker_config(engine_config(flags, meshes=int(flags.num_processes == 1)), role)
    layout = Layout.parse(flags.layout) if flags.layout else worker.instance.layout
    port = worker.service.port if flags.present("port") else 0
    worker = replace(
        worker,
        model=replace(worker.model, directory=worker.model.directory or SHIPPED_MODEL),
        instance=replace(worker.instance, layout=layout),
        service=replace(worker.service, port=port),
    )
    return WorkerProcessConfig(
        flags.name or f"{role.value}-{worker.service.called_host}-{port or os.getpid()}",
        role,
        routers,
        worker,
        flags.devices or max(1, layout.devices // max(1, flags.num_processes)),
        f"/{socket.gethostname()}" if flags.place is None else flags.place,
        ProcessPlace(flags.process_id, flags.num_processes, flags.coordinator),
        observe_config(flags),
        elastic=flags.elastic,
    )


if __name__ == "__main__":
    run(main, flags, refused=EXIT_CONFIG)

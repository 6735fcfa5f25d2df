"""Runs a worker process, through all role changes of its worker (worker.py).

One event loop runs gRPC, the worker's scheduling loop and the heartbeats. JAX runs on the
executor's threads. A role change to another layout ends one run of the worker and begins another in
the same process. The new run reshards the loaded weights. If an earlier run had this layout, its
compiled programs are reused. Everything else is rebuilt. If the new run cannot start, the worker
returns to its old role. If this fails too, the process ends and its supervisor restarts it. A role
change on the same layout happens within a run."""

import asyncio
import gc
import os
from collections.abc import Sequence
from dataclasses import replace

from jdisagg.clock import MonotonicClock
from jdisagg.engine.fingerprint import model_fingerprint
from jdisagg.engine.replica import Loaded
from jdisagg.errors import JdisaggError
from jdisagg.instance.host_name import check_own_name
from jdisagg.instance.processes import ProcessGroup, join_instance
from jdisagg.layout.axes import Layout
from jdisagg.model_api import Device
from jdisagg.node.cluster_plan import free_ports
from jdisagg.node.deployment import ModelSource
from jdisagg.node.gpus import gpus_of_host, local_devices
from jdisagg.node.hardware_files import find_accelerator
from jdisagg.node.role_state import Role, RoleState, fixed_because
from jdisagg.node.run_files import ProcessPlace, WorkerProcessConfig
from jdisagg.node.signals import StopSignals
from jdisagg.node.worker import WorkerProcessState, WorkerRuntime
from jdisagg.observe.logs import say
from jdisagg.observe.observer import Observer
from jdisagg.settings.timeouts import InstanceTimeouts
from jdisagg.supervisor.supervisor import EXIT_BROKEN
from jdisagg.worker.weights_updates import ServedWeights


def join(place: ProcessPlace, timeouts: InstanceTimeouts, host: str = "127.0.0.1") -> ProcessGroup:
    """Connects this process with the other processes of its instance, through jax.distributed. Must
    be called before the first use of a device.

    Args:
        place: Index of the process, and number of processes. An instance of one process is not
            connected.
        host: Address at which other processes reach this one.
    """
    if place.count == 1:
        return ProcessGroup(0, 1)
    gpus = len(gpus_of_host(os.environ))
    check_own_name(host, collectives=not gpus)
    if not place.count:
        return join_instance(local_device_ids=local_devices(os.environ, gpus), timeouts=timeouts)
    # Set even for one process, because under Slurm JAX would otherwise use only one device.
    return join_instance(
        place.coordinator, place.count, place.index, list(range(gpus)) or None, timeouts
    )


async def run_worker(
    process: WorkerProcessConfig,
    source: ModelSource,
    group: ProcessGroup,
    devices: Sequence[Device],
    observer: Observer | None = None,
) -> int:
    """Runs a worker until it ends, through all role changes. Returns the exit status.

    Args:
        source: The model. Without `relayout`, the worker never changes its role.
        group: Processes of the instance, connected through JAX.
        devices: Devices of all processes of the instance.

    Raises:
        JdisaggError: The worker cannot start with its configuration.
    """
    service, clock, forced = process.worker.service, MonotonicClock(), asyncio.Event()
    port = service.port or free_ports(service.host, 1)[0]
    config = replace(process.worker, service=replace(service, port=port))
    model, instance = config.model, config.instance
    fixed = fixed_because(group.processes, source.relayout is not None)
    role = Role(process.role, instance.layout)
    state = WorkerProcessState(
        replace(process, worker=config),
        source,
        model_fingerprint(model.directory, model.dtype, model.weights, model.kv_dtype, model.draft),
        find_accelerator(instance.hardware) if instance.hardware else None,
        observer,
        clock,
        StopSignals(forced.set),
        forced,
        group,
        devices,
        RoleState(process.name, role, len(devices), clock, fixed),
        weights=ServedWeights(start_folder=model.directory),
    )
    status = await WorkerRuntime(state).live(source.load)
    while status == 0 and not state.signals.came and (wanted := state.roles.take()) is not None:
        status = await _change(state, wanted)
    return status


async def _change(state: WorkerProcessState, wanted: Role) -> int:
    before, reason, relayout = state.roles.now, "", state.source.relayout
    gc.collect()  # Cyclic references to the old mesh's arrays would keep their memory allocated.

    def laid_out_anew(layout: Layout, on: Sequence[Device]) -> Loaded:
        loaded, state.loaded = state.loaded, None
        assert loaded is not None and relayout is not None
        return relayout(loaded, layout, on)

    try:
        state.become(wanted)
        return await WorkerRuntime(state).live(laid_out_anew)
    except Exception as error:
        reason = (
            error.message if isinstance(error, JdisaggError) else f"{type(error).__name__}: {error}"
        )
    name = state.process.name
    say(
        f"error: worker {name} could not become {wanted.role.value} ({wanted.layout}): {reason}",
        error=True,
    )
    state.loaded = None
    # `load` reads the initial weights. The router then has the worker load the latest weights.
    state.weights = ServedWeights(start_folder=state.weights.start_folder)
    gc.collect()
    state.roles.failed(reason)
    try:
        state.become(before)
        return await WorkerRuntime(state).live(state.source.load)
    except Exception as error:
        say(f"error: worker {name} could not come back either: {error}", error=True)
        return EXIT_BROKEN

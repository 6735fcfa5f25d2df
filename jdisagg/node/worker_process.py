"""A worker process: one life of a worker after another (worker.py), in the roles that it is
asked to have.

One event loop: gRPC, the worker's loop and the heartbeats; JAX runs on the executor's threads.

A change of role is the end of one life and the beginning of another in the same process, which
keeps the weights: they are laid out anew on the devices; everything else is made afresh, but
programs that an earlier life in the role has compiled. When that fails, the worker comes back as
what it was; when that fails too, the process ends, and whoever supervises it starts it again."""

import asyncio
import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from jdisagg.clock import MonotonicClock
from jdisagg.config import WorkerConfig
from jdisagg.engine.replica import Loaded, LoadModel
from jdisagg.errors import JdisaggError
from jdisagg.instance.processes import ProcessGroup, join_instance
from jdisagg.layout.axes import Layout
from jdisagg.model_api import Device
from jdisagg.node.cluster_plan import free_ports
from jdisagg.node.deployment import Relayout
from jdisagg.node.gpus import gpus_of_host, local_devices
from jdisagg.node.role_state import Role, RoleState, fixed_because
from jdisagg.node.run_files import ProcessPlace
from jdisagg.node.signals import StopSignals
from jdisagg.node.worker import WorkerProcessState, WorkerRuntime, WorkerSpec
from jdisagg.observe.observer import Observer
from jdisagg.supervisor.supervisor import EXIT_BROKEN
from jdisagg.timeouts import InstanceTimeouts


def join(place: ProcessPlace, timeouts: InstanceTimeouts) -> ProcessGroup:
    """Makes this process one of its instance's; before the first use of a device."""
    if place.count == 1:
        return ProcessGroup(0, 1)
    gpus = len(gpus_of_host(os.environ))
    if not place.count:
        return join_instance(local_device_ids=local_devices(os.environ, gpus), timeouts=timeouts)
    # said even here: under Slurm JAX would take one of them, whatever else it is told
    return join_instance(
        place.coordinator, place.count, place.index, list(range(gpus)) or None, timeouts
    )


class WorkerProcess:
    """Build it anywhere; `run` on the loop, once."""

    def __init__(
        self, spec: WorkerSpec, config: WorkerConfig, observer: Observer | None = None
    ) -> None:
        self._spec = spec
        self._config = config
        self._observer = observer

    async def run(
        self,
        group: ProcessGroup,
        load: LoadModel,
        devices: Sequence[Device],
        relayout: Relayout | None = None,
    ) -> int:
        """The exit status. Raises what makes the configuration unworkable. `devices` are the
        instance's, of all its processes. `relayout` None: the worker keeps its role for ever."""
        spec, service, clock, forced = (
            self._spec,
            self._config.service,
            MonotonicClock(),
            asyncio.Event(),
        )
        config = replace(
            self._config,
            service=replace(service, port=service.port or free_ports(service.host, 1)[0]),
        )
        fixed = fixed_because(group.processes, relayout is not None)
        roles = RoleState(
            spec.name, Role(spec.role, config.instance.layout), len(devices), clock, fixed
        )
        state = WorkerProcessState(
            spec,
            config,
            self._observer,
            clock,
            StopSignals(forced.set),
            forced,
            group,
            devices,
            roles,
        )
        status = await WorkerRuntime(state).live(load)
        while (
            relayout is not None
            and status == 0
            and not state.signals.came
            and (wanted := roles.take()) is not None
        ):
            status = await _change(state, load, relayout, wanted)
        return status


async def _change(
    state: WorkerProcessState, load: LoadModel, relayout: Relayout, wanted: Role
) -> int:
    """The life in the wanted role; where it cannot begin, another in the old one, with the weights
    read again."""
    before, reason = state.roles.now, ""
    gc.collect()  # what still holds the old mesh's arrays would hold their memory, too

    def laid_out_anew(layout: Layout, on: Sequence[Device]) -> Loaded:
        loaded, state.loaded = state.loaded, None
        assert loaded is not None
        return relayout(loaded, layout, on)

    try:
        _become(state, wanted)
        return await WorkerRuntime(state).live(laid_out_anew)
    except Exception as error:
        reason = (
            error.message if isinstance(error, JdisaggError) else f"{type(error).__name__}: {error}"
        )
    name = state.spec.name
    print(
        f"error: worker {name} could not become {wanted.role.value} ({wanted.layout}): {reason}",
        file=sys.stderr,
        flush=True,
    )
    state.loaded = None
    gc.collect()
    state.roles.failed(reason)
    try:
        _become(state, before)
        return await WorkerRuntime(state).live(load)
    except Exception as error:
        print(
            f"error: worker {name} could not come back either: {error}", file=sys.stderr, flush=True
        )
        return EXIT_BROKEN


def _become(state: WorkerProcessState, what: Role) -> None:
    state.roles.now = what
    state.spec = replace(state.spec, role=what.role)
    state.config = replace(
        state.config, instance=replace(state.config.instance, layout=what.layout)
    )

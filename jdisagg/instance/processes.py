"""Joins several processes into one JAX job, and broadcasts a short text from process 0.

This is the only file of the package that imports JAX. `join_instance` must be called before the
first use of a device."""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils

from jdisagg.errors import ConfigError
from jdisagg.model_api import Device
from jdisagg.settings.address import parse_host_port
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, InstanceTimeouts

SHARED_BYTES = 256


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """Index of this process in its instance, and the instance's number of processes. Process 0 is
    the leader."""

    process: int
    processes: int

    @property
    def leads(self) -> bool:
        return self.process == 0

    def share(self, text: str) -> str:
        """Broadcasts `text` of process 0 to all processes, and returns it. The text of other
        processes is ignored. Blocks until all processes have called this method. Raises ConfigError
        if the text has more than 256 bytes in UTF-8."""
        data = text.encode() if self.leads else b""
        if len(data) > SHARED_BYTES:
            raise ConfigError(
                f"instance: {len(data)} bytes to share exceed {SHARED_BYTES}; choose shorter"
                " addresses"
            )
        if self.processes == 1:
            return text
        padded = np.zeros(SHARED_BYTES, np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        return (
            bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).rstrip(b"\0").decode()
        )

    def devices(self, count: int) -> list[Device]:
        """Returns the devices for the instance's mesh. In an instance of one process, these are all
        its devices. In an instance of several processes, these are `count` devices, with an equal
        number from each process.

        Raises:
            ConfigError: The processes have too few devices or cannot share them equally.
        """
        found = jax.devices()
        if self.processes == 1:
            return found
        own = [[d for d in found if d.process_index == i] for i in range(self.processes)]
        each, rest = divmod(count, self.processes)
        fewest = min(map(len, own))
        if rest or not 0 < each <= fewest:
            raise ConfigError(
                f"instance: a layout of {count} devices over {self.processes} processes, of which"
                f" the one with the fewest has {fewest}: each must have the same part of it; choose"
                " another --layout, or other processes"
            )
        return [device for devices in own for device in devices[:each]]

    def leave(self) -> None:
        """Leaves the JAX job cleanly. Waits a limited time for the other processes to leave."""
        if self.processes > 1:
            jax.distributed.shutdown()


def join_instance(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    timeouts: InstanceTimeouts = DEFAULT_TIMEOUTS.instance,
) -> ProcessGroup:
    """Joins this process to its instance's JAX job.

    If the processes do not connect within `timeouts.start_seconds`, JAX ends this process by
    SIGABRT with a message on stderr, and the supervisor restarts the process.

    Args:
        coordinator: Address (host:port) of process 0. If `coordinator`, `num_processes` and
            `process_id` are None, the cluster's scheduler (such as Slurm) provides them.
        local_device_ids: Ids of the visible devices that this process uses. None means all devices,
            or one device under Slurm and Open MPI.

    Raises:
        ConfigError: The arguments contradict each other, or JAX rejects them.
    """
    given = [value is not None for value in (coordinator, num_processes, process_id)]
    if any(given) and not all(given):
        raise ConfigError(
            f"instance: coordinator={coordinator}, num_processes={num_processes},"
            f" process_id={process_id}: give all three, or none under Slurm, Kubernetes or Open MPI"
        )
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise ConfigError(f"instance: process_id={process_id} must be in [0, {num_processes})")
    if num_processes == 1:
        return ProcessGroup(0, 1)
    if coordinator is not None:
        parse_host_port(coordinator, "instance: coordinator")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            local_device_ids,
            initialization_timeout=round(timeouts.start_seconds),
            heartbeat_timeout_seconds=round(timeouts.jax_heartbeat_seconds),
            shutdown_timeout_seconds=round(timeouts.jax_shutdown_seconds),
        )
    except (RuntimeError, ValueError, KeyError) as error:  # also for an incomplete environment
        where = (
            f"coordinator={coordinator} is process 0's address and free"
            if coordinator
            else "Slurm, Kubernetes or Open MPI started them; else say num_processes, process_id"
            " and coordinator"
        )
        raise ConfigError(
            f"instance: the processes did not become one job: {error}; check that all are started,"
            f" and that {where}"
        ) from error
    return ProcessGroup(jax.process_index(), jax.process_count())


def exit_soon(status: int, seconds: float = DEFAULT_TIMEOUTS.instance.exit_seconds) -> None:
    """Schedules the end of this process, without clean-up, after `seconds`. In this time, a last
    message can be sent. Used when the instance has failed, because a normal exit would wait for
    threads that may hang in a collective."""
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()

"""Joins several processes into one JAX job: their indices, their number, and a short text that
process 0 shares.

The only file of this package that imports JAX. On CPU collectives use gloo. JAX detects Slurm,
Kubernetes and Open MPI when no flags are given. Must run before the first use of a device."""

import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils

from jdisagg.errors import ConfigError
from jdisagg.model_api import Device
from jdisagg.timeouts import DEFAULT_TIMEOUTS, InstanceTimeouts

SHARED_BYTES = 256


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """One process's place in its instance. Process 0 leads."""

    process: int
    processes: int

    @property
    def leads(self) -> bool:
        return self.process == 0

    def share(self, text: str) -> str:
        """Returns process 0's `text` (UTF-8, at most 256 bytes) on every process. All must call it;
        it blocks until they have."""
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
        """The job's devices. With several processes, `count` of them, equally many of each, so that
        every process has a part of the mesh.

        Raises:
            ConfigError: The processes cannot provide them; the message has the numbers.
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
        """Ends the job cleanly: waits, with a limit, for the other processes."""
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

    If the processes do not find each other within `timeouts.start_seconds`, JAX ends this one by
    SIGABRT with its own message on stderr, and the supervisor restarts it.

    Args:
        coordinator: host:port of process 0. If it, `num_processes` and `process_id` are None, the
            cluster's scheduler provides them.
        local_device_ids: Devices of this process among those it sees. None means all, but one under
            Slurm and Open MPI.

    Raises:
        ConfigError: Flags contradict each other, or JAX refuses them at once.
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
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise ConfigError(
            f"instance: coordinator={coordinator} must be host:port, process 0's address and a free"
            " port there"
        )
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
    """Ends a process of a failed instance after `seconds`, which leaves time for a last message,
    without clean-up. Threads may hang in a collective, and every orderly end (interpreter, JAX's
    shutdown barrier) would wait for them."""
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()

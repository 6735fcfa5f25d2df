"""Injects faults into a simulated run: a worker dies, hangs or fails, a link slows down, clients
cancel requests.

    simulate(fleet, arrivals, hooks=[faults.schedule([Death("decode-0", 10.0, back_after=5.0),
    SlowLink("prefill-1", 20.0, 0.1, 30.0)])])

Each fault names a worker and the virtual time in seconds at which it begins. The cluster's counter
`faults` has the number of injected faults, so that tests can check it."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from jdisagg.errors import ConfigError
from jdisagg.simulator.cluster import SimulatedCluster
from jdisagg.simulator.run import Hook


@dataclass(frozen=True, slots=True)
class Death:
    """Kills a worker as `kill -9` does. `back_after`: seconds from the death until the worker is
    restarted, or None for no restart."""

    worker: str
    at_seconds: float
    back_after: float | None = None


@dataclass(frozen=True, slots=True)
class Stall:
    """Makes all commands and pulls of a worker's mesh hang. The code of the live worker detects a
    command that runs longer than `limits.step_seconds`. `back_after`: seconds from the beginning of
    the fault until the worker's restart, or None for no restart."""

    worker: str
    at_seconds: float
    back_after: float | None = None


@dataclass(frozen=True, slots=True)
class Broken:
    """Makes all programs of a worker's mesh fail. `back_after`: seconds from the beginning of the
    fault until the worker's restart, or None for no restart."""

    worker: str
    at_seconds: float
    back_after: float | None = None


@dataclass(frozen=True, slots=True)
class SlowLink:
    """Runs all links of a worker at `factor` times their speed for `seconds` seconds."""

    worker: str
    at_seconds: float
    factor: float
    seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.factor <= 1:
            raise ConfigError(f"a slow link's factor must be in (0, 1], got {self.factor}")


@dataclass(frozen=True, slots=True)
class Cancels:
    """Cancels each request that is running at time `at_seconds`, with probability `part`."""

    at_seconds: float
    part: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.part <= 1:
            raise ConfigError(
                f"the fraction of clients that cancel must be in (0, 1], got {self.part}"
            )


Fault = Death | Stall | Broken | SlowLink | Cancels


FORMS = (
    "death:WORKER:AT[:BACK_AFTER], stall:..., broken:..., slow:WORKER:AT:FACTOR:SECONDS,"
    " cancels:AT:PART"
)
_ENDS = {"death": Death, "stall": Stall, "broken": Broken}


def parse_fault(text: str) -> Fault:
    """Parses the text of a fault, which has one of the `FORMS`. Raises ConfigError for other
    text."""
    kind, *parts = text.split(":")
    try:
        if kind in _ENDS and len(parts) in (2, 3):
            return _ENDS[kind](
                parts[0], _seconds(parts[1]), _seconds(parts[2]) if len(parts) == 3 else None
            )
        if kind == "slow" and len(parts) == 4:
            return SlowLink(parts[0], _seconds(parts[1]), float(parts[2]), _seconds(parts[3]))
        if kind == "cancels" and len(parts) == 2:
            return Cancels(_seconds(parts[0]), float(parts[1]))
    except ValueError as error:
        raise ConfigError(f"fault {text!r}: {error}; the forms are {FORMS}") from error
    raise ConfigError(f"fault {text!r} is not understood; the forms are {FORMS}")


def schedule(faults: Sequence[Fault]) -> Hook:
    """Returns a hook of `simulate` that causes the faults at their times.

    Raises:
      ConfigError: A fault names a worker that the cluster lacks; examples of names are "prefill-0"
        and "mixed-2".
    """

    async def strike(cluster: SimulatedCluster) -> None:
        for fault in faults:
            if not isinstance(fault, Cancels) and fault.worker not in cluster.seats:
                raise ConfigError(
                    f"fault of worker {fault.worker!r}: there are {', '.join(cluster.seats)}"
                )
        await asyncio.gather(*(_happen(cluster, fault) for fault in faults))

    return strike


async def _happen(cluster: SimulatedCluster, fault: Fault) -> None:
    await asyncio.sleep(fault.at_seconds)
    cluster.counters.add("faults", kind=type(fault).__name__.lower())
    match fault:
        case Death():
            await _replace(cluster, fault.worker, 0.0, fault.back_after)
        case Stall():
            cluster.processes[fault.worker].mesh.hang()
            cluster.channel.stalled.add(fault.worker)
            await _replace(cluster, fault.worker, fault.back_after, 0.0)
        case Broken():
            cluster.processes[fault.worker].mesh.break_down()
            await _replace(cluster, fault.worker, fault.back_after, 0.0)
        case SlowLink():
            cluster.channel.slow(fault.worker, fault.factor)
            await asyncio.sleep(fault.seconds)
            cluster.channel.slow(fault.worker, 1.0)
        case Cancels():
            chance = random.Random(fault.seed)
            for client in [client for client in cluster.clients if chance.random() < fault.part]:
                client.cancel()


async def _replace(
    cluster: SimulatedCluster, worker: str, after: float | None, back_after: float | None
) -> None:
    process = cluster.processes[worker]
    if after is None:
        return
    await asyncio.sleep(after)
    if cluster.processes[worker] is not process or cluster.local.is_dead(process.worker):
        return
    await cluster.kill(worker)
    if back_after is not None:
        await asyncio.sleep(back_after)
        if cluster.processes[worker] is process:
            await cluster.start_worker(worker)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{text} is not 0 or more seconds")
    return seconds

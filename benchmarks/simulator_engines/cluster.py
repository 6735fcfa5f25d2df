"""`simulate` for fleets of studies: the simulated cluster with the workers, meshes, ports and links
that a `StudyFleet` states."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from benchmarks.simulator_engines.deferred_reservation import ComputedPrompts, DeferredReservation
from benchmarks.simulator_engines.executor import DrainingExecutor, SerialExecutor
from benchmarks.simulator_engines.fleet import StudyFleet, also_prefills
from jdisagg.assembly import Worker
from jdisagg.clock import Clock
from jdisagg.costs.hardware import Link
from jdisagg.dispatch.router_events import NO_ROUTER_EVENTS, RouterEvents
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.router.decision import PlacementPolicy
from jdisagg.simulator import run
from jdisagg.simulator.channel import SimulatedChannel, Way
from jdisagg.simulator.cluster import SimulatedCluster
from jdisagg.simulator.executor import SimulatedExecutor
from jdisagg.simulator.fleet import Fleet, Pool
from jdisagg.simulator.run import Result
from jdisagg.simulator.workloads import Arrival
from jdisagg.worker.decode_worker import DecodeWorker
from jdisagg.worker.prefill_worker import PrefillWorker


class PrefillingDecodeWorker(DecodeWorker):
    """A live mixed worker that also takes hand-offs. It reports the decode role and that it can
    prefill, so that the router considers both for each prompt."""

    def _status(self) -> WorkerStatus:
        return msgspec.structs.replace(super()._status(), role=WorkerRole.DECODE)


class TrunkChannel(SimulatedChannel):
    """A channel with one link, `trunk`, that belongs to no worker and that all pulls over it
    share."""

    def __init__(self, link: Callable[[str, str], Link], overlap: int, trunk: Link) -> None:
        super().__init__(link, overlap)
        self._trunk = trunk
        self._shared = Way(trunk.bytes_per_second * trunk.efficiency)

    def crossed_bytes(self) -> float:
        """Bytes that the trunk has carried."""
        return self._shared.moved_bytes

    def _between(self, sender: str, receiver: str) -> tuple[Link, tuple[Way, ...], float]:
        link, ways, most = super()._between(sender, receiver)
        return link, (*ways, self._shared) if link is self._trunk else ways, most


class StudyCluster(SimulatedCluster):
    def __init__(
        self,
        fleet: StudyFleet,
        clock: Clock,
        seed: int = 0,
        mortal: bool = False,
        events: RouterEvents = NO_ROUTER_EVENTS,
    ) -> None:
        self._study = fleet
        super().__init__(fleet, clock, seed, mortal, events)
        self.executor = _executor(fleet)
        if fleet.site_link is not None:
            self.channel = TrunkChannel(fleet.link_between(), fleet.overlap, fleet.site_link)
        self._computed = ComputedPrompts(
            self._computes,
            lambda source: self.local.workers[source.worker],
            fleet.limits.timeouts.handoff.heartbeat_seconds,
        )

    def _policy(self) -> PlacementPolicy:
        return replace(super()._policy(), decode_first=not self._study.late_reservation)

    def _decode_worker(self, pool: Pool) -> type[DecodeWorker]:
        return PrefillingDecodeWorker if also_prefills(pool) else DecodeWorker

    def _between(self, worker: Worker, caller: Worker | None) -> Sequence[object]:
        if caller is not None or not self._study.late_reservation:
            return ()
        if isinstance(worker, PrefillWorker):
            return (self._computed,)
        return (DeferredReservation(self._computed, worker.name, self.new_id),)

    def _computes(self, name: str) -> bool:
        return name in self.seats and self.seats[name].role is WorkerRole.PREFILL


def _executor(fleet: StudyFleet) -> Callable[..., SimulatedExecutor]:
    drains = SerialExecutor if fleet.serial else DrainingExecutor
    kind = drains if fleet.drains else SimulatedExecutor

    def mesh(*parts: Any) -> SimulatedExecutor:
        made = kind(*parts)
        made.run_ahead = fleet.run_ahead
        return made

    return mesh


def simulate(fleet: Fleet, arrivals: Iterable[Arrival], seed: int = 0, **more: Any) -> Result:
    """`simulator.run.simulate`, for a `StudyFleet` or a plain `Fleet`."""
    cluster = StudyCluster if isinstance(fleet, StudyFleet) else SimulatedCluster
    return run.simulate(fleet, arrivals, seed, cluster=cluster, **more)

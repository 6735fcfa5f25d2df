"""`simulate` for fleets of studies: the simulated cluster with the meshes and ports that a
`StudyFleet` states."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.simulator_engines.deferred_reservation import ComputedPrompts, DeferredReservation
from benchmarks.simulator_engines.executor import DrainingExecutor, SerialExecutor
from benchmarks.simulator_engines.fleet import StudyFleet
from jdisagg.assembly import Worker
from jdisagg.clock import Clock
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.router.decision import NO_ROUTER_EVENTS, PlacementPolicy, RouterEvents
from jdisagg.simulator import run
from jdisagg.simulator.cluster import SimulatedCluster
from jdisagg.simulator.executor import SimulatedExecutor
from jdisagg.simulator.fleet import Fleet
from jdisagg.simulator.run import Result
from jdisagg.simulator.workloads import Arrival


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
        self._computed = ComputedPrompts(
            self._computes,
            lambda source: self.local.workers[source.worker],
            fleet.limits.timeouts.handoff.heartbeat_seconds,
        )

    def _policy(self) -> PlacementPolicy:
        return replace(super()._policy(), decode_first=not self._study.late_reservation)

    def _between(self, worker: Worker, caller: Worker | None) -> Sequence[object]:
        if caller is not None or not self._study.late_reservation:
            return ()
        if not worker.role.decodes:
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

"""Runs the live elastic controller in a simulated cluster: it changes the roles of workers, or
advises an autoscaler that starts and stops workers.

    result = simulate(fleet, arrivals, hooks=[elastic(ElasticConfig(slo=...), switch_seconds=20.0)])
    result = simulate(fleet, arrivals, hooks=[autoscaled(ElasticConfig(slo=...), Autoscaler())])

The controller, its inputs and its loop are the code of the live router (router/elastic.py,
dispatch/roles/elastic_pools.py). Simulated are the role change (`switch_seconds` stands for
resharding the weights and for warm-up, which benchmarks/results/role_switch.json measured), and
the autoscaler: KEDA with the settings of deploy/keda.yaml, and the rules of Kubernetes'
HorizontalPodAutoscaler behind it."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from jdisagg.dispatch.frontend import ServingPath
from jdisagg.dispatch.roles.elastic_pools import ElasticPools
from jdisagg.dispatch.roles.outcomes import OutcomeTap
from jdisagg.layout.axes import Layout
from jdisagg.messages.ports_middleware import through
from jdisagg.messages.roles import SwitchReport, SwitchState
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.router.elastic import ROLES, Controller, ElasticConfig, check_switch
from jdisagg.simulator.cluster import SimulatedCluster

DRAIN_SECONDS = 30.0


class SimulatedSwitcher:
    """After the change, a worker has the layout of its new pool."""

    def __init__(self, cluster: SimulatedCluster, switch_seconds: float) -> None:
        self.changing = False
        self._cluster = cluster
        self._switch_seconds = switch_seconds

    async def switch(
        self, name: str, role: WorkerRole, layout: Layout | None, seconds: float | None = None
    ) -> SwitchReport:
        """Raises the same errors as `RoleSwitcher`. Ignores `layout` and the timeout `seconds`."""
        cluster = self._cluster
        check_switch(cluster.membership.statuses(), name, role)
        began = cluster.clock.now()
        self.changing = True
        try:
            await cluster.switch_role(name, role, self._switch_seconds, DRAIN_SECONDS)
        finally:
            self.changing = False
        card = next(card for card in cluster.membership.cards() if card.name == name)
        total_seconds = cluster.clock.now() - began
        return SwitchReport(
            name, card.boot_id, role, card.layout, SwitchState.DONE, total_seconds=total_seconds
        )


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """Settings of the autoscaler, which are those of deploy/keda.yaml or Kubernetes' defaults.

    Attributes:
        most: Largest numbers of prefill and of decode workers.
        start_seconds: Seconds from the start of a worker until it takes requests.
        sync_seconds: Time between two decisions.
        tolerance: Relative change of a pool's size below which it is not scaled.
        up_least, up_seconds: In `up_seconds`, a pool may double or grow by `up_least` workers.
        down_window_seconds: A pool shrinks to the largest size advised in this time.
        down_seconds: Time for which a pool does not shrink again after it lost a worker.
    """

    most: tuple[int, int] = (8, 16)
    start_seconds: float = 90.0
    sync_seconds: float = 15.0
    tolerance: float = 0.1
    up_least: int = 4
    up_seconds: float = 15.0
    down_window_seconds: float = 60.0
    down_seconds: float = 180.0


@dataclass(slots=True)
class ScaledPool:
    """A pool as the autoscaler sees it. `size`: number of workers that it wants, of which the last
    may still start."""

    scaler: Autoscaler
    most: int
    size: int
    _advised: deque[tuple[float, int]] = field(default_factory=deque)
    _sizes: deque[tuple[float, int]] = field(default_factory=deque)

    def step(self, now: float, advised: int) -> int:
        """Takes one decision. Returns by how many workers the pool grows or shrinks."""
        scaler, before = self.scaler, self.size
        self._sizes.append((now, before))
        if abs(advised / before - 1) <= scaler.tolerance:
            advised = before
        self._advised.append((now, max(1, min(advised, self.most))))
        _forget(self._advised, now - scaler.down_window_seconds)
        _forget(self._sizes, now - max(scaler.up_seconds, scaler.down_seconds))
        wanted = self._advised[-1][1]
        if wanted > before:
            start = min(size for at, size in self._sizes if at > now - scaler.up_seconds)
            self.size = min(wanted, max(before, 2 * start, start + scaler.up_least))
        elif wanted < before:
            calm = max(size for _, size in self._advised)
            least = max(size for at, size in self._sizes if at > now - scaler.down_seconds) - 1
            self.size = min(before, max(calm, least))
        return self.size - before


def _forget(entries: deque[tuple[float, int]], before: float) -> None:
    while entries and entries[0][0] < before:
        entries.popleft()


def _newest(cluster: SimulatedCluster, role: WorkerRole) -> str:
    names = [name for name, process in cluster.processes.items() if process.card.role is role]
    return max(names, key=lambda name: int(name.rpartition("-")[2]))


Say = Callable[[float, str], None]
Hook = Callable[[SimulatedCluster], Awaitable[None]]


def autoscaled(
    config: ElasticConfig, scaler: Autoscaler, say: Say = lambda now, text: None
) -> Hook:
    """Returns a hook of `simulate` that starts and stops workers as the elastic controller advises,
    and calls `say(virtual seconds, text)` for each. Roles do not change."""

    async def hook(cluster: SimulatedCluster) -> None:
        pools = _pools(config, cluster, SimulatedSwitcher(cluster, 0.0), False)
        clock = cluster.clock
        scaled = {
            role: ScaledPool(
                scaler, most, sum(seat.role is role for seat in cluster.seats.values())
            )
            for role, most in zip(ROLES, scaler.most, strict=True)
        }
        changes: set[asyncio.Task[None]] = set()

        async def change(role: WorkerRole, by: int) -> None:
            if by > 0:
                await clock.sleep(scaler.start_seconds)
                for _ in range(by):
                    await cluster.add_worker(role)
                return
            for _ in range(-by):
                await cluster.remove_worker(_newest(cluster, role), DRAIN_SECONDS)

        looking = asyncio.ensure_future(pools.run())
        try:
            while True:
                await clock.sleep(scaler.sync_seconds)
                advice = pools.latest_advice()
                for role, advised in zip(ROLES, (advice.prefill, advice.decode), strict=True):
                    if by := scaled[role].step(clock.now(), advised):
                        say(
                            clock.now(),
                            f"{role.value} {by:+d} to {scaled[role].size}: {advice.reason}",
                        )
                        task = asyncio.ensure_future(change(role, by))
                        changes.add(task)
                        task.add_done_callback(changes.discard)
        finally:
            for task in (looking, *changes):
                task.cancel()

    return hook


def elastic(
    config: ElasticConfig, switch_seconds: float, say: Say = lambda now, text: None
) -> Hook:
    """Returns a hook of `simulate` that runs the elastic controller, and calls `say(virtual
    seconds, text)` for each role change. The hook raises ConfigError if the fleet's roles cannot
    change."""

    async def hook(cluster: SimulatedCluster) -> None:
        cluster.fleet.check_roles_change()
        switcher = SimulatedSwitcher(cluster, switch_seconds)
        await _pools(config, cluster, switcher, True, say).run()

    return hook


def _pools(
    config: ElasticConfig,
    cluster: SimulatedCluster,
    switcher: SimulatedSwitcher,
    acts: bool,
    say: Say = lambda now, text: None,
) -> ElasticPools:
    controller, clock = Controller(config), cluster.clock
    cluster.front = through(ServingPath, cluster.path, OutcomeTap(clock, controller.outcome))
    return ElasticPools(
        controller,
        switcher,
        cluster.membership.statuses,
        clock,
        acts,
        lambda text: say(clock.now(), text),
        lambda: cluster.path.placer.waiting,
    )

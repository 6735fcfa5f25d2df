"""Runs the live elastic controller, which changes the roles of workers, in a simulated cluster.

    result = simulate(fleet, arrivals, hooks=[elastic(ElasticConfig(slo=...), switch_seconds=20.0)])

The controller, its inputs and its loop are the code of the live router (router/elastic.py,
dispatch/roles/elastic_pools.py). Only the role change is simulated: `switch_seconds` stands for
resharding the weights and for warm-up, which benchmarks/results/role_switch.json measured."""

from collections.abc import Awaitable, Callable

from jdisagg.dispatch.frontend import ServingPath
from jdisagg.dispatch.roles.elastic_pools import ElasticPools
from jdisagg.dispatch.roles.outcomes import OutcomeTap
from jdisagg.layout.axes import Layout
from jdisagg.messages.ports_middleware import through
from jdisagg.messages.roles import SwitchReport, SwitchState
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.router.elastic import Controller, ElasticConfig, check_switch
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


def elastic(
    config: ElasticConfig,
    switch_seconds: float,
    say: Callable[[float, str], None] = lambda now, text: None,
) -> Callable[[SimulatedCluster], Awaitable[None]]:
    """Returns a hook of `simulate` that runs the elastic controller, and calls `say(virtual
    seconds, text)` for each role change. The hook raises ConfigError if the fleet's roles cannot
    change."""

    async def hook(cluster: SimulatedCluster) -> None:
        cluster.fleet.check_roles_change()
        controller, clock = Controller(config), cluster.clock
        cluster.front = through(ServingPath, cluster.path, OutcomeTap(clock, controller.outcome))
        switcher = SimulatedSwitcher(cluster, switch_seconds)
        say_when, held = (
            (lambda text: say(clock.now(), text)),
            (lambda: cluster.path.placer.waiting),
        )
        pools = ElasticPools(
            controller, switcher, cluster.membership.statuses, clock, True, say_when, held
        )
        await pools.run()

    return hook

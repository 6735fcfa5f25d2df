"""The simulated autoscaler keeps the rules of a HorizontalPodAutoscaler with the settings of
deploy/keda.yaml, and pools of a fluid cluster that it scales by the advice follow a burst."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from jdisagg.messages.worker_status import WorkerRole
from jdisagg.router.elastic import ROLES, Controller, ElasticConfig
from jdisagg.router.elastic_signals import SloTarget
from jdisagg.simulator.elastic import Autoscaler, ScaledPool
from tests.router.plant import SLOTS, Load, Plant

KEDA = Path(__file__).resolve().parents[2] / "deploy" / "keda.yaml"
SCALER = Autoscaler()


def sizes(start: int, advised: list[tuple[float, int]], until: float) -> dict[float, int]:
    """Returns the sizes of a pool, at the times of their changes. `advised`: (time from which,
    workers)."""
    pool, found = ScaledPool(SCALER, 16, start), {}
    now = 0.0
    while now < until:
        if pool.step(now, [count for at, count in advised if at <= now][-1]):
            found[now] = pool.size
        now += SCALER.sync_seconds
    return found


def test_its_settings_are_those_of_the_shipped_file() -> None:
    objects = list(yaml.safe_load_all(KEDA.read_text()))
    assert [one["spec"]["maxReplicaCount"] for one in objects] == [*SCALER.most]
    for one in objects:
        down = one["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        assert down["stabilizationWindowSeconds"] == SCALER.down_window_seconds
        (policy,) = down["policies"]
        assert (policy["type"], policy["value"]) == ("Pods", 1)
        assert policy["periodSeconds"] == SCALER.down_seconds
        (trigger,) = one["spec"]["triggers"]
        assert trigger["metadata"]["threshold"] == "1"


def test_a_pool_grows_by_four_or_doubles_and_no_further_than_its_most() -> None:
    assert sizes(1, [(0.0, 30)], 60.0) == {0.0: 5, 15.0: 10, 30.0: 16}


def test_a_change_within_the_tolerance_is_none() -> None:
    assert sizes(11, [(0.0, 12)], 60.0) == {}
    assert sizes(11, [(0.0, 13)], 60.0) == {0.0: 13}


def test_a_pool_shrinks_when_no_more_was_advised_for_the_window_and_one_at_a_time() -> None:
    advised = [(0.0, 4), (100.0, 2), (120.0, 3), (150.0, 2)]
    assert sizes(4, advised, 2000.0) == {165.0: 3, 345.0: 2}


class Advised(Controller):
    """Makes no switch."""

    def look(self, now, statuses, may_switch=True, held=0):
        return super().look(now, statuses, False, held)


def scaled_sizes(rates: list[float], start_seconds: int) -> dict[WorkerRole, list[int]]:
    """Returns the sizes that the autoscaler wants of a fluid cluster's pools, second by second.
    Prompts take 0.45 s of a worker, and answers hold a slot for 8 s."""
    here = Plant.of(1, 1, Advised(ElasticConfig(slo=SloTarget(3.0, 0.035))))
    pools = {role: ScaledPool(SCALER, 16, 1) for role in ROLES}
    starting: list[tuple[int, WorkerRole]] = []
    sizes: dict[WorkerRole, list[int]] = {role: [] for role in ROLES}
    for second, rate in enumerate(rates):
        here.run(1, Load(rate, 0.45, 8.0))
        for at, role in [one for one in starting if one[0] == second]:
            here.roles[f"{role.value}, started at {at}, {len(here.roles)}"] = role
        if second % SCALER.sync_seconds == 0 and here.controller.latest is not None:
            advice = here.controller.latest.advice
            for role, advised in zip(ROLES, (advice.prefill, advice.decode), strict=True):
                by = pools[role].step(second, advised)
                starting += [(second + start_seconds, role)] * by
                for _ in range(-by):
                    del here.roles[[name for name, one in here.roles.items() if one is role][-1]]
        for role, pool in pools.items():
            sizes[role].append(pool.size)
    return sizes


@pytest.mark.parametrize("start_seconds", [30, 90])
def test_pools_follow_a_burst_there_and_back_without_swinging(start_seconds: int) -> None:
    """From 1 to 8 requests a second within 900 s, and back: each pool grows to what the load needs
    at 80 % use, or one more, and then shrinks to where it began, with no other turn."""
    rates = list(np.interp(range(4200), (300, 1200, 1500, 2400), (1.0, 8.0, 8.0, 1.0)))
    for role, sizes in scaled_sizes(rates, start_seconds).items():
        steps = [after - before for before, after in zip(sizes, sizes[1:], strict=False)]
        grew = [at for at, step in enumerate(steps) if step > 0]
        shrank = [at for at, step in enumerate(steps) if step < 0]
        assert max(grew) < min(shrank), (role, steps)
        needed = 8.0 * (0.45 if role is WorkerRole.PREFILL else 8.0 / SLOTS) / 0.8
        assert needed <= max(sizes) <= needed + 1.5, role
        assert sizes[-1] == 1 and max(shrank) < 2400 + 1200, role

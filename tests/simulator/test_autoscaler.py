"""The simulated autoscaler keeps the rules of a HorizontalPodAutoscaler with the settings of
deploy/keda.yaml, and pools that it scales by the controller's advice follow a burst."""

from pathlib import Path

import pytest
import yaml

from benchmarks.burst import ROLES, burst, followed, turns
from jdisagg.simulator.elastic import Autoscaler, ScaledPool

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


@pytest.mark.ci
def test_pools_follow_a_burst_there_and_back_without_swinging() -> None:
    """Half the load of benchmarks/results/burst.json. Each pool turns from growing to shrinking
    once, and never back, and ends as small as it began."""
    run = followed(burst(high=4.0))
    assert run.result.pages_lost == 0
    assert {item.end for item in run.result.outcomes} == {"finished"}
    for role in ROLES:
        assert max(run.sizes(role)) > 2 and run.sizes(role)[-1] == 1, run.said
        assert turns(run.sizes(role)) == (1, 0), run.said
    assert run.within > 0.9, run.said

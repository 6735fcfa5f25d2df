"""The advice on pool sizes, held against the load of a fluid cluster (plant.py)."""

import math

import pytest

from jdisagg.messages.worker_status import WorkerRole
from jdisagg.router.elastic import Advice, Controller, ElasticConfig
from jdisagg.router.elastic_signals import SloTarget
from tests.router.plant import SLOTS, Load, Plant

CONFIG = ElasticConfig(slo=SloTarget(ttft_seconds=3.0, tpot_seconds=0.1))


class Advised(Controller):
    """Makes no switch."""

    def look(self, now, statuses, may_switch=True, held=0):
        return super().look(now, statuses, False, held)


def plant(prefill: int, decode: int, **fields: float) -> Plant:
    return Plant.of(prefill, decode, Advised(CONFIG), **fields)


def advice(here: Plant) -> Advice:
    assert here.controller.latest is not None
    return here.controller.latest.advice


def needed(load: Load) -> tuple[int, int]:
    """Workers at the wanted use, of prompts and of slots that sequences hold."""
    prompts = load.rate * load.prefill_seconds
    slots = load.rate * load.decode_seconds / SLOTS
    first, second = prompts / CONFIG.target_use, slots / CONFIG.target_use
    return math.ceil(first - 1e-9), math.ceil(second - 1e-9)


@pytest.mark.parametrize("size", [5, 8])
@pytest.mark.parametrize("rate", [0.7, 2.0, 4.2, 6.0])
def test_the_advice_is_the_load_over_the_wanted_use_within_one_worker(rate: float, size: int):
    load = Load(rate, 0.4, 8.0)
    here = plant(size, size)
    here.run(600, load)
    prefill, decode = needed(load)
    assert abs(advice(here).prefill - prefill) <= 1 and abs(advice(here).decode - decode) <= 1


def test_a_pool_that_grows_full_asks_for_more_before_requests_miss_the_objective():
    here = plant(2, 4)
    here.run(300, Load(3.0, 0.4, 4.0))
    assert advice(here).prefill == 2
    here.run(120, Load(4.4, 0.4, 4.0))
    assert here.controller.view is not None
    assert here.controller.view.ttft_attainment == 1
    assert advice(here).prefill == 3


def test_a_pool_that_works_off_what_waited_asks_for_no_more():
    here = plant(4, 4, backlog=150.0)
    load = Load(5.0, 0.4, 2.0)
    asked = []
    for _ in range(60):
        here.run(1, load)
        asked.append(advice(here).prefill)
    assert here.controller.view is not None
    assert here.controller.view.ttft_attainment < 0.9 and here.backlog > 0
    assert max(asked) <= 5, "the queue alone would double the pool"
    here.run(400, load)
    assert advice(here).prefill == needed(load)[0] < 4


def test_what_comes_faster_than_it_is_served_is_asked_for_at_once():
    here = plant(1, 6)
    load = Load(6.0, 0.4, 2.0)
    here.run(60, load)
    assert advice(here).prefill >= needed(load)[0]


def test_fewer_are_advised_only_when_no_more_was_needed_for_the_calm_time():
    here = plant(4, 4)
    here.run(400, Load(7.0, 0.4, 2.0))
    assert advice(here).prefill == 4
    for _ in range(4):
        here.run(int(CONFIG.calm_seconds) - 100, Load(1.0, 0.4, 2.0))
        assert advice(here).prefill == 4
        here.run(80, Load(7.0, 0.4, 2.0))
        assert advice(here).prefill == 4
    here.run(int(CONFIG.calm_seconds) + 100, Load(1.0, 0.4, 2.0))
    assert advice(here).prefill == 1
    assert here.count(WorkerRole.PREFILL) == 4

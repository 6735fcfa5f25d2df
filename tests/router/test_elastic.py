"""The elastic controller, held against a fluid cluster of its own (plant.py) and against rules that
no input may break."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from jdisagg.errors import ConfigError, InvalidRequestError, UnavailableError
from jdisagg.layout.axes import Layout
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.router.elastic import Controller, ElasticConfig, check_switch, usual_layout
from jdisagg.router.elastic_signals import EndedRequest, SloTarget, SloWindow
from jdisagg.router.predictor import quantile
from tests.lanes import given_examples
from tests.router.plant import SLOTS, Load, Plant, status

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
SLO = SloTarget(ttft_seconds=2.0, tpot_seconds=0.1, quantile=0.9)
CONFIG = ElasticConfig(slo=SLO)

# What two workers of each role carry: 8 requests of 0.1 s of prefill, and of 2 s of decoding.
EASY = Load(rate=8, prefill_seconds=0.1, decode_seconds=2)
PREFILL_HEAVY = Load(rate=8, prefill_seconds=0.32, decode_seconds=1)
DECODE_HEAVY = Load(rate=8, prefill_seconds=0.05, decode_seconds=5)
BOTH_HEAVY = Load(rate=8, prefill_seconds=0.6, decode_seconds=9)


def plant(
    prefill: int = 2, decode: int = 2, config: ElasticConfig = CONFIG, switch_seconds: float = 20.0
) -> Plant:
    return Plant.of(prefill, decode, Controller(config), switch_seconds=switch_seconds)


def test_a_cluster_with_room_on_both_sides_stays_as_it_is():
    here = plant()
    here.run(900, EASY)
    assert not here.switches
    assert here.controller.latest is not None
    assert here.controller.latest.reason == "both pools have room"


def test_the_ratio_follows_the_load_there_and_back():
    here = plant()
    here.run(300, PREFILL_HEAVY)
    assert (here.count(PREFILL), here.count(DECODE)) == (3, 1)
    here.run(1200, PREFILL_HEAVY)
    assert len(here.switches) == 1, "once is enough"
    here.run(800, DECODE_HEAVY)
    assert here.count(DECODE) == 3
    assert [switch.role for _, switch in here.switches] == [PREFILL, DECODE, DECODE]


def test_what_is_short_on_both_sides_is_for_the_autoscaler_and_not_for_a_switch():
    here = plant()
    here.run(600, BOTH_HEAVY)
    assert not here.switches and here.controller.latest is not None
    advice = here.controller.latest.advice
    assert advice.decode > 2 and "decode is short" in advice.reason


def test_a_short_pool_whose_neighbour_has_none_to_give_asks_for_more():
    here = plant(prefill=1, decode=1)
    here.run(300, Load(rate=7, prefill_seconds=0.2, decode_seconds=1))
    assert not here.switches and here.controller.latest is not None
    advice = here.controller.latest.advice
    assert (advice.prefill, advice.decode) == (2, 1), advice


def test_without_one_of_each_nothing_is_served_so_the_role_that_is_left_gives_one_though_it_is_short():  # noqa: E501
    controller = Controller(CONFIG)
    decodes = tuple(status(f"d{number}", DECODE) for number in range(2))
    full = tuple(msgspec.structs.replace(one, free_pages=(0,)) for one in decodes)
    switches = []
    for second in range(20):
        controller.outcome(EndedRequest(float(second), math.inf))
        verdict = controller.look(float(second), full)
        switches += [verdict.switch] if verdict.switch else []
    assert [switch.role for switch in switches] == [PREFILL]
    assert "no worker takes requests" in verdict.reason or "changing its role" in verdict.reason


def test_without_traffic_nothing_changes_its_role_and_fewer_are_advised_but_one_of_each():
    here = plant(prefill=3, decode=3)
    here.run(2000, Load(rate=0, prefill_seconds=0, decode_seconds=0))
    assert not here.switches and here.controller.latest is not None
    verdict = here.controller.latest
    assert verdict.reason == "no traffic"
    assert (verdict.advice.prefill, verdict.advice.decode) == (1, 1)


def test_a_controller_that_never_saw_a_worker_or_a_request_has_an_answer():
    verdict = Controller(CONFIG).look(0.0, ())
    assert verdict.switch is None and verdict.reason == "no traffic"
    assert (verdict.advice.prefill, verdict.advice.decode) == (1, 1)


def test_a_change_that_costs_more_than_it_brings_is_not_made():
    slow = ElasticConfig(slo=SLO, horizon_seconds=60.0, switch_seconds=60.0)
    here = plant(config=slow)
    here.run(300, PREFILL_HEAVY)
    assert not here.switches and here.controller.latest is not None
    assert "would gain" in here.controller.latest.reason


def test_running_sequences_that_would_have_to_move_weigh_against_a_change():
    gains = []
    for harm in (0.0, 5.0):
        here = plant(config=ElasticConfig(slo=SLO, move_harm=harm))
        here.run(200, PREFILL_HEAVY)
        gains.append(here.switches[0][1].gain)
    moving = (gains[0] - gains[1]) / 5.0
    assert 0 < moving <= SLOTS, "what runs on the worker that gives its role up"


def test_what_a_change_really_took_is_what_the_next_one_is_charged():
    gains = []
    for seconds in (5.0, 300.0):
        here = plant()
        here.controller.switched(0.0, seconds)
        here.run(200, PREFILL_HEAVY)
        gains.append(here.switches[0][1].gain)
    assert gains[0] > gains[1] > 0


def test_a_burst_shorter_than_the_patience_changes_nothing():
    here = plant()
    here.run(300, EASY)
    here.run(5, PREFILL_HEAVY)
    here.run(300, EASY)
    assert not here.switches


ROOM = ([], "both pools have room")


def two_of_each(prefill: dict[str, Any], decode: dict[str, Any]) -> tuple[WorkerStatus, ...]:
    return (
        *(status(f"p{at}", PREFILL, **prefill) for at in range(2)),
        *(status(f"d{at}", DECODE, **decode) for at in range(2)),
    )


def changes(
    workers: tuple[WorkerStatus, ...], ended: Callable[[float], EndedRequest], held: int = 0
) -> tuple[list[WorkerRole], str]:
    """The roles that workers are to have, as they report the same for two minutes, and the last
    reason."""
    controller, found = Controller(CONFIG), []
    for second in range(120):
        controller.outcome(ended(second))
        found.append(controller.look(second, workers, held=held))
    return [verdict.switch.role for verdict in found if verdict.switch], found[-1].reason


def late(second: float) -> EndedRequest:
    return EndedRequest(second, 9.0, 0.02, queue_seconds=8.5)


def test_prompts_whose_own_prefill_is_too_long_are_no_reason_to_add_workers():
    workers = (status("p0", PREFILL, running=1), *two_of_each({}, {})[1:])
    assert changes(workers, lambda at: EndedRequest(at, 5.0, 0.02, queue_seconds=0.0)) == ROOM


def test_a_tpot_that_a_single_sequence_misses_is_no_reason_to_add_workers():
    workers = two_of_each({}, {"running": 1})
    assert changes(workers, lambda at: EndedRequest(at, 0.1, 0.5)) == ROOM


def test_a_mean_that_meets_the_objective_does_not_hide_a_tail_that_misses_it():
    paces = [0.02, 0.02, 0.02, 0.02, 0.3]
    assert sum(paces) / len(paces) < SLO.tpot_seconds
    workers = two_of_each({}, {"running": 9})
    assert changes(workers, lambda at: EndedRequest(at, 0.1, paces[int(at) % 5]))[0] == [DECODE]


def test_pages_and_slots_of_prompts_that_wait_for_prefill_do_not_make_decode_short():
    full = {"running": SLOTS, "handoffs": SLOTS - 1, "free_pages": (0,), "reserved_pages": (95,)}
    workers = two_of_each({"running": 1, "waiting": 30}, {**full, "waiting": 5})
    assert changes(workers, late)[0] == [PREFILL]


@pytest.mark.parametrize(("computing", "short"), [(1, PREFILL), (0, DECODE)])
def test_requests_that_the_router_holds_count_where_they_would_wait(
    computing: int, short: WorkerRole
):
    """While all prefill workers are busy they are held for their sake, else for want of room to
    decode."""
    workers = two_of_each({"running": computing}, {"running": 4})
    assert changes(workers, late, held=7)[0] == [short]


def test_no_second_change_while_one_is_under_way_and_none_until_its_effect_shows():
    controller = Controller(CONFIG)
    workers = tuple(status(f"p{at}", PREFILL, running=1, waiting=9) for at in range(2)) + tuple(
        status(f"d{at}", DECODE) for at in range(4)
    )

    def look(second: float) -> bool:
        controller.outcome(late(second))
        return controller.look(second, workers).switch is not None

    assert sum(look(second) for second in range(500)) == 1
    controller.switched(500.0, None)
    quiet = [look(500.0 + second) for second in range(int(CONFIG.cooldown_seconds))]
    assert not any(quiet)
    assert any(look(500.0 + second) for second in range(int(CONFIG.cooldown_seconds), 200)), (
        "a change that failed may be tried again"
    )


roles = st.sampled_from([PREFILL, DECODE, WorkerRole.MIXED])
layouts = st.sampled_from(["dp=1,tp=1,ep=1", "dp=2,tp=1,ep=1", "dp=1,tp=2,ep=1", "dp=2,tp=2,ep=1"])


@st.composite
def worker_statuses(draw: st.DrawFn) -> tuple[WorkerStatus, ...]:
    count = draw(st.integers(0, 6))
    return tuple(
        status(
            f"w{index}",
            draw(roles),
            layout=draw(layouts),
            running=draw(st.integers(0, SLOTS)),
            waiting=draw(st.integers(0, 50)),
            free_pages=(draw(st.integers(0, 60)),),
            reserved_pages=(draw(st.integers(0, 40)),),
            draining=draw(st.booleans()),
        )
        for index in range(count)
    )


outcomes = st.builds(
    EndedRequest,
    at=st.just(0.0),
    ttft_seconds=st.one_of(st.just(math.inf), st.floats(0, 100)),
    tpot_seconds=st.one_of(st.none(), st.floats(0, 2)),
    queue_seconds=st.floats(0, 50),
)
moments = st.lists(
    st.tuples(st.floats(0, 30), worker_statuses(), st.lists(outcomes, max_size=12), st.booleans()),
    max_size=40,
)


@given_examples(50, 150, moments=moments)
def test_no_history_breaks_the_rules(moments):
    """Never the last taking worker of a role, never one that drains, never two at once, never
    within the cooldown, never without traffic; the advice never falls below one of each; the layout
    fits the worker's devices; the same history gives the same verdicts."""
    config = ElasticConfig(
        slo=SLO, patience_seconds=5, cooldown_seconds=20, least_requests=2, window_seconds=30
    )
    controllers = [Controller(config), Controller(config)]
    now, ended, under_way = 0.0, -math.inf, False
    for pause, workers, requests, ends in moments:
        now += pause
        for controller in controllers:
            for one in requests:
                controller.outcome(
                    EndedRequest(now, one.ttft_seconds, one.tpot_seconds, one.queue_seconds)
                )
        verdict, again = (controller.look(now, workers) for controller in controllers)
        assert verdict == again
        assert verdict.advice.prefill >= 1 and verdict.advice.decode >= 1 and verdict.reason
        assert all(
            math.isfinite(need) and need >= 0
            for need in (verdict.advice.prefill_need, verdict.advice.decode_need)
        )
        if verdict.switch is not None:
            assert not under_way and now >= ended + config.cooldown_seconds
            # raises where it must not be
            chosen = check_switch(workers, verdict.switch.name, verdict.switch.role)
            assert verdict.switch.layout.devices <= Layout.parse(chosen.layout).devices
            assert verdict.switch.gain > 0
            under_way = True
        if ends and under_way:
            under_way, ended = False, now
            for controller in controllers:
                controller.switched(now, 10.0)


@settings(max_examples=25, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    prefill=st.integers(1, 4),
    decode=st.integers(1, 4),
    rate=st.floats(0, 12),
    prefill_seconds=st.floats(0.01, 0.5),
    decode_seconds=st.floats(1, 10),
)
# no ratio carries it, and the model thinks that one does
@pytest.mark.ci
@example(prefill=1, decode=3, rate=9.0, prefill_seconds=0.25, decode_seconds=1.0)
def test_under_a_steady_load_the_ratio_comes_to_rest(
    prefill: int, decode: int, rate: float, prefill_seconds: float, decode_seconds: float
):
    here = plant(prefill, decode, ElasticConfig(slo=SLO, interval_seconds=2.0))
    load = Load(rate, prefill_seconds, decode_seconds)
    here.run(1200, load)
    before = len(here.switches)
    here.run(1200, load)
    assert len(here.switches) == before, f"still changing under one load: {here.switches}"
    turns = [
        one.role is not other.role for (_, one), (_, other) in itertools.pairwise(here.switches)
    ]
    assert sum(turns) <= 1, f"a mistake is undone once: {here.switches}"
    assert here.count(PREFILL) >= 1 and here.count(DECODE) >= 1


@given(values=st.lists(st.floats(0, 100), min_size=1, max_size=50), at=st.floats(0.01, 0.99))
def test_a_quantile_is_the_smallest_value_that_enough_values_do_not_exceed(
    values: list[float], at: float
):
    found = quantile(values, at)
    enough = [
        value
        for value in values
        if sum(other <= value for other in values) >= at * len(values) - 1e-9
    ]
    assert found == min(enough)


def test_what_left_the_window_counts_no_more():
    signals = SloWindow(window_seconds=10.0)
    signals.sample(0.0, (status("p0", PREFILL, running=1),))
    signals.outcome(EndedRequest(0.0, 9.0, 9.0))
    assert signals.view(5.0, SLO).ttft_attainment == 0.0
    later = signals.view(10.5, SLO)
    assert (later.requests, later.ttft_attainment, later.prefill.use) == (0, 1.0, 0.0)


def test_the_last_worker_of_a_role_and_mixed_ones_keep_theirs():
    workers = (
        status("p0", PREFILL),
        status("p1", PREFILL, draining=True),
        status("d0", DECODE),
        status("d1", DECODE),
    )
    assert check_switch(workers, "d1", PREFILL).name == "d1"
    with pytest.raises(UnavailableError, match="last prefill worker"):
        check_switch(workers, "p0", DECODE)
    with pytest.raises(UnavailableError, match="draining"):
        check_switch(workers, "p1", DECODE)
    with pytest.raises(InvalidRequestError, match="decode worker already"):
        check_switch(workers, "d1", DECODE)
    with pytest.raises(InvalidRequestError, match="no worker 'x'; known: d0, d1, p0, p1"):
        check_switch(workers, "x", DECODE)
    with pytest.raises(
        InvalidRequestError, match="only prefill and decode workers can change roles"
    ):
        check_switch((*workers, status("m", WorkerRole.MIXED)), "m", DECODE)


def test_a_worker_takes_the_layout_that_its_new_role_mostly_has_where_its_devices_are_enough():
    workers = (
        status("p0", PREFILL, layout="dp=1,tp=2,ep=1"),
        status("d0", DECODE, layout="dp=2,tp=1,ep=1"),
        status("d1", DECODE, layout="dp=2,tp=1,ep=1"),
        status("d2", DECODE, layout="dp=1,tp=1,ep=1"),
    )
    assert usual_layout(workers, workers[0], DECODE) == Layout(dp=2)
    small = status("p1", PREFILL, layout="dp=1,tp=1,ep=1")
    assert usual_layout((*workers, small), small, DECODE) == Layout()
    assert usual_layout(workers[:1], workers[0], DECODE) == Layout(tp=2)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("window_seconds", 0.0, "elastic.window_seconds must be positive, got 0.0"),
        ("patience_seconds", -1.0, "elastic.patience_seconds must not be negative"),
        ("target_use", 0.99, "elastic.target_use must be in"),
        ("least_prefill", 0, "elastic.least_prefill must be positive, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(field: str, value: float, message: str):
    with pytest.raises(ConfigError, match=message):
        ElasticConfig(**{field: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="slo.quantile"):
        SloTarget(quantile=1.0)

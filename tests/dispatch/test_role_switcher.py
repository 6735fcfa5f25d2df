"""The role desk and the elastic pools, in virtual time, over a real roster: who may change, what
becomes of it, what is never done."""

import asyncio
from dataclasses import dataclass
from typing import Self

import pytest

from jdisagg.dispatch.membership import Membership, WorkerPorts
from jdisagg.dispatch.roles.elastic_pools import ElasticPools
from jdisagg.dispatch.roles.role_switcher import RoleSwitcher
from jdisagg.errors import DeadlineExceededError, InvalidRequestError, UnavailableError
from jdisagg.layout.axes import Layout
from jdisagg.messages.registry import ModelCard, WorkerCard
from jdisagg.messages.roles import SwitchCall, SwitchReport, SwitchState
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.router.elastic import Controller, ElasticConfig
from jdisagg.router.elastic_signals import EndedRequest
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS
from tests.fakes.virtual_time import VirtualClock
from tests.router.plant import status

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
MODEL = ModelCard("toy", "toy", 257, 512, "float32", 64)
AWAY_SECONDS = 5.0


@dataclass
class ToyWorker:
    """A worker that changes its role as a real one does: it drains, is away, and registers again.
    `fails`: it comes back as it was. `dies`: its process ends midway and is started again.
    `unheard`: its answer to the call is lost; `mute`: its reports too, from the call to its next
    life."""

    name: str
    role: WorkerRole
    membership: Membership
    boot_id: int
    fails: bool = False
    dies: bool = False
    unheard: bool = False
    mute: bool = False
    silent: bool = False
    load: int = 0
    report: SwitchReport | None = None
    away: bool = False
    draining: bool = False

    def said(self) -> WorkerStatus:
        return status(
            self.name,
            self.role,
            draining=self.draining,
            running=min(self.load, 8),
            waiting=max(0, self.load - 8),
        )

    def serve(self) -> None:
        layout = Layout(tp=2) if self.role is PREFILL else Layout(dp=2)
        self.membership.register(
            WorkerCard(self.name, self.boot_id, self.role, self.name, layout, MODEL)
        )
        self.membership.heartbeat(self.boot_id, self.said())

    def beat(self) -> None:
        if not self.away:
            self.membership.heartbeat(self.boot_id, self.said())

    async def switch_role(self, call: SwitchCall) -> None:
        if self.silent:
            return
        asyncio.ensure_future(self._change(call))
        if self.unheard:
            self.draining = True
            self.report = SwitchReport(
                self.name,
                self.boot_id,
                self.role,
                call.layout,
                SwitchState.DRAINING,
                call.switch_id,
            )
            raise DeadlineExceededError("no answer within 5 s")

    async def switch_report(self) -> SwitchReport:
        if self.away or (self.mute and self.draining):
            raise UnavailableError("connection refused")
        return self.report or SwitchReport(self.name, self.boot_id, self.role, Layout(tp=2))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def _change(self, call: SwitchCall) -> None:
        self.draining = True
        self.beat()
        await asyncio.sleep(1.0)
        self.away = True
        self.membership.deregister(self.name, self.boot_id)
        await asyncio.sleep(AWAY_SECONDS)
        self.away, self.draining, self.boot_id = False, False, self.boot_id + 1000
        if not self.fails and not self.dies:
            self.role = call.role
        if not self.dies:
            state, reason = (
                (SwitchState.FAILED, "no room") if self.fails else (SwitchState.DONE, "")
            )
            self.report = SwitchReport(
                self.name,
                self.boot_id,
                self.role,
                call.layout,
                state,
                call.switch_id,
                reason,
                total_seconds=6.0,
            )
        self.serve()


class Town:
    """A roster, its workers that beat, and a desk over them."""

    def __init__(self, prefill: int, decode: int) -> None:
        self.clock = VirtualClock()
        self.membership = Membership(self.clock, lambda card: WorkerPorts())
        names = [f"p{index}" for index in range(prefill)] + [f"d{index}" for index in range(decode)]
        self.workers = {
            name: ToyWorker(
                name, PREFILL if name.startswith("p") else DECODE, self.membership, at + 1
            )
            for at, name in enumerate(names)
        }
        ids = iter(range(1, 1000))
        self.switcher = RoleSwitcher(
            self.membership, self.workers.__getitem__, self.clock, lambda: next(ids)
        )
        for worker in self.workers.values():
            worker.serve()
        self.beating = asyncio.ensure_future(self._beat())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            for worker in self.workers.values():
                worker.beat()
            self.membership.sweep()

    def roles(self) -> dict[str, str]:
        return {one.name: one.role.value for one in self.membership.statuses()}


async def test_a_worker_changes_its_role_and_is_placed_on_when_the_desk_says_so() -> None:
    town = Town(2, 1)
    report = await town.switcher.switch("p1", DECODE, None, 60.0)
    assert report.state == SwitchState.DONE and report.role == DECODE
    assert report.layout == Layout(dp=1, tp=2), "its own devices, d0's layout"
    assert town.roles() == {"p0": "prefill", "p1": "decode", "d0": "decode"}
    assert town.switcher.counters.snapshot() == {"roles_switched": 1}
    assert not town.switcher.changing


async def test_a_change_whose_answer_was_lost_is_followed_all_the_same() -> None:
    town = Town(2, 1)
    town.workers["p1"].unheard = True
    report = await town.switcher.switch("p1", DECODE, None, 60.0)
    assert report.state is SwitchState.DONE and town.roles()["p1"] == "decode"


async def test_a_change_that_nobody_reported_is_followed_once_the_worker_is_heard_again():
    town = Town(2, 1)
    town.workers["p1"].unheard = town.workers["p1"].mute = True
    report = await town.switcher.switch("p1", DECODE, None, 60.0)
    assert report.state is SwitchState.DONE and town.roles()["p1"] == "decode"
    assert town.clock.now() >= AWAY_SECONDS, "it was not heard before its next life"


async def test_a_worker_that_nobody_can_ask_is_given_up_before_the_deadline() -> None:
    town = Town(2, 1)
    worker = town.workers["p1"]

    async def refused(call: SwitchCall) -> None:
        worker.away = True
        raise UnavailableError("connection refused")

    worker.switch_role = refused  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match="connection refused"):
        await town.switcher.switch("p1", DECODE, None, 300.0)
    assert town.clock.now() <= DEFAULT_TIMEOUTS.membership.role_uncertain_seconds + 1.0
    assert not town.switcher.changing


async def test_two_at_once_are_one_too_many() -> None:
    town = Town(3, 1)
    first = asyncio.ensure_future(town.switcher.switch("p1", DECODE, None, 60.0))
    await asyncio.sleep(0.5)
    with pytest.raises(UnavailableError, match="'p1' is changing its role"):
        await town.switcher.switch("p2", DECODE, None, 60.0)
    assert (await first).state is SwitchState.DONE
    assert town.roles()["p2"] == "prefill"


async def test_the_last_of_a_role_stays_and_nobody_is_asked() -> None:
    town = Town(1, 2)
    with pytest.raises(UnavailableError, match="last prefill worker"):
        await town.switcher.switch("p0", DECODE, None, 60.0)
    with pytest.raises(InvalidRequestError, match="no worker 'x'"):
        await town.switcher.switch("x", DECODE, None, 60.0)
    assert town.workers["p0"].report is None and not town.switcher.changing


@pytest.mark.parametrize(
    ("how", "reason"), [("fails", "no room"), ("dies", "process was restarted during the change")]
)
async def test_a_change_that_did_not_work_is_told_as_such_once_the_worker_is_back(
    how: str, reason: str
) -> None:
    town = Town(2, 1)
    setattr(town.workers["p1"], how, True)
    report = await town.switcher.switch("p1", DECODE, None, 60.0)
    assert report.state is SwitchState.FAILED and reason in report.reason and report.role is PREFILL
    assert town.roles()["p1"] == "prefill"
    assert town.switcher.counters.snapshot() == {"role_switches_failed": 1}


async def test_a_worker_that_never_comes_back_ends_the_wait_at_its_deadline() -> None:
    town = Town(2, 1)
    town.workers["p1"].silent = True
    with pytest.raises(DeadlineExceededError, match="'p1' did not report as decode within 20 s"):
        await town.switcher.switch("p1", DECODE, None, 20.0)
    assert not town.switcher.changing
    assert town.switcher.counters.snapshot() == {"role_switches_failed": 1}


async def test_a_desk_whose_way_to_a_worker_cannot_be_opened_or_closed_is_free_again() -> None:
    town = Town(2, 1)
    workers, ids = town.workers, iter(range(1, 1000))
    switcher = RoleSwitcher(
        town.membership, {"p0": workers["p0"]}.__getitem__, town.clock, lambda: next(ids)
    )
    with pytest.raises(KeyError):
        await switcher.switch("p1", DECODE, None, 60.0)
    assert not switcher.changing

    class Sticky(ToyWorker):
        async def __aexit__(self, *_: object) -> None:
            assert town.switcher.changing, "until it is closed"
            raise OSError("stuck")

    workers["p1"].__class__ = Sticky
    with pytest.raises(OSError, match="stuck"):
        await town.switcher.switch("p1", DECODE, None, 60.0)
    assert not town.switcher.changing and town.roles()["p1"] == "decode"


def pools(town: Town, acts: bool = True) -> tuple[Controller, ElasticPools, list[str]]:
    config = ElasticConfig(patience_seconds=5, cooldown_seconds=30, window_seconds=30)
    controller, said = Controller(config), list[str]()
    return (
        controller,
        ElasticPools(
            controller, town.switcher, town.membership.statuses, town.clock, acts, said.append
        ),
        said,
    )


async def overload(town: Town, controller: Controller, seconds: int) -> None:
    """Prompts wait at the prefill workers, and TTFT is missed for it."""
    for _ in range(seconds):
        for worker in town.workers.values():
            worker.load = 12 if worker.role is PREFILL else 0
        controller.outcome(EndedRequest(town.clock.now(), 9.0, 0.01, queue_seconds=8.9))
        await asyncio.sleep(1.0)


async def test_the_pools_change_by_themselves_under_load_and_one_at_a_time() -> None:
    town = Town(2, 3)
    controller, elastic, said = pools(town)
    elastic.start()
    await overload(town, controller, 40)
    assert sorted(town.roles().values()).count("prefill") == 3
    assert (
        len(said) == 2 and "is to become prefill" in said[0] and "is prefill after 6.0 s" in said[1]
    )
    await overload(town, controller, 200)
    assert sorted(town.roles().values()) == [
        "decode",
        "prefill",
        "prefill",
        "prefill",
        "prefill",
    ], "one of each stays"
    await elastic.stop()


async def test_pools_that_only_advise_change_nothing_and_ask_for_more() -> None:
    town = Town(2, 3)
    controller, elastic, said = pools(town, acts=False)
    elastic.start()
    await overload(town, controller, 60)
    advice = await elastic.advice()
    assert not said and sorted(town.roles().values()).count("prefill") == 2
    assert (advice.prefill_now, advice.decode_now, advice.elastic) == (2, 3, False)
    assert advice.prefill > 2 and advice.decode == 3 and advice.ttft_attainment == 0.0
    assert "could become prefill" in advice.decision
    await elastic.stop()


async def test_a_look_that_fails_is_told_and_others_follow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    town = Town(2, 3)
    controller, looks = Controller(ElasticConfig()), 0

    def statuses() -> tuple[WorkerStatus, ...]:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise ValueError("a worker says nonsense")
        return town.membership.statuses()

    elastic = ElasticPools(controller, town.switcher, statuses, town.clock, True)
    elastic.start()
    await asyncio.sleep(4.5)
    await elastic.stop()
    assert looks == 5 and "a worker says nonsense" in caplog.text


async def test_a_change_that_somebody_asked_for_makes_the_controller_look_afresh() -> None:
    town = Town(3, 1)
    controller, elastic, said = pools(town)
    elastic.start()
    await overload(town, controller, 3)
    report = await elastic.switch("p2", DECODE, None, 60.0)
    assert report.state is SwitchState.DONE
    await asyncio.sleep(1.0)
    assert controller.view is not None and controller.view.requests == 0
    assert not said, "nobody but the operator changed anything"
    await elastic.stop()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_change_must_have_time_and_an_end(seconds: float) -> None:
    town = Town(3, 1)
    _, elastic, _ = pools(town)
    with pytest.raises(InvalidRequestError, match="positive and finite"):
        await elastic.switch("p2", DECODE, deadline_seconds=seconds)
    assert not town.switcher.changing and not town.workers["p2"].draining


async def test_a_change_that_was_refused_leaves_what_the_controller_saw() -> None:
    town = Town(3, 1)
    controller, elastic, _ = pools(town)
    elastic.start()
    await overload(town, controller, 3)
    for name, role in (("x", DECODE), ("p2", PREFILL), ("d0", PREFILL)):
        with pytest.raises((InvalidRequestError, UnavailableError)):
            await elastic.switch(name, role, None, 60.0)
    await asyncio.sleep(1.0)
    assert controller.view is not None and controller.view.requests == 3
    await elastic.stop()

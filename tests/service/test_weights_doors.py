"""Updates of weights and sleep over HTTP, and what workers do meanwhile."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from jdisagg.client import Administration
from jdisagg.clock import MonotonicClock
from jdisagg.dispatch import caller
from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.dispatch.weights_control import WeightsControl
from jdisagg.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    UnauthenticatedError,
    UnavailableError,
)
from jdisagg.messages.weights import (
    CommitCall,
    OfferName,
    SleepCall,
    StageCall,
    StagedWeights,
    UpdateMode,
)
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.telemetry import Counters
from tests import time_scale
from tests.fakes.manual_clock import ManualClock
from tests.service.doors import STATUS
from tests.service.http_doors import HttpDoor, http_door


@dataclass
class Worker:
    """A worker that serves every folder but "/bad", and offers but "offer:gone", and its calls.
    `full`: it has no memory for two copies while it is awake."""

    name: str
    calls: list[object] = field(default_factory=list)
    weights: str = ""
    asleep: bool = False
    dies: bool = False
    full: bool = False

    def said(self) -> WorkerStatus:
        return msgspec.structs.replace(
            STATUS, name=self.name, weights=self.weights, asleep=self.asleep
        )

    async def stage_weights(self, call: StageCall) -> StagedWeights:
        self.calls.append(call)
        if call.folder == "/bad" and self.name == "p":
            raise InvalidRequestError("tensors are missing")
        if call.folder == "offer:gone":
            raise InvalidRequestError("the offer is closed")
        if self.full and not self.asleep:
            return StagedWeights("", missing_bytes=5)
        content = call.folder.removeprefix("offer:of a worker")
        return StagedWeights(f"{call.version or 'f00'}@f00{content}", 100)

    async def commit_weights(self, call: CommitCall) -> WorkerStatus:
        self.calls.append(call)
        if self.dies:
            raise UnavailableError("connection refused")
        self.weights = call.weights
        return self.said()

    async def drop_weights(self) -> None:
        self.calls.append("drop")

    async def offer_weights(self, lease_seconds: float) -> OfferName:
        self.calls.append("offer")
        return OfferName(f"offer:of a worker{self.weights.partition('f00')[2]}")

    async def sleep(self, call: SleepCall) -> WorkerStatus:
        self.calls.append(call)
        self.asleep = True
        return self.said()

    async def wake(self, deadline_seconds: float) -> WorkerStatus:
        self.asleep = False
        return self.said()


class Path:
    """A path that counts its pauses."""

    def __init__(self, workers: dict[str, Worker]) -> None:
        self.pauses: list[float | None] = []
        self.heard: list[WorkerStatus] = []
        self.cluster = ClusterPorts({}, {"d": None}, weights=workers, reported=self.heard.append)

    @contextlib.asynccontextmanager
    async def paused(self, drain_seconds: float | None) -> AsyncIterator[None]:
        self.pauses.append(drain_seconds)
        yield


@dataclass
class Served:
    door: HttpDoor
    path: Path
    prefill: Worker
    decode: Worker


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with http_door() as door:
        workers = {name: Worker(name) for name in "pd"}
        path = Path(workers)
        door.frontend.weights = WeightsControl(path, MonotonicClock(), Counters())
        yield Served(door, path, workers["p"], workers["d"])


async def test_an_update_stages_on_all_and_then_commits_on_all(served: Served) -> None:
    asked = {"model_path": "/one", "weight_version": "1", "mode": "keep", "deadline_seconds": 9}
    answer = await served.door.ask("/update_weights_from_disk", asked)
    assert answer.status == 200 and answer.fields["success"] is True
    assert answer.fields["weights"] == served.prefill.weights == served.decode.weights
    assert served.prefill.calls == [StageCall("/one", "1", 9.0), CommitCall("1@f00/one", True)]
    admin = Administration(served.door.url)
    changes = {"mode": "drain", "deadline_seconds": 7.0}
    report = await asyncio.to_thread(admin.update_weights, "/two", **changes)
    assert report.weights == "f00@f00/two" and report.bytes == 200
    assert report.workers == ("d", "p"), "decode workers commit first"
    assert served.path.pauses == [None, 7.0]
    assert [one.weights for one in served.path.heard][-2:] == [report.weights] * 2


async def test_a_worker_that_cannot_stage_ends_the_update_on_all(served: Served) -> None:
    admin = Administration(served.door.url)
    with pytest.raises(InvalidRequestError, match="worker 'p': tensors are missing"):
        await asyncio.to_thread(admin.update_weights, "/bad")
    assert served.decode.calls[-1] == "drop" and not served.path.pauses
    with pytest.raises(InvalidRequestError, match="finite"):
        await asyncio.to_thread(admin.update_weights, "/one", deadline_seconds=-1.0)
    refused = {"model_path": "/one", "mode": "now"}
    answer = await served.door.ask("/update_weights_from_disk", refused)
    assert answer.status == 400 and "recompute, drain, keep" in str(answer.fields)


async def test_a_worker_that_dies_before_it_commits_is_named_and_the_others_serve(
    served: Served,
) -> None:
    served.prefill.dies = True
    control = served.door.frontend.weights
    report = await control.update("/one", "1")
    assert report.workers == ("d",) and report.failed == ("p: connection refused",)
    served.decode.dies = True
    admin = Administration(served.door.url)
    with pytest.raises(
        UnavailableError, match="all workers failed to update: d: connection refused"
    ):
        await asyncio.to_thread(admin.update_weights, "/two")


async def test_a_commit_that_began_goes_to_its_end_though_the_caller_leaves(served: Served) -> None:
    """Else decode workers would have the weights and prefill workers not, and no pair would
    match."""
    began, going = asyncio.Event(), asyncio.Event()
    commit = served.decode.commit_weights

    async def held(call: CommitCall) -> WorkerStatus:
        began.set()
        await going.wait()
        return await commit(call)

    served.decode.commit_weights = held
    control = WeightsControl(served.path, MonotonicClock(), Counters())
    update = asyncio.create_task(control.update("/one", "1"))
    await began.wait()
    update.cancel()
    await asyncio.sleep(0)
    going.set()
    with pytest.raises(asyncio.CancelledError):
        await update
    assert served.prefill.weights == served.decode.weights == "1@f00/one"
    assert control._identity == "1@f00/one", "late workers get these weights"


async def test_a_change_of_weights_waits_for_another_one_until_its_deadline(served: Served) -> None:
    going = asyncio.Event()

    async def held(call: StageCall) -> StagedWeights:
        await going.wait()
        return StagedWeights("1@f00/one", 100)

    served.decode.stage_weights = held
    control = WeightsControl(served.path, MonotonicClock(), Counters())
    first = asyncio.create_task(control.update("/one", "1"))
    await asyncio.sleep(0)
    for waiting in (
        control.update("/two", deadline_seconds=0.01),
        control.sleep(1, deadline_seconds=0.01),
        control.wake(deadline_seconds=0.01),
    ):
        with pytest.raises(DeadlineExceededError, match="another update, sleep or wake"):
            await waiting
    going.set()
    assert (await first).weights == served.prefill.weights == "1@f00/one"


async def test_workers_that_do_not_wake_after_an_update_do_not_make_it_fail(served: Served) -> None:
    async def never(_: float) -> WorkerStatus:
        raise UnavailableError("connection refused")

    served.prefill.full, served.prefill.wake = True, never
    control = WeightsControl(served.path, MonotonicClock(), Counters())
    report = await control.update("/one", "1")
    assert served.decode.weights == report.weights and served.prefill.asleep


async def test_workers_sleep_and_wake_by_name_or_all_at_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, admin = served.door, Administration(served.door.url)

    async def statuses() -> tuple[WorkerStatus, ...]:
        return served.prefill.said(), served.decode.said()

    monkeypatch.setattr(door.frontend, "status", statuses)
    asleep = await asyncio.to_thread(admin.sleep, 2, ["d"], deadline_seconds=3.0)
    assert asleep == {"p": False, "d": True} and served.decode.calls == [SleepCall(2, 3.0)]
    assert await asyncio.to_thread(admin.wake) == {"p": False, "d": False}
    with pytest.raises(InvalidRequestError, match="worker 'x' is unknown; known: p, d"):
        await asyncio.to_thread(admin.wake, ["x"])
    await door.served("/sleep?level=2", {})
    await door.served("/sleep", {"level": 1, "workers": ["p"]})
    assert [one.level for one in served.prefill.calls] == [2, 1]
    assert (await door.ask("/wake_up", {})).fields["is_sleeping"] is False


async def test_a_tenant_changes_no_weights_and_a_server_without_workers_says_so(
    served: Served,
) -> None:
    control = served.door.frontend.weights
    with caller.calling(caller.Caller(tenant="t")), pytest.raises(UnauthenticatedError):
        await control.update("/one")
    served.door.frontend.weights = None
    with pytest.raises(InvalidRequestError, match="cannot change the weights"):
        await asyncio.to_thread(Administration(served.door.url).sleep)


async def test_a_caller_that_leaves_ends_the_reading_of_weights(served: Served) -> None:
    ended, began = asyncio.Event(), asyncio.Event()

    async def held(call: StageCall) -> StagedWeights:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    served.decode.stage_weights = held
    asking = asyncio.create_task(
        served.door.ask("/update_weights_from_disk", {"model_path": "/one"})
    )
    await began.wait()
    asking.cancel()
    async with asyncio.timeout(time_scale.seconds(10.0)):
        await ended.wait()
    assert not served.decode.weights and not served.path.pauses


async def test_a_worker_without_memory_for_two_copies_stages_while_it_sleeps_and_placement_pauses(
    served: Served,
) -> None:
    served.decode.full = True
    control = served.door.frontend.weights
    with pytest.raises(InvalidRequestError, match="'d' lacks 5 bytes"):
        await control.update("/one", "1", UpdateMode.KEEP)
    assert not served.path.pauses
    served.decode.calls.clear()
    report = await control.update("/one", "1", deadline_seconds=9.0)
    stage = StageCall("/one", "1", 9.0)
    assert served.decode.calls == [stage, SleepCall(2, 9.0), stage, CommitCall(report.weights)]
    assert served.decode.weights == served.prefill.weights == report.weights
    assert not served.decode.asleep and served.path.pauses == [None]
    served.decode.weights = served.prefill.weights = ""
    with pytest.raises(InvalidRequestError, match="missing"):
        await control.update("/bad", "1")
    assert not served.decode.asleep


def watching(served: Served) -> tuple[WeightsControl, ManualClock]:
    """Controls weights of workers whose statuses it sees, on a clock that stands still."""
    workers, clock, path = (served.decode, served.prefill), ManualClock(), served.path
    path.cluster = replace(path.cluster, statuses=lambda: [one.said() for one in workers])
    return WeightsControl(path, clock, Counters()), clock


async def test_a_late_worker_gets_the_weights_of_a_closed_offer_from_a_worker_that_has_them(
    served: Served,
) -> None:
    control, _ = watching(served)
    report = await control.update("/one", "1")
    served.prefill.weights = ""  # it was restarted
    control._wanted = StageCall("offer:gone", "1", 9.0)  # the trainer has gone on
    await control.catch_up()
    assert served.prefill.weights == report.weights and "offer" in served.decode.calls


async def test_a_worker_that_cannot_take_the_last_weights_is_tried_again_ever_more_seldom(
    served: Served,
) -> None:
    control, clock = watching(served)
    await control.update("/one", "1")
    served.prefill.weights = ""
    control._wanted = StageCall("/bad", "1", 9.0)
    served.decode.weights = ""
    tries = []
    for second in range(20):
        clock.seconds = float(second)
        served.prefill.calls.clear()
        await control.catch_up()
        if any(isinstance(call, StageCall) for call in served.prefill.calls):
            tries.append(second)
    assert tries == [0, 2, 6, 14]


async def test_a_router_leaves_workers_alone_that_another_router_has_updated_since(
    served: Served,
) -> None:
    first, clock = watching(served)
    second, _ = watching(served)
    await first.update("/one", "1")
    await second.update("/two", "2")
    for second_of_clock in (0.0, 60.0):
        clock.seconds = second_of_clock
        await first.catch_up()
        assert served.prefill.weights == served.decode.weights == "2@f00/two"
    await first.update("/one", "1")
    served.prefill.weights = ""  # it was restarted
    await first.catch_up()
    assert served.prefill.weights == "1@f00/one", "the last update is the first router's again"


async def test_a_late_worker_that_fails_to_commit_reads_the_weights_again_only_after_a_wait(
    served: Served,
) -> None:
    control, _ = watching(served)
    await control.update("/one", "1")
    served.prefill.weights, served.prefill.dies = "", True
    served.prefill.calls.clear()
    for _ in range(3):
        await control.catch_up()
    assert sum(isinstance(call, StageCall) for call in served.prefill.calls) == 1


async def test_a_late_worker_that_leaves_while_another_one_reads_does_not_end_the_catching_up(
    served: Served,
) -> None:
    control, _ = watching(served)
    await control.update("/one", "1")
    served.prefill.weights = served.decode.weights = ""
    ports, stage = served.path.cluster.weights, served.decode.stage_weights
    assert isinstance(ports, dict)

    async def alone(call: StageCall) -> StagedWeights:
        ports.pop("p", None)
        return await stage(call)

    served.decode.stage_weights = alone
    await control.catch_up()
    assert served.decode.weights == "1@f00/one"

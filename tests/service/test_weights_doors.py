"""Updates of weights and sleep over HTTP and gRPC."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
import pytest

from jdisagg import caller
from jdisagg.client import AsyncClient
from jdisagg.clock import MonotonicClock
from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.dispatch.weights_control import WeightsControl
from jdisagg.errors import InvalidRequestError, UnauthenticatedError, UnavailableError
from jdisagg.messages.weights import CommitCall, SleepCall, StageCall, StagedWeights
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.telemetry import Counters
from tests.service.doors import STATUS
from tests.service.http_doors import HttpDoor, http_door


@dataclass
class Worker:
    """A worker that serves every folder but "/bad", and its calls."""

    name: str
    calls: list[object] = field(default_factory=list)
    weights: str = ""
    asleep: bool = False
    dies: bool = False

    def said(self) -> WorkerStatus:
        return msgspec.structs.replace(
            STATUS, name=self.name, weights=self.weights, asleep=self.asleep
        )

    async def stage_weights(self, call: StageCall) -> StagedWeights:
        self.calls.append(call)
        if call.folder == "/bad" and self.name == "p":
            raise InvalidRequestError("tensors are missing")
        return StagedWeights(f"{call.version or 'f00'}@f00{call.folder}", 100)

    async def commit_weights(self, call: CommitCall) -> WorkerStatus:
        self.calls.append(call)
        if self.dies:
            raise UnavailableError("connection refused")
        self.weights = call.weights
        return self.said()

    async def drop_weights(self) -> None:
        self.calls.append("drop")

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
        self.cluster = ClusterPorts(
            {},
            {"d": None},  # type: ignore[dict-item]
            weights=workers,
            reported=self.heard.append,
        )

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


async def test_an_update_over_http_and_grpc_stages_on_all_and_then_commits_on_all(
    served: Served,
) -> None:
    asked = {"model_path": "/one", "weight_version": "1", "mode": "keep", "deadline_seconds": 9}
    answer = await served.door.ask("/update_weights_from_disk", asked)
    assert answer.status == 200 and answer.fields["success"] is True
    assert answer.fields["weights"] == served.prefill.weights == served.decode.weights
    assert served.prefill.calls == [StageCall("/one", "1", 9.0), CommitCall("1@f00/one", True)]
    async with AsyncClient(served.door.target) as client:
        report = await client.update_weights("/two", mode="drain", deadline_seconds=7.0)
    assert report.weights == "f00@f00/two" and report.bytes == 200
    assert report.workers == ("d", "p"), "decode workers commit first"
    assert served.path.pauses == [None, 7.0]
    assert [one.weights for one in served.path.heard][-2:] == [report.weights] * 2


async def test_a_worker_that_cannot_stage_ends_the_update_on_all(served: Served) -> None:
    async with AsyncClient(served.door.target) as client:
        with pytest.raises(InvalidRequestError, match="worker 'p': tensors are missing"):
            await client.update_weights("/bad")
        assert served.decode.calls[-1] == "drop" and not served.path.pauses
        with pytest.raises(InvalidRequestError, match="finite"):
            await client.update_weights("/one", deadline_seconds=-1.0)
    refused = {"model_path": "/one", "mode": "now"}
    answer = await served.door.ask("/update_weights_from_disk", refused)
    assert answer.status == 400 and "recompute, drain, keep" in str(answer.fields)


async def test_a_worker_that_dies_before_it_commits_is_named_and_the_others_serve(
    served: Served,
) -> None:
    served.prefill.dies = True
    async with AsyncClient(served.door.target) as client:
        report = await client.update_weights("/one", version="1")
        assert report.workers == ("d",) and report.failed == ("p: connection refused",)
        served.decode.dies = True
        with pytest.raises(UnavailableError, match="no worker took them: d: connection refused"):
            await client.update_weights("/two")


async def test_workers_sleep_and_wake_over_http_and_grpc(served: Served) -> None:
    door = served.door
    async with AsyncClient(door.target) as client:
        (status,) = await client.sleep(2, ["d"], deadline_seconds=3.0)
        assert status.asleep and served.decode.calls == [SleepCall(2, 3.0)]
        assert not served.prefill.asleep
        assert [one.asleep for one in await client.wake()] == [False, False]
        with pytest.raises(InvalidRequestError, match="worker 'x' is unknown; known: p, d"):
            await client.wake(["x"])
    assert (await door.ask("/sleep?level=2", {})).status == 200
    assert (await door.ask("/sleep", {"level": 1, "workers": ["p"]})).status == 200
    assert [one.level for one in served.prefill.calls] == [2, 1]  # type: ignore[attr-defined]
    assert (await door.ask("/wake_up", {})).fields == {"is_sleeping": False}


async def test_a_tenant_changes_no_weights_and_a_server_without_workers_says_so(
    served: Served,
) -> None:
    control = served.door.frontend.weights
    assert control is not None
    with caller.calling(caller.Caller(tenant="t")), pytest.raises(UnauthenticatedError):
        await control.update("/one")
    served.door.frontend.weights = None
    async with AsyncClient(served.door.target) as client:
        with pytest.raises(InvalidRequestError, match="cannot change the weights"):
            await client.sleep()

"""What the door says in its log and its metrics of requests that end well, badly or not at all."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jdisagg.client import AsyncClient
from jdisagg.errors import InvalidRequestError, OverloadedError, UnauthenticatedError
from jdisagg.observe import request_log
from jdisagg.observe.request_log import RequestLog
from tests.service.http_doors import HttpDoor, http_door, with_tokens

LOGGER = "jdisagg.observe.request_log"


class Counted:
    def __init__(self) -> None:
        self.errors: list[tuple[str, str]] = []
        self.log = RequestLog(True, lambda code, name: self.errors.append((code, name)))


@pytest.fixture
def counted(caplog: pytest.LogCaptureFixture) -> Counted:
    caplog.set_level(logging.INFO, LOGGER)
    return Counted()


@pytest.fixture
async def logged(counted: Counted) -> AsyncIterator[HttpDoor]:
    async with http_door(log=counted.log) as one:
        yield one


def lines(caplog: pytest.LogCaptureFixture) -> list[dict]:
    return [vars(record) for record in caplog.records if record.name == LOGGER]


async def test_every_request_that_ends_has_a_line(
    logged: HttpDoor, counted: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncClient(logged.target) as client:
        done = await client.complete("abcd", max_tokens=3, request_id="r1", tenant="team")
        with pytest.raises(OverloadedError):
            await client.complete("abcd", request_id="r2", tenant="crowd")
        with pytest.raises(InvalidRequestError):
            await client.complete("abcd", temperature=-1.0, request_id="r3")
    assert len(done.choices[0].token_ids) == 3
    well, busy, wrong = lines(caplog)
    assert well["request_id"] == "r1" and well["tenant"] == "team" and well["code"] == "OK"
    assert well["prompt_tokens"] == 4 and well["generated_tokens"] == 3
    assert 0 <= well["ttft_seconds"] <= well["e2e_seconds"]
    assert busy["code"] == "RESOURCE_EXHAUSTED" and busy["request_id"] == "r2"
    assert wrong["code"] == "INVALID_ARGUMENT" and wrong["error_type"] == "InvalidRequestError"
    assert counted.errors == [
        ("RESOURCE_EXHAUSTED", "OverloadedError"),
        ("INVALID_ARGUMENT", "InvalidRequestError"),
    ]


async def test_a_client_that_goes_away_is_cancelled_and_no_error(
    logged: HttpDoor, counted: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    logged.path.gate.clear()
    async with AsyncClient(logged.target) as client:
        stream = client.generate("abcd", max_tokens=9)
        await anext(stream)
        await stream.aclose()
    async with asyncio.timeout(20):
        while not lines(caplog):
            await asyncio.sleep(0.01)
    assert lines(caplog)[0]["code"] == "CANCELLED" and not counted.errors


async def test_calls_that_never_become_requests_are_counted_too(
    counted: Counted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with http_door(service=with_tokens(tmp_path, "secret"), log=counted.log) as one:
        async with AsyncClient(one.target) as client:
            with pytest.raises(UnauthenticatedError):
                await client.complete("abcd")
        async with grpc.aio.insecure_channel(one.target) as channel:
            call = channel.unary_stream("/jdisagg.v1.GenerationService/Generate")
            with pytest.raises(grpc.aio.AioRpcError):
                metadata = (("authorization", "Bearer secret"),)
                async for _ in call(b"\xff\xff", metadata=metadata):
                    pass
    assert counted.errors == [
        ("UNAUTHENTICATED", "UnauthenticatedError"),
        ("INVALID_ARGUMENT", "InvalidRequestError"),
    ]
    assert [line["code"] for line in lines(caplog)] == [code for code, _ in counted.errors]


async def test_work_has_a_line_now_and_then_and_idleness_none(
    door: HttpDoor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_log, "EVERY_SECONDS", 0.05)
    caplog.set_level(logging.INFO, LOGGER)
    async with AsyncClient(door.target) as client:
        await client.complete("abcd", max_tokens=3)
    async with asyncio.timeout(20):
        while not any("1 ended" in line for line in caplog.messages):
            await asyncio.sleep(0.01)
    assert all("tokens/s" in line for line in caplog.messages)
    assert sum("0 running, 0 waiting, 1 ended, 0 failed" in line for line in caplog.messages) == 1
    quiet = len(caplog.messages)
    await asyncio.sleep(0.2)
    assert len(caplog.messages) == quiet


async def test_listing_health_is_refused_without_a_traceback(
    door: HttpDoor, caplog: pytest.LogCaptureFixture
) -> None:
    async with grpc.aio.insecure_channel(door.target) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            health = health_pb2_grpc.HealthStub(channel)
            await health.List(health_pb2.HealthListRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not [record for record in caplog.records if record.exc_info]

"""The generation service over real gRPC on loopback."""

import asyncio
import socket

import grpc
import grpc.aio
import pytest

from jdisagg.client import AsyncClient, Client
from jdisagg.dispatch.routing_status import PastDecision, RoutingStatus, WorkerAccount
from jdisagg.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidRequestError,
    JdisaggError,
    OverloadedError,
)
from jdisagg.request import FinishReason
from jdisagg.service.grpc import generation_pb2 as pb
from jdisagg.service.grpc import generation_pb2_grpc
from tests.service.doors import eventually, expected_tokens
from tests.service.http_doors import HttpDoor


@pytest.fixture
async def stub(door: HttpDoor):
    async with grpc.aio.insecure_channel(door.target) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


@pytest.fixture
async def client(door: HttpDoor):
    async with AsyncClient(door.target) as client:
        yield client


async def test_a_stream_brings_every_token_once_in_order_and_usage_and_timings_at_its_end(
    door: HttpDoor, client: AsyncClient
) -> None:
    events = [
        event async for event in client.generate("Once", max_tokens=20, temperature=0, logprobs=1)
    ]
    tokens = tuple(token for event in events for token in event.token_ids)
    assert tokens == expected_tokens(door.path.requests[0], 0)
    assert [event.first_index for event in events] == list(range(20))
    assert all(event.logprobs[0].top == ((event.token_ids[0], -0.5),) for event in events)
    assert [event.finish_reason for event in events] == [None] * 19 + [FinishReason.LENGTH]
    assert [event.usage is None and event.timings is None for event in events] == [True] * 19 + [
        False
    ]
    assert events[-1].usage is not None and events[-1].usage.completion_tokens == 20
    assert events[-1].timings is not None and events[-1].timings.kv_bytes_moved == 640


async def test_a_client_that_disappears_closes_the_paths_stream(door: HttpDoor) -> None:
    door.path.gate.clear()
    client = AsyncClient(door.target)
    events = client.generate("x", request_id="gone")
    await anext(events)
    await client.close()
    await eventually(lambda: door.path.closed == ["gone"])


async def test_the_sooner_of_two_deadlines_reaches_the_path(
    door: HttpDoor, client: AsyncClient, stub: generation_pb2_grpc.GenerationServiceStub
) -> None:
    await client.complete("x", max_tokens=1, deadline_seconds=20.0)
    async for _ in stub.Generate(pb.GenerateRequest(text="x", deadline_seconds=500), timeout=30):
        pass
    asked, call = (request.deadline_seconds for request in door.path.requests)
    assert asked == 20.0
    assert call is not None and 0 < call < 60


BAD = [
    ({"prompt": "x" * 10_000_000}, "limits.max_prompt_bytes"),
    ({"prompt": "x" * (33 << 20)}, "too large"),
    ({"prompt": "x", "temperature": float("nan")}, "temperature.*nan"),
    ({"prompt": "x", "n": 10**12}, "n must.*1000000000000"),
    ({"token_ids": [2**40]}, r"\[0\]=1099511627776"),
]
NO_MESSAGES = (b"\x0a\x02\xff\xfe", b"\x0a\xff\xff", b"\xff" * 50)
GARBAGE = (
    b"\x00\xff" * 500,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)


async def test_what_is_no_request_gets_its_error_and_a_neighbour_goes_on(
    door: HttpDoor, client: AsyncClient
) -> None:
    door.path.gate.clear()
    neighbour = asyncio.ensure_future(client.complete("neighbour", max_tokens=3))
    await eventually(lambda: len(door.path.requests) == 1)
    for options, message in BAD:
        with pytest.raises(InvalidRequestError, match=message):
            await client.complete(**options)
    async with grpc.aio.insecure_channel(door.target) as channel:
        for data in NO_MESSAGES:
            call = channel.unary_stream("/jdisagg.v1.GenerationService/Generate")(data)
            with pytest.raises(grpc.aio.AioRpcError, match="UTF-8") as caught:
                await call.read()
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT

    def throw(garbage: bytes) -> None:
        with socket.create_connection(("127.0.0.1", door.grpc_port), timeout=5) as connection:
            connection.sendall(garbage)

    for garbage in GARBAGE:
        await asyncio.to_thread(throw, garbage)
    door.path.gate.set()
    expected = expected_tokens(door.path.requests[0], 0)
    assert tuple((await neighbour).choices[0].token_ids) == expected
    assert len(door.path.requests) == 1


async def test_an_error_of_the_path_keeps_its_type_and_what_it_says(
    door: HttpDoor, client: AsyncClient
) -> None:
    with pytest.raises(OverloadedError, match="4 of 4") as caught:
        await client.complete("x", tenant="crowd")
    assert caught.value.retry_after_seconds == 2.5
    for kind in (CancelledError, DeadlineExceededError):  # neither is asyncio's

        async def failing(request, kind=kind):
            raise kind("after 17 tokens")
            yield

        door.path.stream = failing
        with pytest.raises(kind, match="17 tokens"):
            await client.complete("x")


async def test_a_foreign_client_learns_the_id_that_the_server_drew(
    door: HttpDoor, stub: generation_pb2_grpc.GenerationServiceStub
) -> None:
    call = stub.Generate(pb.GenerateRequest(text="x"))
    messages = [message async for message in call]
    trailing = dict(await call.trailing_metadata())
    drawn = door.path.requests[0].request_id
    assert trailing["jdisagg-request-id"] == messages[0].request_id == drawn != ""
    refused = stub.Generate(pb.GenerateRequest(text="x", tenant="crowd"))
    with pytest.raises(grpc.aio.AioRpcError):
        await refused.read()
    trailing = dict(await refused.trailing_metadata())
    assert trailing["jdisagg-request-id"] == door.path.requests[1].request_id
    assert trailing["jdisagg-error"] == "OverloadedError"


async def test_a_bug_ends_its_own_stream_with_internal_and_a_log_entry(
    door: HttpDoor, client: AsyncClient, caplog
) -> None:
    received = []
    with pytest.raises(JdisaggError, match="internal error .ZeroDivisionError.") as caught:
        async for event in client.generate("x", tenant="bug", max_tokens=9):
            received.append(event)
    assert type(caught.value) is JdisaggError
    assert "a bug of ours" not in caught.value.message
    assert "a bug of ours" in caplog.text
    assert len(received) == 2
    assert (await client.complete("x", max_tokens=1)).text


async def test_tokenize_and_detokenize_are_the_tokenizers_own(client: AsyncClient) -> None:
    assert await client.tokenize("naïve") == tuple("naïve".encode())
    assert (
        bytes(await client.tokenize(messages=[{"role": "user", "content": "hi"}]))
        == b"<user>hi<assistant>"
    )
    assert await client.detokenize(tuple("naïve".encode()) + (256,)) == "naïve"
    assert await client.detokenize((104, 256), skip_special_tokens=False) == "h<end>"


async def test_model_status_and_the_routers_last_decisions_arrive_as_they_are(
    door: HttpDoor, client: AsyncClient, monkeypatch
) -> None:
    assert await client.model() == door.frontend.model
    assert await client.routing() == RoutingStatus(), "this server has no router"
    told = RoutingStatus(
        2,
        (
            PastDecision(0.5, "seconds", "p0 and d0: soonest", "p0", "d0", 100, 0.25, 0.01, 0.3),
            PastDecision(9.0, "refused: ttft", "", "", "", 7),
        ),
        (WorkerAccount("d0", 3, 100, 7, 40, 0.5),),
    )
    monkeypatch.setattr(door.frontend, "routing", lambda: told)
    assert await client.routing() == told
    assert await client.status() == await door.path.status()


async def test_a_request_is_suspended_and_resumed_by_its_id(door: HttpDoor) -> None:
    """By both clients."""
    async with AsyncClient(door.target) as client:
        await client.suspend("r", tenant="t")
        await client.resume("r", tenant="t")

    def block() -> None:
        with Client(door.target) as client:
            client.suspend("s")
            client.resume("s")

    await asyncio.to_thread(block)
    assert door.path.suspended == [
        ("t", "r", True),
        ("t", "r", False),
        ("", "s", True),
        ("", "s", False),
    ]

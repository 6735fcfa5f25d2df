"""The generation service over real gRPC on loopback."""

import asyncio
import math
import socket

import grpc
import grpc.aio
import pytest

from jdisagg.client import AsyncClient, Client
from jdisagg.dispatch.frontend import TokenPrompt
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
from tests.service.doors import Door, eventually, expected_tokens, text_of


@pytest.fixture
async def stub(door: Door):
    async with grpc.aio.insecure_channel(door.target) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


@pytest.fixture
async def client(door: Door):
    async with AsyncClient(door.target) as client:
        yield client


async def test_a_stream_brings_every_token_once_in_order_and_usage_and_timings_at_its_end(
    door: Door, client: AsyncClient
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


async def test_the_path_gets_what_the_client_asked_for(door: Door, client: AsyncClient) -> None:
    await client.complete(
        token_ids=[4, 5],
        max_tokens=2,
        temperature=0.5,
        seed=9,
        stop="end",
        logit_bias=[(3, 1.5)],
        request_id="r",
        tenant="t",
        priority=2,
    )
    request = door.path.requests[0]
    assert (request.prompt_token_ids, request.request_id, request.tenant, request.priority) == (
        (4, 5),
        "r",
        "t",
        2,
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.seed, sampling.stop, sampling.logit_bias) == (
        0.5,
        9,
        ("end",),
        ((3, 1.5),),
    )


async def test_children_of_one_request_share_its_stream(door: Door, client: AsyncClient) -> None:
    completion = await client.complete("Once", n=2, max_tokens=5)
    request = door.path.requests[0]
    assert [tuple(choice.token_ids) for choice in completion.choices] == [
        expected_tokens(request, child) for child in (0, 1)
    ]
    assert [choice.text for choice in completion.choices] == [
        text_of(expected_tokens(request, child)) for child in (0, 1)
    ]


async def test_closing_a_clients_stream_closes_the_paths(door: Door, client: AsyncClient) -> None:
    door.path.gate.clear()
    events = client.generate("x", request_id="gone")
    await anext(events)
    await events.aclose()
    await eventually(lambda: door.path.closed == ["gone"])


async def test_a_client_that_disappears_closes_the_paths_stream(door: Door) -> None:
    door.path.gate.clear()
    client = AsyncClient(door.target)
    events = client.generate("x", request_id="gone")
    await anext(events)
    await client.close()
    await eventually(lambda: door.path.closed == ["gone"])


async def test_a_client_that_does_not_read_holds_the_path_back_until_it_reads_on(
    door: Door, client: AsyncClient
) -> None:
    door.path.filler = "." * 100_000
    events = client.generate("x", max_tokens=400, request_id="slow")
    received = [await anext(events)]
    made = -1
    while made != door.path.made_events:
        made = door.path.made_events
        await asyncio.sleep(0.3)
    assert made < 300
    received += [event async for event in events]
    assert [event.first_index for event in received] == list(range(400))


async def test_the_sooner_of_two_deadlines_reaches_the_path(
    door: Door, client: AsyncClient, stub: generation_pb2_grpc.GenerationServiceStub
) -> None:
    await client.complete("x", max_tokens=1, deadline_seconds=20.0)
    async for _ in stub.Generate(pb.GenerateRequest(text="x", deadline_seconds=500), timeout=30):
        pass
    asked, call = (request.deadline_seconds for request in door.path.requests)
    assert asked == 20.0
    assert call is not None and 0 < call < 60


async def test_a_call_whose_deadline_passes_ends_with_that_error_and_closes_the_path(
    door: Door, stub: generation_pb2_grpc.GenerationServiceStub
) -> None:
    door.path.gate.clear()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Generate(pb.GenerateRequest(text="x", request_id="late"), timeout=0.3):
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: door.path.closed == ["late"])


BAD = [
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": "x" * 600}, "context of 512"),
    ({"prompt": "x" * 10_000_000}, "limits.max_prompt_bytes"),
    ({"prompt": "x", "max_tokens": 600}, "max_tokens=600"),
    ({"prompt": "x", "temperature": float("nan")}, "temperature.*nan"),
    ({"prompt": "x", "temperature": -0.5}, "temperature.*-0.5"),
    ({"prompt": "x", "top_p": 0.0}, r"top_p must be in \(0.0, 1.0\], got 0.0"),
    ({"prompt": "x", "top_p": 2.0}, r"top_p must be in \(0.0, 1.0\], got 2.0"),
    ({"prompt": "x", "n": 10**12}, "n must.*1000000000000"),
    ({"prompt": "x", "stop": [""]}, "stop must hold"),
    ({"token_ids": [5, 100_000]}, r"\[1\]=100000"),
    ({"token_ids": [2**40]}, r"\[0\]=1099511627776"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
    ({"prompt": "x", "deadline_seconds": -3.0}, "deadline_seconds"),
]


async def test_each_bad_request_gets_its_error_and_the_server_goes_on(
    door: Door, client: AsyncClient
) -> None:
    door.path.gate.clear()
    neighbour = asyncio.ensure_future(client.complete("neighbour", max_tokens=3))
    await eventually(lambda: len(door.path.requests) == 1)
    for options, message in BAD:
        with pytest.raises(InvalidRequestError, match=message):
            await client.complete(**options)
    door.path.gate.set()
    assert tuple((await neighbour).choices[0].token_ids) == expected_tokens(
        door.path.requests[0], 0
    )
    assert len(door.path.requests) == 1


async def _raw_status(door: Door, data: bytes) -> tuple[grpc.StatusCode, str]:
    async with grpc.aio.insecure_channel(door.target) as channel:
        call = channel.unary_stream("/jdisagg.v1.GenerationService/Generate")(data)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        return caught.value.code(), caught.value.details() or ""


@pytest.mark.parametrize(
    "data",
    [b"\x0a\x02\xff\xfe", b"\x0a\xff\xff", b"\xff" * 50],
    ids=["invalid UTF-8", "truncated", "noise"],
)
async def test_malformed_messages_are_invalid_arguments(
    door: Door, client: AsyncClient, data: bytes
) -> None:
    code, details = await _raw_status(door, data)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "UTF-8" in details
    assert (await client.complete("x", max_tokens=1)).text


async def test_a_message_beyond_the_size_limit_is_refused(door: Door, client: AsyncClient) -> None:
    with pytest.raises(InvalidRequestError, match="too large"):
        await client.complete("x" * (17 << 20))
    assert (await client.complete("x", max_tokens=1)).text


async def test_overload_carries_its_retry_hint(door: Door, client: AsyncClient) -> None:
    with pytest.raises(OverloadedError, match="4 of 4") as caught:
        await client.complete("x", tenant="crowd")
    assert caught.value.retry_after_seconds == 2.5


async def test_a_bug_ends_its_own_stream_with_internal_and_a_log_entry(
    door: Door, client: AsyncClient, caplog
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


async def test_a_request_the_server_cancelled_is_our_error_and_not_asyncios(
    door: Door, client: AsyncClient
) -> None:
    async def cancelled(request):
        raise CancelledError("cancelled by an operator")
        yield

    door.path.stream = cancelled
    with pytest.raises(CancelledError, match="operator"):
        await client.complete("x")


async def test_a_hundred_streams_at_once_lose_and_double_nothing(
    door: Door, client: AsyncClient
) -> None:
    door.path.gate.clear()
    lengths = [1 + (37 * index) % 100 for index in range(100)]
    answers = [
        asyncio.ensure_future(
            client.complete(token_ids=[index + 1], max_tokens=length, request_id=str(index))
        )
        for index, length in enumerate(lengths)
    ]
    await eventually(lambda: len(door.path.requests) == 100)
    door.path.gate.set()
    by_id = {request.request_id: request for request in door.path.requests}
    for index, answer in enumerate(await asyncio.gather(*answers)):
        assert tuple(answer.choices[0].token_ids) == expected_tokens(by_id[str(index)], 0)
    assert len(door.path.closed) == 100


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff" * 500,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 200,
    ],
)
async def test_garbage_on_the_port_harms_no_one(
    door: Door, client: AsyncClient, garbage: bytes
) -> None:
    door.path.gate.clear()
    neighbour = asyncio.ensure_future(client.complete("x", max_tokens=3))
    await eventually(lambda: len(door.path.requests) == 1)

    def throw() -> None:
        with socket.create_connection(("127.0.0.1", door.port), timeout=5) as connection:
            connection.sendall(garbage)

    await asyncio.to_thread(throw)
    door.path.gate.set()
    assert len((await neighbour).choices[0].token_ids) == 3


async def test_tokenize_and_detokenize_are_the_tokenizers_own(client: AsyncClient) -> None:
    assert await client.tokenize("naïve") == tuple("naïve".encode())
    assert (
        bytes(await client.tokenize(messages=[{"role": "user", "content": "hi"}]))
        == b"<user>hi<assistant>"
    )
    assert await client.detokenize(tuple("naïve".encode()) + (256,)) == "naïve"
    assert await client.detokenize((104, 256), skip_special_tokens=False) == "h<end>"


async def test_model_and_status_arrive_as_they_are(door: Door, client: AsyncClient) -> None:
    assert await client.model() == door.frontend.model
    assert await client.status() == await door.path.status()


async def test_the_routers_last_decisions_arrive_as_they_are(
    door: Door, client: AsyncClient, monkeypatch
) -> None:
    assert await client.routing() == RoutingStatus(), "this door has no router"
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


async def test_a_request_without_a_prompt_is_refused(door: Door) -> None:
    code, details = await _raw_status(door, pb.GenerateRequest(request_id="x").SerializeToString())
    assert (code, "text, token_ids, chat" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_deadline_error_of_the_path_is_typed(door: Door, client: AsyncClient) -> None:
    async def late(request):
        raise DeadlineExceededError("request 'x' ran out of its 3 s after 17 tokens")
        yield

    door.path.stream = late
    with pytest.raises(DeadlineExceededError, match="17 tokens"):
        await client.complete("x")


async def test_the_same_request_can_be_built_of_text_and_of_its_tokens(
    door: Door, client: AsyncClient
) -> None:
    await client.complete("abc", max_tokens=1)
    await client.complete(token_ids=await client.tokenize("abc"), max_tokens=1)
    assert door.path.requests[0].prompt_token_ids == door.path.requests[1].prompt_token_ids
    assert await door.frontend.tokenize(TokenPrompt((1, 2))) == (1, 2)


async def test_a_request_is_suspended_and_resumed_by_its_id(door: Door) -> None:
    """By both clients; a time that cannot be is refused before the path hears of it."""
    async with AsyncClient(door.target) as client:
        await client.suspend("r", keep_seconds=2.5, tenant="t")
        await client.resume("r", tenant="t")
        for seconds in (0.0, -1.0, math.nan, math.inf):
            with pytest.raises(InvalidRequestError, match="keep_seconds must be positive"):
                await client.suspend("r", keep_seconds=seconds)

    def block() -> None:
        with Client(door.target) as client:
            client.suspend("s")
            client.resume("s")

    await asyncio.to_thread(block)
    assert door.path.suspended == [
        ("t", "r", 2.5),
        ("t", "r", None),
        ("", "s", math.inf),  # as long as its deadline allows
        ("", "s", None),
    ]

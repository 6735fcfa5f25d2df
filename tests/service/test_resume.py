"""A client whose stream breaks asks again and goes on at the next token: its caller sees one
stream, each token once, or a typed error."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from jdisagg.client import AsyncClient
from jdisagg.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidRequestError,
    JdisaggError,
    UnavailableError,
)
from jdisagg.request import FinishReason, Request, SamplingParams, StreamEvent
from jdisagg.service.client.stream import ResumableStream
from jdisagg.service.grpc import generation_pb2 as pb
from jdisagg.service.grpc import wire_generation
from jdisagg.service.grpc.wire_generation import ClientRequest
from tests.service.doors import FakePath, eventually, expected_tokens, make_frontend, text_of
from tests.service.http_doors import http_door

PROMPT = tuple(b"once")


def expected(child: int, max_tokens: int) -> tuple[int, ...]:
    return expected_tokens(Request("r", PROMPT, SamplingParams(max_tokens=max_tokens)), child)


@contextlib.asynccontextmanager
async def door(path: FakePath, port: int = 0) -> AsyncIterator[int]:
    async with http_door(path, port=port) as one:
        yield one.grpc_port


def held() -> FakePath:
    path = FakePath()
    path.gate.clear()
    return path


async def test_a_stream_goes_on_with_the_server_that_comes_after() -> None:
    first, second = held(), FakePath()
    received: list[StreamEvent] = []
    async with contextlib.AsyncExitStack() as stack:
        async with door(first) as port:
            client = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{port}"))
            events = client.generate("once", max_tokens=20)
            received.append(await anext(events))
            rest = asyncio.ensure_future(_all(events))
        await stack.enter_async_context(door(second, port))
        received += await asyncio.wait_for(rest, 20)
    assert [event.first_index for event in received] == list(range(20))
    assert "".join(event.text for event in received) == text_of(expected(0, 20))
    assert received[-1].finish_reason is FinishReason.LENGTH and received[-1].usage is not None
    (asked,), (again,) = first.requests, second.requests
    assert (again.request_id, again.sampling, again.prompt_token_ids) == (
        asked.request_id,
        asked.sampling,
        asked.prompt_token_ids,
    )
    assert asked.resumption is None and again.resumption is not None
    assert (
        again.resumption.number >= 1
        and again.resumption.children[0].token_ids == expected(0, 20)[:1]
    )


async def test_a_request_cut_short_before_its_first_token_is_asked_again() -> None:
    first, second = FakePath(pause_seconds=30.0), FakePath()
    async with contextlib.AsyncExitStack() as stack:
        async with door(first) as port:
            client = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{port}"))
            answer = asyncio.ensure_future(client.complete("once", max_tokens=9))
            await eventually(lambda: len(first.requests) == 1)
        await stack.enter_async_context(door(second, port))
        completion = await asyncio.wait_for(answer, 20)
    assert first.made_events == 0 and tuple(completion.choices[0].token_ids) == expected(0, 9)


class Cancelled(grpc.RpcError):
    """What gRPC raises for a call that ended as CANCELLED, without a word of ours."""

    def __init__(self, details: str) -> None:
        self._details = details

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.CANCELLED

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


def test_a_call_that_an_ending_server_dropped_is_asked_again_and_one_that_was_given_up_here_is_not() -> (  # noqa: E501
    None
):
    """gRPC cancels the calls that have come to a server and that nobody has taken in when it
    stops."""
    stream = ResumableStream(ClientRequest("once", {"max_tokens": 9}), 20.0)
    assert stream.request().resumption == 0
    stream.pause_after(Cancelled("CANCELLED"))
    assert stream.request().resumption == 1
    with pytest.raises(CancelledError):
        stream.pause_after(Cancelled("Channel closed!"))


async def test_a_stream_that_breaks_after_a_long_silence_is_resumed_and_not_for_ever() -> None:
    stream = ResumableStream(ClientRequest("once", {"max_tokens": 9}), 0.05)
    await asyncio.sleep(0.1)
    stream.pause_after(Cancelled("CANCELLED"))
    stream.take(pb.GenerateResponse(first_index=0, token_ids=[1]))
    await asyncio.sleep(0.1)
    stream.pause_after(Cancelled("CANCELLED"))
    await asyncio.sleep(0.1)
    with pytest.raises(CancelledError):
        stream.pause_after(Cancelled("CANCELLED"))


async def test_without_a_server_the_stream_ends_with_a_typed_error_in_time() -> None:
    path = held()
    async with door(path) as port:
        client = AsyncClient(f"127.0.0.1:{port}", resume_seconds=0.4)
        events = client.generate("once", max_tokens=20)
        await anext(events)
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(anext(events), 10)
    await client.close()


async def test_a_deadline_counts_from_the_first_time_it_was_asked() -> None:
    path = held()
    async with door(path) as port:
        client = AsyncClient(f"127.0.0.1:{port}")
        events = client.generate("once", max_tokens=20, deadline_seconds=1.0)
        await anext(events)
    with pytest.raises(
        DeadlineExceededError, match="deadline passed while the connection was broken"
    ):
        await asyncio.wait_for(anext(events), 20)
    await client.close()


async def test_a_refusal_is_not_asked_again() -> None:
    path = FakePath()
    async with door(path) as port, AsyncClient(f"127.0.0.1:{port}") as client:
        with pytest.raises(JdisaggError, match="lost"):
            await client.complete("once", tenant="lost", max_tokens=5)
        assert len(path.requests) == 1


async def test_a_request_that_still_runs_here_is_resumed_once_its_broken_stream_was_noticed() -> (
    None
):
    path = held()
    frontend = make_frontend(path)
    old = await frontend.build_request("once", request_id="r", max_tokens=5, seed=1)
    stream = frontend.stream(old)
    await anext(stream)
    asked = ClientRequest("once", {"max_tokens": 5, "seed": 1}, request_id="r")
    resumption = wire_generation.client_request_from_proto(
        _again(asked, [expected(0, 5)[0]])
    ).resumption
    new = await frontend.build_request(
        "once", request_id="r", max_tokens=5, seed=1, resumption=resumption
    )
    path.gate.set()
    resumed = asyncio.ensure_future(_all(frontend.stream(new)))
    await asyncio.sleep(0.05)
    assert len(path.requests) == 1, "the first has not been noticed yet"
    await stream.aclose()
    assert [event.first_index for event in await asyncio.wait_for(resumed, 5)] == [1, 2, 3, 4]


def test_a_stream_that_goes_on_at_the_wrong_token_is_an_error() -> None:
    stream = ResumableStream(ClientRequest("once", {}), 30.0)
    stream.take(pb.GenerateResponse(first_index=0, token_ids=[1]))
    with pytest.raises(JdisaggError, match="received token 2, expected 1"):
        stream.take(pb.GenerateResponse(first_index=2, token_ids=[3]))
    with pytest.raises(JdisaggError, match="received token 0, expected 1"):
        stream.take(pb.GenerateResponse(first_index=0, token_ids=[1]))


NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"resumption": -1}, "resumption must be in"),
    ({"resumption": 0}, "resumption must be in"),
    ({"request_id": ""}, "must name its request_id"),
    ({"accepted": [pb.AcceptedTokens(child=1)]}, "each child at most once"),
    ({"accepted": [pb.AcceptedTokens(child=0)] * 2}, "each child at most once"),
    (
        {"accepted": [pb.AcceptedTokens(child=0, finish_reason=pb.FINISH_REASON_STOP)]},
        "nothing to resume",
    ),
]


async def test_a_resumption_that_makes_no_sense_is_refused_by_name() -> None:
    once = ClientRequest("once", {"seed": 1}, request_id="r")
    for change, words in NONSENSE:
        message = _again(once, [5])
        for name, value in change.items():
            message.ClearField(name)
            if name == "accepted":
                message.accepted.extend(value)
            else:
                setattr(message, name, value)
        with pytest.raises(InvalidRequestError, match=words):
            wire_generation.client_request_from_proto(message)
    for tokens, words in (([999], "is not a token id"), ([1] * 5, "reach its limit of 5")):
        asked = wire_generation.client_request_from_proto(_again(once, tokens))
        with pytest.raises(InvalidRequestError, match=words):
            await make_frontend(FakePath()).build_request(
                "once", request_id="r", max_tokens=5, seed=1, resumption=asked.resumption
            )


def _again(asked: ClientRequest, tokens: list[int]) -> pb.GenerateRequest:
    message = wire_generation.client_request_to_proto(asked)
    message.resumption = 1
    message.accepted.append(pb.AcceptedTokens(child=0, token_ids=tokens))
    return message


async def _all(events: AsyncIterator[StreamEvent]) -> list[StreamEvent]:
    return [event async for event in events]

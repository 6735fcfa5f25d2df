"""Ports over real gRPC say the same as the ports themselves: calls, replies, errors, early ends;
and what breaks is typed, and soon."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from jdisagg.dispatch.prompts import MAX_PIXEL_BYTES
from jdisagg.errors import (
    HandoffError,
    IncompatiblePeerError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from jdisagg.messages.packed import pack
from jdisagg.messages.ports import Child, Reservation, ReserveCall, Span, SpanEnd, close_stream
from jdisagg.prompt.images import DIGEST_BYTES, PromptImage
from jdisagg.request import MAX_TOP_LOGPROBS, Request, TokenLogprobs
from jdisagg.service.internal.span_sessions import SpanSessions
from tests.service.doors import STATUS, eventually
from tests.service.port_worker import HELLO, OFFERS, PREFILL, REPLY, REQUEST, SPANS, Worker
from tests.service.remote_workers import Spanner, call_of, collect, connected, serving, session


async def test_the_prefill_port_says_what_the_worker_says() -> None:
    worker = Worker()
    async with serving(worker) as (address, _), connected(address) as (remote,):
        assert await remote.prefill.prefill(PREFILL) == REPLY
        await remote.prefill.cancel_prefill(77)
        assert worker.told == [PREFILL, 77]
        assert await remote.prefill.status() == STATUS


@pytest.mark.ci
async def test_a_request_with_all_the_pixels_that_it_may_have_reaches_the_worker() -> None:
    worker = Worker()
    pixels = bytes(MAX_PIXEL_BYTES)
    image = PromptImage(0, 2, (1, 2, 2), pixels, bytes(DIGEST_BYTES))
    asked = msgspec.structs.replace(PREFILL, request=replace(REQUEST, images=(image,)))
    async with serving(worker) as (address, _), connected(address) as (remote,):
        assert await remote.prefill.prefill(asked) == REPLY
        assert worker.told == [asked]


async def test_the_decode_port_says_what_the_worker_says_errors_too() -> None:
    worker = Worker()
    async with serving(worker) as (address, _), connected(address) as (remote,):
        assert await remote.decode.reserve(
            ReserveCall(REQUEST, 1, (Child(0),), 2.0)
        ) == Reservation(5, "decode-0", 1, 30.0, 16)
        with pytest.raises(OverloadedError, match="3 wait") as caught:
            await remote.decode.reserve(ReserveCall(REQUEST, 2, (Child(0),), 2.0))
        assert caught.value.retry_after_seconds == 0.5
        spans = []
        with pytest.raises(HandoffError, match="offer 3"):
            async for span in remote.decode.generate(call_of(5)):
                spans.append(span)
        assert tuple(spans) == SPANS
        assert worker.told[-1] == call_of(5)
        await remote.decode.cancel(5)
        await remote.decode.cancel(5, 0)
        assert worker.told[-2:] == [(5, None), (5, 0)]
        assert await remote.decode.status() == STATUS


@pytest.mark.parametrize(
    ("request_", "children", "wrong"),
    [
        (replace(REQUEST, prompt_token_ids=(1, 512, 3)), (Child(0),), "prompt holds 512"),
        (REQUEST, (Child(0, (4, -1)),), "accepted tokens of child 0 holds -1"),
        (
            replace(REQUEST, sampling=replace(REQUEST.sampling, logit_bias=((700, 1.0),))),
            (Child(0),),
            "logit_bias holds 700",
        ),
    ],
    ids=["prompt", "accepted", "bias"],
)
async def test_token_ids_that_the_model_does_not_have_never_reach_the_worker(
    request_: Request, children: tuple[Child, ...], wrong: str
) -> None:
    worker = Worker()
    async with serving(worker, vocabulary=512) as (address, _), connected(address) as (remote,):
        with pytest.raises(InvalidRequestError, match=f"{wrong}, .*0 to 511"):
            await remote.prefill.prefill(
                msgspec.structs.replace(PREFILL, request=request_, children=children)
            )
        with pytest.raises(InvalidRequestError, match=f"{wrong}, .*0 to 511"):
            await remote.decode.reserve(ReserveCall(request_, 1, children, 2.0))
        assert worker.told == []


@pytest.mark.parametrize("seconds", [1e10, 1e300])
async def test_a_request_with_all_the_time_in_the_world_reaches_the_workers(seconds: float) -> None:
    worker = Spanner()
    async with serving(worker) as (address, _), connected(address) as (remote,):
        assert (
            await remote.prefill.prefill(msgspec.structs.replace(PREFILL, deadline_seconds=seconds))
            == REPLY
        )
        assert (
            await remote.decode.reserve(ReserveCall(REQUEST, 1, (Child(0),), seconds))
        ).reservation_id == 5
        worker.of(5).put_nowait(None)
        assert not [span async for span in remote.decode.generate(call_of(5, seconds))]


async def test_the_peer_port_says_what_the_worker_says_errors_too() -> None:
    worker = Worker()
    async with serving(worker) as (address, _), connected(address) as (remote,):
        assert await remote.peer.hello(HELLO) == HELLO
        with pytest.raises(IncompatiblePeerError, match="bfloat16"):
            await remote.peer.hello(msgspec.structs.replace(HELLO, kv_dtype="bfloat16"))
        assert [offer async for offer in remote.peer.offers(77, 2)] == list(OFFERS)
        await remote.peer.acknowledge(77, (0, 2**64 - 1))
        await remote.peer.abort(77, "deadline")
        assert worker.told == [(77, 2), (77, (0, 2**64 - 1)), (77, "deadline")]
        offers = remote.peer.offers(78, 1)
        await anext(offers)
        await close_stream(offers)
        await eventually(lambda: worker.closed == 2)


async def test_spans_of_many_sequences_come_on_one_stream_each_to_its_own() -> None:
    worker = Spanner()
    async with serving(worker) as (address, _), connected(address) as (remote,):
        results = [asyncio.ensure_future(collect(remote, number)) for number in range(40)]
        for step in range(5):
            for number in range(40):
                worker.of(number).put_nowait(Span(0, step, (1000 * number + step,)))
            await asyncio.sleep(0)
        for number in range(40):
            worker.of(number).put_nowait(Span(0, 5, (), end=SpanEnd.STOP))
            worker.of(number).put_nowait(None)
        for number, spans in enumerate(await asyncio.gather(*results)):
            assert [token for span in spans for token in span.token_ids] == [
                1000 * number + step for step in range(5)
            ]
            assert spans[-1].end is SpanEnd.STOP
        assert sorted(worker.dropped) == list(range(40))


async def test_closing_an_iterator_cancels_that_sequence_alone() -> None:
    worker = Spanner()
    async with serving(worker) as (address, _), connected(address) as (remote,):
        worker.of(1).put_nowait(Span(0, 0, (7,)))
        closing = remote.decode.generate(call_of(1))
        other = asyncio.ensure_future(collect(remote, 2))
        assert (await anext(closing)).token_ids == (7,)
        await close_stream(closing)
        await eventually(lambda: worker.dropped == [1])
        assert (1, None) in worker.told
        worker.of(2).put_nowait(Span(0, 0, (8,), end=SpanEnd.LENGTH))
        worker.of(2).put_nowait(None)
        assert len(await other) == 1


async def test_cancel_ends_an_iterator_that_another_task_reads() -> None:
    worker = Spanner()
    async with serving(worker) as (address, _), connected(address) as (remote,):
        reading = asyncio.ensure_future(collect(remote, 1))
        worker.of(1).put_nowait(Span(0, 0, (7,)))
        await eventually(lambda: worker.of(1).empty())
        await remote.decode.cancel(1)
        assert len(await asyncio.wait_for(reading, 5)) <= 1
        assert worker.dropped == [1]


async def test_a_broken_stream_ends_all_its_iterators_and_another_routers_go_on() -> None:
    worker = Spanner()
    async with serving(worker) as (address, _), connected(address, 2) as (one, two):
        broken = [asyncio.ensure_future(collect(one, number)) for number in (1, 2)]
        going = asyncio.ensure_future(collect(two, 3))
        for number in (1, 2, 3):
            worker.of(number).put_nowait(Span(0, 0, (number,)))
        await eventually(lambda: all(worker.of(number).empty() for number in (1, 2, 3)))
        one.close()
        for reading in broken:
            with pytest.raises(UnavailableError):
                await asyncio.wait_for(reading, 5)
        await eventually(lambda: sorted(worker.dropped) == [1, 2])
        worker.of(3).put_nowait(None)
        assert [span.token_ids for span in await going] == [(3,)]


async def test_what_a_router_had_reserved_is_freed_when_it_goes_away() -> None:
    worker = Worker()
    async with serving(worker) as (address, _), connected(address, 2) as (one, two):
        reserve = ReserveCall(REQUEST, 1, (Child(0),), 2.0)
        assert await one.decode.reserve(reserve) == await two.decode.reserve(reserve)
        with pytest.raises(HandoffError):
            await collect(two, 5)
        two.close()
        await asyncio.sleep(0.05)
        assert (5, None) not in worker.told, "the second router's was started, and has ended"
        one.close()
        await eventually(lambda: (5, None) in worker.told)


async def test_the_tokens_of_one_step_cost_one_message() -> None:
    worker = Spanner()
    sessions = SpanSessions(worker)
    async with session(sessions) as opened:
        for number in range(30):
            await sessions.start(1, call_of(number))
        await asyncio.sleep(0.01)
        for step in range(4):
            for number in range(30):
                worker.of(number).put_nowait(Span(0, step, (7,)))
            await asyncio.sleep(0.01)
        ids = [[one.reservation_id for one in batch.reservations] for batch in opened.batches]
        assert ids == [[]] + [list(range(30))] * 4
    await eventually(lambda: sorted(worker.dropped) == list(range(30)))


@pytest.mark.ci
async def test_spans_of_many_tokens_with_all_logprobs_go_out_in_messages_that_can_be_sent() -> None:
    worker = Spanner()
    sessions = SpanSessions(worker)
    async with session(sessions, stops_at=1) as opened:
        batches = opened.batches
        await sessions.start(1, call_of(1))
        logprobs = tuple(
            TokenLogprobs(-1.5, tuple((200_000 + rank, -2.5) for rank in range(MAX_TOP_LOGPROBS)))
            for _ in range(64)
        )
        for index in range(1000):
            worker.of(1).put_nowait(Span(0, 64 * index, tuple(range(64)), logprobs))
        worker.of(1).put_nowait(None)
        await eventually(lambda: worker.dropped == [1], 100.0)  # a million log-probabilities
        opened.reads.set()
        await eventually(
            lambda: batches[-1].reservations and batches[-1].reservations[0].ended, 100
        )
    assert sum(len(entry.spans) for batch in batches for entry in batch.reservations) == 1000
    assert max(len(pack(batch)) for batch in batches) < 4 << 20


async def test_a_router_that_does_not_read_holds_up_nobody_and_misses_nothing() -> None:
    worker = Spanner()
    sessions = SpanSessions(worker)
    async with session(sessions, 1, stops_at=2) as slow, session(sessions, 2) as quick:
        await sessions.start(1, call_of(1))
        await sessions.start(2, call_of(2))
        for index in range(3000):
            worker.of(1).put_nowait(Span(0, index, (index,)))
            await asyncio.sleep(0)
        worker.of(1).put_nowait(None)
        worker.of(2).put_nowait(Span(0, 0, (5,)))
        worker.of(2).put_nowait(None)
        await eventually(lambda: sorted(worker.dropped) == [1, 2])
        assert len(slow.batches) == 2, "the slow one is stuck"
        assert quick.batches[-1].reservations[0].ended
        slow.reads.set()
        await eventually(lambda: slow.batches[-1].reservations[0].ended)
    tokens = [
        token
        for batch in slow.batches
        for entry in batch.reservations
        for span in entry.spans
        for token in span.token_ids
    ]
    assert tokens == list(range(3000))
    assert 4 <= len(slow.batches) < 10, "what waited goes out in few messages, of bounded size"

"""Remote ports when a worker goes away, stops in its tracks, is another than before, or is never
asked again."""

import asyncio
import contextlib
import os
import pathlib
import signal
import sys

import msgspec
import pytest

from jdisagg.errors import (
    DeadlineExceededError,
    HandoffError,
    InvalidRequestError,
    UnavailableError,
)
from jdisagg.messages.ports import (
    Child,
    HandoffSource,
    PeerHello,
    Reservation,
    ReserveCall,
    ResumeCall,
    Span,
)
from jdisagg.service.internal.span_sessions import SpanSessions
from jdisagg.settings.timeouts import CallTimeouts
from tests import time_scale
from tests.service.doors import STATUS, eventually
from tests.service.port_worker import HELLO, REQUEST, Worker
from tests.service.remote_workers import (
    Spanner,
    call_of,
    collect,
    connected,
    serving,
    session,
    until_usable,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]


async def test_a_worker_that_goes_away_is_unavailable_at_once_and_usable_again_when_it_is_back() -> (  # noqa: E501
    None
):
    worker = Spanner()
    async with contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        address, _ = await first.enter_async_context(serving(worker))
        (remote,) = await stack.enter_async_context(connected(address))
        reading = asyncio.ensure_future(collect(remote, 1))
        worker.of(1).put_nowait(Span(0, 0, (1,)))
        await eventually(lambda: worker.of(1).empty())
        await first.aclose()
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(reading, 5)
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(remote.decode.status(), 5)
        again = Worker()
        await stack.enter_async_context(serving(again, port=int(address.rpartition(":")[2])))
        await until_usable(remote, 5)
        with pytest.raises(HandoffError, match="offer 3"):
            await collect(remote, 1)
        assert again.told == [call_of(1)]


async def test_calls_for_another_boot_of_the_worker_are_refused() -> None:
    worker = Worker()
    async with serving(worker, boot_id=7) as (address, _):
        async with connected(address, boot_id=6) as (stale,):
            with pytest.raises(UnavailableError, match="boot 6 of this process, but .* boot 7"):
                await stale.decode.cancel(5)
            with pytest.raises(UnavailableError, match="restarted"):
                await collect(stale, 5)
        async with connected(address, boot_id=7) as (right,):
            await right.decode.cancel(5)
        assert worker.told == [(5, None)]


async def test_a_peer_port_is_bound_to_the_boot_that_said_hello() -> None:
    worker = Worker()
    async with contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        address, _ = await first.enter_async_context(serving(worker, boot_id=7))
        (remote,) = await stack.enter_async_context(connected(address))
        await remote.peer.hello(msgspec.structs.replace(HELLO, boot_id=7))
        await remote.peer.abort(1, "x")
        await first.aclose()
        await stack.enter_async_context(
            serving(worker, boot_id=8, port=int(address.rpartition(":")[2]))
        )
        said = ""
        async with asyncio.timeout(time_scale.seconds(20)):
            while "restarted" not in said:
                with pytest.raises(UnavailableError) as caught:
                    await remote.peer.abort(2, "x")
                said = caught.value.message
                await asyncio.sleep(0.05)
        assert worker.told == [(1, "x")]
        await remote.peer.hello(msgspec.structs.replace(HELLO, boot_id=8))
        await remote.peer.abort(3, "x")
        assert worker.told == [(1, "x"), (3, "x")]


async def test_a_reservation_that_says_nothing_ends_at_its_deadline() -> None:
    worker = Spanner()
    async with serving(worker) as (address, _), connected(address) as (remote,):
        worker.of(2).put_nowait(None)
        await collect(remote, 2)  # the stream is open: the deadline is not spent on that
        with pytest.raises(DeadlineExceededError, match="no end of reservation 1"):
            async for _ in remote.decode.generate(call_of(1, deadline_seconds=0.05)):
                raise AssertionError("nothing was said")
        await eventually(lambda: worker.dropped == [2, 1])


async def test_a_worker_that_does_not_answer_a_short_call_is_unavailable_and_the_requests_deadline_has_not_passed() -> (  # noqa: E501
    None
):
    class Absent(Worker):
        async def resume_source(self, call: ResumeCall) -> int | None:
            await asyncio.Event().wait()
            return None

        async def hello(self, hello: PeerHello) -> PeerHello:
            await asyncio.Event().wait()
            return hello

    short = CallTimeouts(call_seconds=0.1)
    async with serving(Absent()) as (address, _), connected(address, timeouts=short) as (remote,):
        with pytest.raises(UnavailableError, match="did not answer within 0.2 s"):
            await remote.decode.resume_source(
                ResumeCall(5, 1, HandoffSource("prefill-1", 8, "127.0.0.1:1"))
            )
        with pytest.raises(UnavailableError, match="did not answer within 0.1 s"):
            await remote.peer.hello(HELLO)


async def test_a_session_that_ends_before_its_stream_was_followed_still_frees_the_reservation() -> (
    None
):
    worker = Worker()
    sessions = SpanSessions(worker)
    async with session(sessions) as opened:
        opened.cancel()
        # In the same turn of the loop: the task that follows the reservation is cancelled before
        # it begins.
        await sessions.start(1, call_of(5))
        await eventually(lambda: worker.told == [(5, None)], seconds=1.0)


async def test_a_reservation_that_is_cancelled_before_its_stream_was_followed_ends_and_may_be_forgotten() -> (  # noqa: E501
    None
):
    sessions = SpanSessions(Worker())
    async with session(sessions) as opened:
        await sessions.start(1, call_of(5))
        await sessions.cancel(5, None)  # in the same turn of the loop
        await eventually(lambda: len(opened.batches) > 1, seconds=1.0)
        assert [(news.reservation_id, news.ended) for news in opened.batches[1].reservations] == [
            (5, True)
        ]
        assert not sessions._sessions[1].running


async def test_reservations_that_nobody_started_are_forgotten_after_their_lease() -> None:
    numbers = iter(range(100))

    class Brief(Worker):
        async def reserve(self, call: ReserveCall) -> Reservation:
            return Reservation(next(numbers), "decode-0", 0, lease_seconds=0.01)

    worker = Brief()
    sessions = SpanSessions(worker)
    async with session(sessions):
        for _ in range(3):
            await sessions.reserve_in(1, ReserveCall(REQUEST, 1, (Child(0),), 2.0))
        await asyncio.sleep(0.02)
        await sessions.reserve_in(1, ReserveCall(REQUEST, 1, (Child(0),), 2.0))
    await eventually(lambda: worker.told == [(3, None)])


async def test_one_reservation_is_generated_once() -> None:
    worker = Spanner()
    async with serving(worker) as (address, _), connected(address, 2) as (one, two):
        reading = asyncio.ensure_future(collect(one, 1))
        worker.of(1).put_nowait(Span(0, 0, (1,)))
        await eventually(lambda: worker.of(1).empty())
        with pytest.raises(InvalidRequestError, match="already runs"):
            await collect(one, 1)
        worker.of(1).put_nowait(None)
        assert len(await reading) == 1
        assert await two.decode.status() == STATUS


@pytest.mark.ci
async def test_a_worker_that_stopped_in_its_tracks_is_noticed() -> None:
    """Its kernel still accepts connections and acknowledges bytes: only unanswered pings tell."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.service.worker_process",
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        address = f"127.0.0.1:{int(await asyncio.wait_for(process.stdout.readline(), 60))}"
        async with connected(address) as (remote,):
            spans = remote.decode.generate(call_of(1))
            assert (await anext(spans)).token_ids == (0,)
            os.kill(process.pid, signal.SIGSTOP)
            with pytest.raises(UnavailableError):
                async with asyncio.timeout(10):
                    async for _ in spans:
                        pass
            os.kill(process.pid, signal.SIGCONT)
            await until_usable(remote, 10)
    finally:
        process.kill()
        await process.wait()

"""Ports over real gRPC say the same as the ports themselves: calls, replies, errors, early ends; and what breaks is typed, and soon."""

import asyncio
import contextlib
import os
import pathlib
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from jdisagg.config import ServiceConfig
from jdisagg.dispatch.ports import (
    Child,
    GenerateCall,
    HandoffSource,
    PeerHello,
    Reservation,
    ReserveCall,
    ResumeCall,
    Span,
    SpanEnd,
)
from jdisagg.errors import (
    DeadlineExceededError,
    HandoffError,
    IncompatiblePeerError,
    InvalidRequestError,
    JdisaggError,
    OverloadedError,
    UnavailableError,
)
from jdisagg.service import remote_ports, workers_pb2
from jdisagg.service.remote_ports import RemoteWorker
from jdisagg.service.server import GrpcServer
from jdisagg.service.span_sessions import SpanSessions
from jdisagg.service.worker_service import decode_service, peer_service, prefill_service
from tests.service.doors import STATUS, eventually
from tests.service.test_wire_ports import HELLO, OFFERS, PREFILL, REPLY, REQUEST, SPANS, Worker

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Spanner(Worker):
    """A decode port under the test's hand: `says[reservation]` is what comes of it, an error ends it, None too."""

    def __init__(self) -> None:
        super().__init__()
        self.says: dict[int, asyncio.Queue[Span | JdisaggError | None]] = {}
        self.dropped: list[int] = []

    def of(self, reservation_id: int) -> "asyncio.Queue[Span | JdisaggError | None]":
        return self.says.setdefault(reservation_id, asyncio.Queue())

    async def generate(self, call: GenerateCall) -> AsyncIterator[Span]:
        try:
            while (item := await self.of(call.reservation_id).get()) is not None:
                if isinstance(item, JdisaggError):
                    raise item
                yield item
        finally:
            self.dropped.append(call.reservation_id)


@contextlib.asynccontextmanager
async def serving(worker: Worker, boot_id: int | None = None, port: int = 0) -> AsyncIterator[tuple[str, GrpcServer]]:
    services = (prefill_service(worker), decode_service(worker), peer_service(worker))
    server = GrpcServer(services, ServiceConfig(port=port, drain_seconds=0.0), boot_id)
    address = f"127.0.0.1:{await server.start()}"
    try:
        yield address, server
    finally:
        await server.drain()


@contextlib.asynccontextmanager
async def connected(address: str, count: int = 1, boot_id: int | None = None) -> AsyncIterator[Sequence[RemoteWorker]]:
    remotes = [RemoteWorker(address, boot_id=boot_id) for _ in range(count)]
    try:
        yield remotes
    finally:
        for remote in remotes:
            await remote.aclose()


def call_of(reservation_id: int, deadline_seconds: float = 30.0) -> GenerateCall:
    return GenerateCall(reservation_id, 1, deadline_seconds, HandoffSource("prefill-0", 2**64 - 1, "127.0.0.1:1"))


async def collect(remote: RemoteWorker, reservation_id: int) -> list[Span]:
    return [span async for span in remote.decode.generate(call_of(reservation_id))]


async def test_the_prefill_port_says_what_the_worker_says() -> None:
    worker = Worker()
    async with serving(worker) as (address, _), connected(address) as (remote,):
        assert await remote.prefill.prefill(PREFILL) == REPLY
        await remote.prefill.cancel_prefill(77)
        assert worker.told == [PREFILL, 77]
        assert await remote.prefill.status() == STATUS


async def test_the_decode_port_says_what_the_worker_says_errors_too() -> None:
    worker = Worker()
    async with serving(worker) as (address, _), connected(address) as (remote,):
        assert await remote.decode.reserve(ReserveCall(REQUEST, 1, (Child(0),), 2.0)) == Reservation(5, "decode-0", 1, 30.0, 16)
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


async def test_the_peer_port_says_what_the_worker_says_errors_too() -> None:
    worker = Worker()
    async with serving(worker) as (address, _), connected(address) as (remote,):
        assert await remote.peer.hello(HELLO) == HELLO
        with pytest.raises(IncompatiblePeerError, match="bfloat16"):
            await remote.peer.hello(replace(HELLO, kv_dtype="bfloat16"))
        assert [offer async for offer in remote.peer.offers(77, 2)] == list(OFFERS)
        await remote.peer.acknowledge(77, (0, 2**64 - 1))
        await remote.peer.abort(77, "deadline")
        assert worker.told == [(77, 2), (77, (0, 2**64 - 1)), (77, "deadline")]
        offers = remote.peer.offers(78, 1)
        await anext(offers)
        await offers.aclose()
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
            assert [token for span in spans for token in span.token_ids] == [1000 * number + step for step in range(5)]
            assert spans[-1].end is SpanEnd.STOP
        assert sorted(worker.dropped) == list(range(40))


async def test_closing_an_iterator_cancels_that_sequence_alone() -> None:
    worker = Spanner()
    async with serving(worker) as (address, _), connected(address) as (remote,):
        worker.of(1).put_nowait(Span(0, 0, (7,)))
        closing = remote.decode.generate(call_of(1))
        other = asyncio.ensure_future(collect(remote, 2))
        assert (await anext(closing)).token_ids == (7,)
        await closing.aclose()
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
    sessions, batches = SpanSessions(worker), []

    async def write(batch: workers_pb2.SpanBatch) -> None:
        batches.append([entry.reservation_id for entry in batch.reservations])

    serving_it = asyncio.ensure_future(sessions.serve(1, write))
    await eventually(lambda: batches == [[]])
    for number in range(30):
        sessions.start(1, call_of(number))
    await asyncio.sleep(0.01)
    for step in range(4):
        for number in range(30):
            worker.of(number).put_nowait(Span(0, step, (7,)))
        await asyncio.sleep(0.01)
    assert batches[1:] == [list(range(30))] * 4
    serving_it.cancel()
    await asyncio.gather(serving_it, return_exceptions=True)
    await eventually(lambda: sorted(worker.dropped) == list(range(30)))


async def test_a_router_that_does_not_read_holds_up_nobody_and_misses_nothing() -> None:
    worker = Spanner()
    sessions = SpanSessions(worker)
    reads, batches = asyncio.Event(), {1: [], 2: []}

    async def write_slow(batch: workers_pb2.SpanBatch) -> None:
        batches[1].append(batch)
        if len(batches[1]) == 2:
            await reads.wait()

    async def write_quick(batch: workers_pb2.SpanBatch) -> None:
        batches[2].append(batch)

    serving_both = [asyncio.ensure_future(sessions.serve(1, write_slow)), asyncio.ensure_future(sessions.serve(2, write_quick))]
    await eventually(lambda: batches[1] and batches[2])
    sessions.start(1, call_of(1))
    sessions.start(2, call_of(2))
    for index in range(3000):
        worker.of(1).put_nowait(Span(0, index, (index,)))
        await asyncio.sleep(0)
    worker.of(1).put_nowait(None)
    worker.of(2).put_nowait(Span(0, 0, (5,)))
    worker.of(2).put_nowait(None)
    await eventually(lambda: sorted(worker.dropped) == [1, 2])
    assert len(batches[1]) == 2, "the slow one is stuck"
    assert batches[2][-1].reservations[0].ended
    reads.set()
    await eventually(lambda: batches[1][-1].reservations[0].ended)
    tokens = [token for batch in batches[1][1:] for entry in batch.reservations for span in entry.spans for token in span.token_ids]
    assert tokens == list(range(3000))
    assert 4 <= len(batches[1]) < 10, "what waited goes out in few messages, of bounded size"
    for session in serving_both:
        session.cancel()
    await asyncio.gather(*serving_both, return_exceptions=True)


async def test_a_worker_that_goes_away_is_unavailable_at_once_and_usable_again_when_it_is_back() -> None:
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

        async def usable() -> None:
            while True:
                with contextlib.suppress(UnavailableError):
                    await remote.decode.status()
                    return
                await asyncio.sleep(0.05)

        await asyncio.wait_for(usable(), 5)
        with pytest.raises(HandoffError, match="offer 3"):
            await collect(remote, 1)
        assert again.told == [call_of(1)]


async def test_calls_for_another_boot_of_the_worker_are_refused() -> None:
    worker = Worker()
    async with serving(worker, boot_id=7) as (address, _):
        async with connected(address, boot_id=6) as (stale,):
            with pytest.raises(UnavailableError, match="boot 6 of this process, and this is 7"):
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
        await remote.peer.hello(replace(HELLO, boot_id=7))
        await remote.peer.abort(1, "x")
        await first.aclose()
        await stack.enter_async_context(serving(worker, boot_id=8, port=int(address.rpartition(":")[2])))
        for _ in range(100):
            with pytest.raises(UnavailableError) as caught:
                await remote.peer.abort(2, "x")
            if "restarted" in caught.value.message:
                break
            await asyncio.sleep(0.05)
        assert worker.told == [(1, "x")]
        await remote.peer.hello(replace(HELLO, boot_id=8))
        await remote.peer.abort(3, "x")
        assert worker.told == [(1, "x"), (3, "x")]


async def test_a_reservation_that_says_nothing_ends_at_its_deadline() -> None:
    worker = Spanner()
    async with serving(worker) as (address, _), connected(address) as (remote,):
        with pytest.raises(DeadlineExceededError, match="no end of reservation 1"):
            async for _ in remote.decode.generate(call_of(1, deadline_seconds=0.05)):
                raise AssertionError("nothing was said")
        await eventually(lambda: worker.dropped == [1])


async def test_a_worker_that_does_not_answer_a_short_call_is_unavailable_and_the_requests_deadline_has_not_passed(monkeypatch) -> None:
    class Absent(Worker):
        async def resume_source(self, call: ResumeCall) -> int | None:
            await asyncio.Event().wait()
            return None

        async def hello(self, hello: PeerHello) -> PeerHello:
            await asyncio.Event().wait()
            return hello

    monkeypatch.setattr(remote_ports, "CALL_SECONDS", 0.1)
    async with serving(Absent()) as (address, _), connected(address) as (remote,):
        with pytest.raises(UnavailableError, match="did not answer within 0.2 s"):
            await remote.decode.resume_source(ResumeCall(5, 1, HandoffSource("prefill-1", 8, "127.0.0.1:1")))
        with pytest.raises(UnavailableError, match="did not answer within 0.1 s"):
            await remote.peer.hello(HELLO)


async def test_a_session_that_ends_before_its_stream_was_followed_still_frees_the_reservation() -> None:
    worker = Worker()
    sessions = SpanSessions(worker)

    async def write(batch: workers_pb2.SpanBatch) -> None: ...

    serving_it = asyncio.create_task(sessions.serve(9, write))
    await asyncio.sleep(0)
    serving_it.cancel()
    sessions.start(9, call_of(5))  # in the same turn of the loop: the task that follows the reservation is cancelled before it begins
    await eventually(lambda: worker.told == [(5, None)], seconds=1.0)


async def test_one_reservation_is_generated_once() -> None:
    worker = Spanner()
    async with serving(worker) as (address, _), connected(address, 2) as (one, two):
        reading = asyncio.ensure_future(collect(one, 1))
        worker.of(1).put_nowait(Span(0, 0, (1,)))
        await eventually(lambda: worker.of(1).empty())
        with pytest.raises(InvalidRequestError, match="runs already"):
            await collect(one, 1)
        worker.of(1).put_nowait(None)
        assert len(await reading) == 1
        assert await two.decode.status() == STATUS


async def test_a_worker_that_stopped_in_its_tracks_is_noticed() -> None:
    """Its kernel still accepts connections and acknowledges bytes: only unanswered pings tell."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.service.worker_process", cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
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

            async def usable() -> None:
                while True:
                    with contextlib.suppress(UnavailableError):
                        await remote.decode.status()
                        return
                    await asyncio.sleep(0.05)

            await asyncio.wait_for(usable(), 10)
    finally:
        process.kill()
        await process.wait()


async def test_garbage_on_the_port_disturbs_no_one() -> None:
    worker = Worker()
    async with serving(worker) as (address, _), connected(address) as (remote,):
        host, _, port = address.rpartition(":")
        open_ones = []
        for garbage in (b"", b"\x00" * 64, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", os.urandom(4096)):
            reader, writer = await asyncio.open_connection(host, int(port))
            with contextlib.suppress(ConnectionError):
                writer.write(garbage)
                await writer.drain()
            open_ones.append((reader, writer))
        assert await remote.decode.status() == STATUS
        assert await remote.prefill.prefill(PREFILL) == REPLY
        for _, writer in open_ones:
            writer.close()

"""The metrics port: Prometheus gets over HTTP what the event loop owns, and nothing that others
send to the port disturbs it."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from jdisagg.errors import ConfigError
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.node.cluster_plan import free_ports
from jdisagg.observe.metrics import Metrics
from jdisagg.telemetry import Counters
from tests.observe.samples import at, get, parse


@asynccontextmanager
async def serving(metrics: Metrics, host: str = "127.0.0.1") -> AsyncIterator[int]:
    (port,) = free_ports("127.0.0.1", 1)
    close = metrics.serve(port, host)
    try:
        yield port
    finally:
        await asyncio.to_thread(close)


def send(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(data)
        return connection.recv(1 << 16)


async def test_a_scrape_over_http_equals_the_counters_and_follows_them() -> None:
    metrics, counters = Metrics("p"), Counters()
    metrics.watch_counters("path", counters)
    async with serving(metrics) as port:
        for total in (3, 8):
            counters.add("attempts_failed", total - counters["attempts_failed"])
            samples = parse(await asyncio.to_thread(get, port))
            assert at(samples, "attempts_failed_total", owner="path") == total


async def test_owners_are_read_on_the_event_loop_that_they_live_on() -> None:
    threads: list[threading.Thread] = []

    async def status() -> WorkerStatus:
        threads.append(threading.current_thread())
        raise TimeoutError

    metrics = Metrics("p")
    metrics.watch_worker("decode-0", status)
    metrics.watch_waiting(lambda: threads.append(threading.current_thread()) or 0)
    async with serving(metrics) as port:
        await asyncio.to_thread(get, port)
    assert threads == [threading.current_thread()] * 2


async def test_other_callers_disturb_nobody() -> None:
    async with serving(Metrics("p")) as port:
        for asked, status in (
            (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
            (b"GET /metrics?x=1 HTTP/1.0\r\n\r\n", b"200"),
            (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
            (b"garbage\r\n\r\n", b"400"),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
        ):
            assert status in await asyncio.to_thread(send, port, asked), asked
            assert b"jdisagg_process_info" in await asyncio.to_thread(get, port)


@pytest.mark.ci
async def test_callers_that_say_nothing_hold_nobody_up() -> None:
    async with serving(Metrics("p")) as port:
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
        assert b"jdisagg_process_info" in await asyncio.to_thread(get, port)
        for connection in crowd:
            connection.close()


async def test_all_interfaces_may_be_named_and_a_taken_port_is() -> None:
    async with serving(Metrics("p"), "0.0.0.0") as port:
        assert b"jdisagg_process_info" in await asyncio.to_thread(get, port)
        with pytest.raises(ConfigError, match=str(port)):
            Metrics("q").serve(port, "127.0.0.1")

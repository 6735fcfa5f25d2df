"""The metrics port: real HTTP to Prometheus, and nothing to those who send garbage, hang or come in crowds."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from jdisagg.errors import ConfigError
from jdisagg.observe import metrics_server
from jdisagg.observe.metrics import Metrics
from jdisagg.observe.metrics_server import MetricsServer
from jdisagg.telemetry import Counters
from tests.observe.test_metrics import at, parse


@asynccontextmanager
async def serving(metrics: Metrics) -> AsyncIterator[int]:
    server = MetricsServer(metrics, 0)
    port = await server.start()
    try:
        yield port
    finally:
        await server.stop()


def get(port: int, path: str = "/metrics") -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return answer.read()


async def send(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_a_scrape_over_http_equals_the_counters_and_follows_them() -> None:
    metrics, counters = Metrics("p"), Counters()
    metrics.watch_counters("path", counters)
    async with serving(metrics) as port:
        for total in (3, 8):
            counters.add("requests_started", total - counters["requests_started"])
            assert at(parse(await asyncio.to_thread(get, port)), "jdisagg_requests_started_total", owner="path") == total


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
        (b"GET /metrics?x=1 HTTP/1.0\r\n\r\n", b"200"),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"200"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /../etc/passwd HTTP/1.1\r\n\r\n", b"404"),
        (b"garbage\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
    ],
)
async def test_each_question_gets_its_status(asked: bytes, status: bytes) -> None:
    async with serving(Metrics("p")) as port:
        answer = await send(port, asked)
        assert answer.split(b" ", 2)[1] == status
        assert asked.startswith(b"HEAD") == answer.endswith(b"\r\n\r\n")


async def test_garbage_and_endless_heads_end_their_own_connection_alone() -> None:
    async with serving(Metrics("p")) as port:
        assert await send(port, b"x" * 100_000) == b""
        assert b"jdisagg_process_info" in await asyncio.to_thread(get, port)


async def test_a_crowd_that_says_nothing_is_bounded_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_SECONDS", 0.5)
    async with serving(Metrics("p")) as port:
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * metrics_server.CONNECTIONS)]
        closed = await asyncio.wait_for(asyncio.gather(*(_end(reader) for reader, _ in crowd)), 20)
        assert all(closed), "all were let go"
        assert b"jdisagg_process_info" in await asyncio.to_thread(get, port)
        for _, writer in crowd:
            writer.close()


async def _end(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "[::]"])
def test_all_interfaces_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="every interface"):
        MetricsServer(Metrics("p"), 0, host)


async def test_a_taken_port_is_named() -> None:
    async with serving(Metrics("p")) as port:
        with pytest.raises(ConfigError, match=str(port)):
            await MetricsServer(Metrics("q"), port).start()

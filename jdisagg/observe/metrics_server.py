"""GET /metrics over plain HTTP, on the event loop that owns what is measured.

Written by hand on asyncio because the scrape must run on that loop (state of the workers is touched nowhere else), and because
a port is open to whatever connects: every connection has few bytes and few seconds to ask its one question, only so many are served
at a time, and garbage ends the connection alone. Answers GET and HEAD of /metrics; one question a connection.
"""

import asyncio
import contextlib
import ipaddress
import logging

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from jdisagg.errors import ConfigError
from jdisagg.observe.metrics import Metrics

REQUEST_SECONDS = 5.0
REQUEST_BYTES = 8192
CONNECTIONS = 64

_log = logging.getLogger(__name__)


class MetricsServer:
    """Serves `metrics` on one named interface; `port` 0 lets the system choose."""

    def __init__(self, metrics: Metrics, port: int, host: str = "127.0.0.1") -> None:
        check_interface(host)
        self._metrics = metrics
        self._host = host
        self._port = port
        self._answers: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Binds and serves; returns the port."""
        try:
            self._server = await asyncio.start_server(self._accept, self._host, self._port, limit=REQUEST_BYTES)
        except OSError as error:
            raise ConfigError(f"metrics cannot listen on {self._host}:{self._port}: {error}; choose another port") from error
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Closes the port and what is open. Idempotent."""
        if self._server is not None:
            self._server.close()
            for answer in list(self._answers):
                answer.cancel()
            await asyncio.gather(*self._answers, return_exceptions=True)
            self._server = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._answers) >= CONNECTIONS:
            writer.transport.abort()
            return
        answer = asyncio.get_running_loop().create_task(self._answer(reader, writer))
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._response(head.split(b"\r\n", 1)[0]))
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError):
            writer.transport.abort()
        except Exception:
            _log.exception("a scrape failed")
            writer.transport.abort()
        else:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(REQUEST_SECONDS):
                    await writer.wait_closed()

    async def _response(self, line: bytes) -> bytes:
        words = line.split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _http("400 Bad Request", "text/plain", b"not HTTP/1\n")
        method, target = words[0], words[1].split(b"?", 1)[0]
        if method not in (b"GET", b"HEAD"):
            return _http("405 Method Not Allowed", "text/plain", b"GET only\n")
        if target != b"/metrics":
            return _http("404 Not Found", "text/plain", b"see /metrics\n")
        body = await self._metrics.scrape()
        return _http("200 OK", CONTENT_TYPE_PLAIN_0_0_4, body, head_only=method == b"HEAD")


def check_interface(host: str) -> None:
    """Raises ConfigError for an address that means all interfaces: what is measured is for those who were named."""
    wildcard = not host
    with contextlib.suppress(ValueError):
        wildcard = wildcard or ipaddress.ip_address(host.strip("[]")).is_unspecified
    if wildcard:
        raise ConfigError(f"metrics host {host!r} means every interface; name one, such as 127.0.0.1 or this host's address")


def _http(status: str, content_type: str, body: bytes, head_only: bool = False) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + (b"" if head_only else body)

"""The HTTP server: the OpenAI-compatible door over the same `Frontend` as gRPC, on uvicorn, in the
caller's event loop.

Its limits are its own: the head of a request (its line and headers) must be complete within
`HEAD_SECONDS` of the connection's beginning, or of its first byte, and `HEAD_BYTES`; a connection
without a request is closed. TLS as configured, its files read again when they change. A drain is as
in `server.py`."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jdisagg.address import host_port
from jdisagg.config import ServiceConfig
from jdisagg.dispatch.frontend import Frontend
from jdisagg.errors import ConfigError
from jdisagg.observe.request_log import RequestLog
from jdisagg.service.bearer import Tokens
from jdisagg.service.http.errors import HttpRefusal, error_body
from jdisagg.service.http.exchange import ABORT, WRITE
from jdisagg.service.http.guard import HttpGuard
from jdisagg.service.http.page import PageSources
from jdisagg.service.http.routes import HttpRoutes, Scrape
from jdisagg.service.reread import Reread
from jdisagg.timeouts import DEFAULT_TIMEOUTS

HEAD_SECONDS = 20.0
HEAD_BYTES = 64 << 10
KEEP_ALIVE_SECONDS = 75
BACKLOG = 2048
# How long a client that was refused may take to read why.
LINGER_SECONDS = 1.0
# Of a reply, what scripts of other origins may see.
SHOWN_HEADERS = ("x-request-id", "jdisagg-ignored-fields", "retry-after", "retry-after-ms")

log = logging.getLogger(__name__)


class HttpServer:
    """Build it on the event loop that runs what is behind it; `start`, then `drain`. It listens at
    `config.http_port`. `scrape` gives the metrics' text, where there are any; `page`: what the web
    page shows beside the frontend's status."""

    def __init__(
        self,
        frontend: Frontend,
        config: ServiceConfig,
        tokens: Tokens = (),
        log: RequestLog | None = None,
        scrape: Scrape | None = None,
        page: PageSources | None = None,
    ) -> None:
        log = log or RequestLog()
        self.port = 0
        self._config = config
        self._guard = HttpGuard(tokens, log.refused)
        limit_bytes = config.max_message_bytes
        self._routes = HttpRoutes(
            frontend, self._guard, log, limit_bytes, scrape, page or PageSources()
        )
        self._server = uvicorn.Server(_settings(_application(self._routes, config), config))
        self._socket: socket.socket | None = None
        self._forced = asyncio.Event()
        self._drained = False

    async def start(self) -> None:
        """Binds and serves; `port` is then the one that it listens on. Raises ConfigError."""
        self._socket = listener(self._config)
        self.port = self._socket.getsockname()[1]
        self._server.config.load()
        self._server.lifespan = self._server.config.lifespan_class(self._server.config)
        await self._server.startup(sockets=[self._socket])

    def set_ready(self, ready: bool) -> None:
        """What /health says, until a drain says no for good."""
        self._routes.ready = ready and not self._drained

    async def drain(self) -> None:
        """Ends gracefully. Idempotent."""
        if self._drained or self._socket is None:
            return
        self._drained = True
        self._routes.ready = False
        self._guard.refuse()
        if cut := await self._guard.end(self._config.drain_seconds, self._forced):
            log.warning("shutting down: %d running HTTP requests cut short", cut)
            await self._guard.idle(DEFAULT_TIMEOUTS.call.cleanup_seconds)
        await self._close()

    def force(self) -> None:
        """Ends the waiting of a drain, now or to come."""
        self._forced.set()

    async def _close(self) -> None:
        state = self._server.server_state
        for server in self._server.servers:
            server.close()
        for connection in list(state.connections):
            connection.shutdown()
        left = asyncio.ensure_future(_until(lambda: not state.connections and not state.tasks))
        await asyncio.wait((left,), timeout=DEFAULT_TIMEOUTS.call.cleanup_seconds)
        left.cancel()
        for connection in list(state.connections):
            connection.transport.abort()


class _Protocol(HttpToolsProtocol):
    """uvicorn's, with bounds on the head of a request, and on what is neither head nor body: what
    stands beside the sizes of chunks, and behind the last of them. The connection's state is
    `_due`, the timer of a head that is not complete."""

    _due: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _idle_bytes = 0  # in reads that brought a request no further
    _advanced = False
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_complete()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._head_bytes += len(data)
        self._advanced = False
        super().data_received(data)
        self._idle_bytes = 0 if self._advanced else self._idle_bytes + len(data)
        too_long = self._due is not None and self._head_bytes > HEAD_BYTES
        if too_long or self._idle_bytes > HEAD_BYTES:
            self._refuse(
                HttpRefusal(
                    f"the request's headers have more than {HEAD_BYTES} bytes; send fewer",
                    431,
                    "headers_too_large",
                ),
                b"431 Request Header Fields Too Large",
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._due is not None:  # behind a body nobody reads them
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._advanced = True
        super().on_body(body)

    def on_message_begin(self) -> None:
        self._advanced = True
        super().on_message_begin()
        state = self.scope["state"]  # type: ignore[typeddict-item]
        state[ABORT], state[WRITE] = self.transport.abort, self._write
        if self._due is None:
            self._head_bytes = 0
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._advanced = True
        self._head_complete()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(
            HttpRefusal("the request is no valid HTTP/1.1; send HTTP", 400, "bad_http"),
            b"400 Bad Request",
        )

    def _write(self, data: bytes) -> bool:
        """As uvicorn writes a chunk of a reply that has begun: all that it checks for each was
        checked when the reply began. Not where it would wait, or has nothing to write to."""
        if not data or self.flow.write_paused or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _expect_head(self) -> None:
        self._due = self.loop.call_later(HEAD_SECONDS, self._late)

    def _head_complete(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _late(self) -> None:
        self._due = None
        if not self._head_bytes:  # nothing was asked
            self.transport.close()
            return
        self._refuse(
            HttpRefusal(
                f"the request's headers were not complete within {HEAD_SECONDS:g} s; send them at"
                " once",
                408,
                "request_timeout",
            ),
            b"408 Request Timeout",
        )

    def _refuse(self, error: HttpRefusal, status: bytes) -> None:
        """An answer to what is no request, and the connection's end."""
        self._head_complete()
        if self._refused or self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()  # nothing may stand within another answer
            return
        body = error_body(error)
        self.transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s" % (status, len(body), body)
        )
        # Closed at once with bytes unread, the connection would be reset and the answer lost.
        self._refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)


def listener(config: ServiceConfig) -> socket.socket:
    """The door's listening socket. Raises ConfigError where the address cannot be listened on."""
    assert config.http_port is not None
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.http_port), family=family, backlog=BACKLOG)
    except OSError as error:
        where = host_port(config.host, config.http_port)
        raise ConfigError(
            f"service.http_port cannot be listened on, {where}: {error}; is the port taken? choose"
            " another"
        ) from error


def _application(routes: HttpRoutes, config: ServiceConfig) -> ASGIApp:
    """The routes; with what browsers ask first of a page of another origin, where it may come."""
    application = routes.application()
    if not config.cors_origins:
        return application
    return CORSMiddleware(
        application,
        allow_origins=config.cors_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=SHOWN_HEADERS,
    )


def _settings(application: ASGIApp, config: ServiceConfig) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        http=_Protocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="critical",  # what goes wrong here is in our own log
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_context_factory=_tls(config) if config.tls_certificate else None,
    )


def _tls(config: ServiceConfig) -> Callable[..., ssl.SSLContext]:
    files = (config.tls_certificate, config.tls_key, config.tls_client_ca)

    def read() -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(config.tls_certificate, config.tls_key)
            if config.tls_client_ca:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(config.tls_client_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"service.tls_certificate, tls_key or tls_client_ca cannot be used: {error}; give"
                " PEM files that belong together"
            ) from error
        return context

    latest = Reread(files, read)
    context = latest()

    def renew(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        """Each new connection gets what the files say now."""
        connection.context = latest()

    context.sni_callback = renew  # type: ignore[assignment]
    return lambda *_: context


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)

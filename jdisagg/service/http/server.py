"""The HTTP server, which runs uvicorn in the caller's event loop. It uses the `Frontend` of the
gRPC server.

Unlike uvicorn alone, the server limits the head of a request (request line and headers) to
`HEAD_SECONDS` and `HEAD_BYTES`. The time is counted from the start of the connection, or from the
first byte of a later request. An idle connection is closed. TLS files are read again when they
change. The drain at a shutdown is that of the gRPC server (`service/server.py`)."""

import asyncio
import socket
import ssl
from collections.abc import Callable

import httptools
import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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
from jdisagg.settings.address import listening_socket
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS

HEAD_SECONDS = 20.0
HEAD_BYTES = 64 << 10
KEEP_ALIVE_SECONDS = 75
OTHER_HTTP_PORT = "choose another with --http_port"
BACKLOG = 2048
# Time after which the connection of a refused client is closed. The client can read the reason.
LINGER_SECONDS = 1.0
# Reply headers that scripts of other origins may read.
SHOWN_HEADERS = ("x-request-id", "jdisagg-ignored-fields", "retry-after", "retry-after-ms")


class HttpServer:
    """The HTTP server. Create it on the frontend's event loop, then call `start`, and `close` at
    the end.

    Args:
        config: `http_port`, limits, TLS and drain time.
        tokens: Bearer tokens that are accepted. Without tokens, all requests are accepted.
        scrape: Function that returns the metrics text, or None if metrics are off.
    """

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
        self.guard = HttpGuard(tokens, log.refused)
        self._routes = HttpRoutes(frontend, self.guard, log, config, scrape, page or PageSources())
        self._server = uvicorn.Server(_settings(_application(self._routes, config), config))
        self._socket: socket.socket | None = None

    async def start(self) -> None:
        """Binds the port, sets the attribute `port` to it, and starts to serve. Raises ConfigError
        if the address cannot be bound."""
        self._socket = http_socket(self._config)
        self.port = self._socket.getsockname()[1]
        self._server.config.load()
        self._server.lifespan = self._server.config.lifespan_class(self._server.config)
        await self._server.startup(sockets=[self._socket])

    def set_ready(self, ready: bool) -> None:
        """Sets the readiness that /health reports. During a drain, it reports 503."""
        self._routes.ready = ready

    async def delivered(self) -> None:
        """Waits until the clients have read the ends of their replies."""
        connections = self._server.server_state.connections
        await _until(lambda: not any(one.transport.get_write_buffer_size() for one in connections))

    async def close(self) -> None:
        if self._socket is None:
            return
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
        await self._routes.close()


class _Protocol(HttpToolsProtocol):
    _due: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _idle_bytes = 0  # bytes read since the request last advanced
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
        self._unset_keepalive_if_required()
        self._feed(data)
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

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        except httptools.HttpParserUpgrade as upgrade:
            # The parser stops after the head of a request that offers an upgrade. A new parser
            # continues as if the request had no offer.
            head = b"".join(b"%b: %b\r\n" % one for one in self.headers if one[0] != b"upgrade")
            line = b"%b %b HTTP/1.1\r\n" % (self.parser.get_method(), self.url)
            rest = data[upgrade.args[0] :]
            offers = self._offers_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self._feed(line + head + b"\r\n" + rest if offers else rest)

    def _offers_upgrade(self) -> bool:
        """The server ignores offers of an upgrade, as Java's client makes for HTTP/2."""
        return self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._due is not None:  # trailers after a body are ignored
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
        if not self._offers_upgrade():
            self._head_complete()
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._offers_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(
            HttpRefusal("the request is not valid HTTP/1.1", 400, "bad_http"), b"400 Bad Request"
        )

    def _write(self, data: bytes) -> bool:
        """Faster than uvicorn's `send`, because checks that need not be repeated for each chunk are
        omitted."""
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
        if not self._head_bytes:  # no request has begun
            self.transport.close()
            return
        self._refuse(
            HttpRefusal(
                f"the request's headers were not complete within {HEAD_SECONDS:g} s; send them"
                " faster",
                408,
                "request_timeout",
            ),
            b"408 Request Timeout",
        )

    def _refuse(self, error: HttpRefusal, status: bytes) -> None:
        self._head_complete()
        if self._refused or self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()  # an error must not appear within another reply
            return
        body = error_body(error)
        self.transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s" % (status, len(body), body)
        )
        # If the connection were closed at once, unread bytes would reset it and the reply be lost.
        self._refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)


def http_socket(config: ServiceConfig) -> socket.socket:
    """Raises ConfigError if the address cannot be bound."""
    assert config.http_port is not None
    return listening_socket(config.host, config.http_port, OTHER_HTTP_PORT, BACKLOG)


def _application(routes: HttpRoutes, config: ServiceConfig) -> ASGIApp:
    application = routes.application()
    if not config.cors_origins:
        return application
    return CORSMiddleware(
        application,
        allow_origins=config.cors_origins,
        allow_methods=("GET", "POST", "DELETE"),
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
        log_level="critical",  # our log contains the errors
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
                " matching PEM files"
            ) from error
        return context

    latest = Reread(files, read)
    context = latest()

    def renew(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        connection.context = latest()

    context.sni_callback = renew  # type: ignore[assignment]
    return lambda *_: context


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)

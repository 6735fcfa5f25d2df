"""The gRPC server that every process runs: services, health, reflection, limits, TLS and draining.

During a drain, health reports NOT_SERVING and new calls are refused. Running calls may finish
within `drain_seconds`. Calls that still run then fail as UNAVAILABLE. A port closes only after the
calls of all ports have ended: a request over HTTP needs workers, which report to the gRPC port. By
default, the server listens on the loopback address only. It does not close the objects that its
services use."""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # pyright: ignore[reportAttributeAccessIssue]
from grpc_reflection.v1alpha import reflection

from jdisagg.config import ServiceConfig
from jdisagg.dispatch.frontend import Frontend
from jdisagg.errors import ConfigError, JdisaggError
from jdisagg.observe.request_log import RequestLog
from jdisagg.service.bearer import token_of
from jdisagg.service.calls import DrainingGuard
from jdisagg.service.grpc.generation_service import generation_service
from jdisagg.service.grpc_life import bind, new_server
from jdisagg.service.guard import Guard, Service
from jdisagg.service.http.page import PageSources
from jdisagg.service.http.server import HttpServer, http_socket
from jdisagg.service.internal.connection import (
    MAX_MESSAGE_BYTES,
    Credentials,
    read_pem,
    token_lines,
)
from jdisagg.service.reread import Reread
from jdisagg.settings.address import listening_socket
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, CallTimeouts

Broken = TypeVar("Broken")

log = logging.getLogger(__name__)

OTHER_PORT = "choose another with --port"

LISTENING_OPTIONS: list[tuple[str, int]] = [
    # With port reuse, a second server on the port would silently take half of the clients.
    ("grpc.so_reuseport", 0),
    # Pings detect a client that no longer answers. Our clients ping too, and must not be rejected
    # for it.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    # A connection that sends no valid handshake is closed.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # gRPC cancels calls beyond its own queue without a reason or a counter (by default calls
    # beyond 1,000, and calls that waited 30 s). This queue is larger than any burst, so that our
    # own admission refuses calls with a typed error, a counter and a retry time.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 200_000),
    ("grpc.server_max_unrequested_time_in_server", 600),
]


class GrpcServer:
    """The gRPC server of one process, with its services, health and reflection.

    Create it on the event loop that runs the services. Then call `start`, and `drain` at the end.

    Args:
        services: Services to register.
        config: Address, limits, TLS and drain time.
        boot_id: Random number of this process, drawn at its start. Calls that contain another boot
            id, from before a restart, are refused.
        refused: Callback for each call that fails before it reaches its service (see `Guard`).
        timeouts: Time limits of the steps of a shutdown.
    """

    def __init__(
        self,
        services: Sequence[Service],
        config: ServiceConfig,
        boot_id: int | None = None,
        refused: Callable[[str, JdisaggError], None] = lambda method, error: None,
        timeouts: CallTimeouts = DEFAULT_TIMEOUTS.call,
    ) -> None:
        self._config = config
        self._cleanup_seconds = timeouts.cleanup_seconds
        self._services = tuple(services)
        guard = Guard(self._services, boot_id, refused)
        self._guards: list[DrainingGuard] = [guard]
        self._health = _Health()
        self._credentials = server_credentials(config)
        self._drained = False
        self._forced = asyncio.Event()
        # The limit is larger between processes, because routers send the pixels of images, while
        # clients send compressed images.
        private = all(service.internal for service in self._services)
        most = max(config.max_message_bytes, MAX_MESSAGE_BYTES if private else 0)
        limits = (("grpc.max_receive_message_length", most), ("grpc.max_send_message_length", most))
        self._server = new_server((*limits, *LISTENING_OPTIONS), (guard,))
        for service in self._services:
            service.add(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        public = (service.name for service in self._services if not service.internal)
        names = (*public, health, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> int:
        """Binds the port and starts to serve. Returns the port. If 0 is configured, the system
        chooses it. Raises ConfigError if the address cannot be bound."""
        config = self._config
        bound = bind(self._server, config.host, config.port, self._credentials, OTHER_PORT)
        await self._server.start()
        await self.set_ready(True)
        return bound

    async def set_ready(self, ready: bool) -> None:
        """Sets the health status of the jdisagg services. Has no effect during a drain, when the
        status stays NOT_SERVING. The status of the whole server ("") is SERVING before a drain,
        even if the services are not ready."""
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if ready
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for service in self._services:
            await self._health.set(service.name, status)

    async def drain(self) -> None:
        """Refuses new calls, waits for running calls at most `drain_seconds`, and stops the server.
        Idempotent."""
        if self._drained:
            return
        self._drained = True
        for guard in self._guards:
            guard.refuse()
        # A client that watches the health status and does not read could block this call forever.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._health.enter_graceful_shutdown(), self._cleanup_seconds)
        ended = asyncio.create_task(self._ended())
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait(
            (ended, forced), timeout=self._config.drain_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if cut := sum(guard.cut() for guard in self._guards):
            log.warning("shutting down: cancelled %d running requests", cut)
            await asyncio.wait((ended,), timeout=self._cleanup_seconds)
        ended.cancel()
        forced.cancel()
        await self._close()

    async def _ended(self) -> None:
        """Waits until no call runs."""
        for guard in self._guards:
            await guard.idle()

    async def _close(self) -> None:
        await self._server.stop(grace=self._cleanup_seconds)

    def force(self) -> None:
        """Makes a running or later `drain` stop waiting for running calls."""
        self._forced.set()


class _Health(health_aio.HealthServicer):
    async def List(self, request: object, context: grpc.aio.ServicerContext) -> None:
        """Refuses every call with UNIMPLEMENTED. gRPC's health service does not implement this
        method, and would log a traceback for every call."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "use Check or Watch with one service")


class GenerationServer(GrpcServer):
    """The public server: the generation service, other services, and the HTTP API if it is
    configured. Bearer tokens are read again when the token file changes.

    Args:
        frontend: Frontend that handles the requests.
        config: Address, limits, TLS and drain time.
        others: Further gRPC services.
        log: Request log, which gRPC and HTTP share.
        scrape: Function that returns the reply to GET /metrics, or None if metrics are off.
        page: Data sources of the web page in addition to the frontend.
    """

    ready = False  # whether the health service reports SERVING

    def __init__(
        self,
        frontend: Frontend,
        config: ServiceConfig,
        others: Sequence[Service] = (),
        log: RequestLog | None = None,
        scrape: Callable[[], Awaitable[bytes]] | None = None,
        page: PageSources | None = None,
    ) -> None:
        log = log or RequestLog()
        tokens = Reread((config.token_file,), lambda: read_clients(config.token_file))
        generation = generation_service(frontend, tokens, log)
        self._port = config.port
        self.http: HttpServer | None = None
        if config.http_port is not None:
            self.http = HttpServer(frontend, config, tokens, log, scrape, page)
        super().__init__((generation, *others), config, refused=log.refused)
        if self.http:
            self._guards.append(self.http.guard)

    async def start(self) -> int:
        if self.http:
            await self.http.start()
        try:
            self._port = await super().start()
            return self._port
        except BaseException:
            if self.http:
                await self.http.close()
            raise

    @property
    def listens(self) -> ServiceConfig:
        """The configuration with the bound ports in place of 0. Valid after `start`."""
        http_port = self.http.port if self.http else None
        return replace(self._config, port=self._port, http_port=http_port)

    async def set_ready(self, ready: bool) -> None:
        self.ready = ready and not self._drained
        if self.http:
            self.http.set_ready(self.ready)
        await super().set_ready(ready)

    async def drain(self) -> None:
        self.ready = False
        if self.http:
            self.http.set_ready(False)
        await super().drain()

    async def _ended(self) -> None:
        await super()._ended()
        if self.http:
            await self.http.delivered()

    async def _close(self) -> None:
        closings = [super()._close()]
        if self.http:
            closings.append(self.http.close())
        await asyncio.gather(*closings)


def read_tokens(path: str) -> tuple[str, ...]:
    """Returns the tokens of a token file. Returns an empty tuple if `path` is empty.

    Raises:
        ConfigError: The file is unreadable, has an invalid line, or has no token. A server without
            tokens would accept every call.
    """
    return tuple(token_of(line) for line in read_clients(path))


def read_clients(path: str) -> tuple[str, ...]:
    """Returns the lines of a token file, each with a token and optionally its tenant and limits
    (`service/bearer.py`). Returns an empty tuple if `path` is empty. Raises ConfigError as
    `read_tokens`."""
    tokens = token_lines(path)
    for number, line in enumerate(tokens, 1):
        try:
            token_of(line)
        except ConfigError as error:  # the message must not contain the token
            raise ConfigError(f"token file {path!r}, token {number}: {error}") from None
    return tokens


def cluster_credentials(config: ServiceConfig) -> Credentials:
    """Returns the credentials with which a process connects to other processes of its cluster.

    The processes authenticate with the first token of `cluster_token_file`. They verify each
    other's certificates against `tls_client_ca`. If this is empty, all processes must use one
    certificate, which is then its own authority. A certificate must contain the host names at which
    its process is called."""
    tokens = read_tokens(config.cluster_token_file)
    if not config.tls_certificate:
        return Credentials(token=tokens[0] if tokens else "")
    return Credentials(
        tls=True,
        authority=read_pem("service.tls_client_ca", config.tls_client_ca)
        or read_pem("service.tls_certificate", config.tls_certificate),
        certificate=read_pem("service.tls_certificate", config.tls_certificate),
        key=read_pem("service.tls_key", config.tls_key, "PRIVATE KEY"),
        token=tokens[0] if tokens else "",
    )


def block_secret(config: ServiceConfig) -> bytes:
    """Returns the secret key for the hashes that identify KV blocks. Processes with the same first
    token in `cluster_token_file` have the same key."""
    tokens = read_tokens(config.cluster_token_file)
    token = (tokens[0] if tokens else "").encode()
    return hashlib.blake2b(token, digest_size=32, person=b"jdisagg blocks").digest()


def server_credentials(config: ServiceConfig) -> grpc.ServerCredentials | None:
    """Returns the server's TLS credentials, or None if TLS is not configured.

    If the files change, new connections use their new contents. Raises ConfigError for invalid
    files."""
    if not config.tls_certificate:
        return None
    latest = Reread(
        (config.tls_certificate, config.tls_key, config.tls_client_ca),
        lambda: _certificates(config),
    )
    given = first = latest()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        if latest() is given:
            return None  # gRPC keeps the current certificates
        given = latest()
        return given

    # gRPC's documentation allows None (unchanged), but its types do not.
    fetcher = cast(Callable[[], grpc.ServerCertificateConfiguration], fetch)
    return grpc.dynamic_ssl_server_credentials(
        first, fetcher, require_client_authentication=bool(config.tls_client_ca)
    )


def _certificates(config: ServiceConfig) -> grpc.ServerCertificateConfiguration:
    certificate = read_pem("service.tls_certificate", config.tls_certificate)
    pair = (read_pem("service.tls_key", config.tls_key, "PRIVATE KEY"), certificate)
    authority = read_pem("service.tls_client_ca", config.tls_client_ca) or None
    return grpc.ssl_server_certificate_configuration([pair], authority)


def check_address(config: ServiceConfig) -> None:
    """Checks that the server can bind its addresses and read its certificates and tokens. Called
    before a model is loaded, so that such errors are reported within seconds.

    Raises:
        ConfigError: An address cannot be bound, or a file is unreadable or invalid.
    """
    server_credentials(config)
    for path in (config.token_file, config.cluster_token_file):
        read_tokens(path)
    listening_socket(config.host, config.port, OTHER_PORT).close()
    if config.http_port is not None:
        http_socket(config).close()

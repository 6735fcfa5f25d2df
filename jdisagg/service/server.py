"""The gRPC server: generation service, health, reflection, limits, and a graceful end.

A drain: health says NOT_SERVING and new calls are refused, running ones may finish within `drain_seconds`, then they end
with UNAVAILABLE. Loopback by default. Knows no engine: whoever built the `Frontend` closes what is behind it afterwards.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # pyright: ignore[reportAttributeAccessIssue]
from grpc_reflection.v1alpha import reflection

from jdisagg.config import ServiceConfig
from jdisagg.dispatch.frontend import Frontend
from jdisagg.errors import ConfigError
from jdisagg.service import generation_pb2_grpc
from jdisagg.service.generation_service import GenerationServicer
from jdisagg.service.guard import SERVICE_NAME, Guard

log = logging.getLogger(__name__)

# How long calls that were cut short get to say so before their connections close.
FAREWELL_SECONDS = 1.0


class GenerationServer:
    """Build it on the event loop that runs the path; `start`, then `drain`."""

    def __init__(self, frontend: Frontend, config: ServiceConfig) -> None:
        self._config = config
        self._guard = Guard()
        self._health = health_aio.HealthServicer()
        self._drained = False
        self._hurry = asyncio.Event()
        self._server = grpc.aio.server(
            interceptors=(self._guard,),
            options=(
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", config.max_message_bytes),
                # Without this a second server on the port would silently take half of its clients.
                ("grpc.so_reuseport", 0),
                # A client that vanished without a word is found out by unanswered pings.
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ),
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(frontend), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> int:
        """Binds and serves; returns the port (the one the system chose where the configuration says 0)."""
        host, port = self._config.host, self._config.port
        try:
            bound = self._server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError as error:
            raise _cannot_listen(self._config, error) from error
        await self._server.start()
        await self._health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
        return bound

    async def drain(self) -> None:
        """Ends gracefully, as the module says. Idempotent."""
        if self._drained:
            return
        self._drained = True
        self._guard.refuse()
        # A client that watches health and does not read could hold this up for ever.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._health.enter_graceful_shutdown(), FAREWELL_SECONDS)
        idle = asyncio.ensure_future(self._guard.idle(self._config.drain_seconds))
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait((idle, hurry), return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        hurry.cancel()
        cut = self._guard.cut()
        if cut:
            log.warning("shutting down: %d running requests cut short", cut)
            await self._guard.idle(FAREWELL_SECONDS)
        await self._server.stop(grace=FAREWELL_SECONDS)

    def hurry(self) -> None:
        """Ends the waiting of a drain, now or to come."""
        self._hurry.set()


def check_address(config: ServiceConfig) -> None:
    """Raises ConfigError where the server could not listen, before minutes are spent on what it would serve."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        socket.create_server((config.host, config.port), family=family).close()
    except OSError as error:
        raise _cannot_listen(config, error) from error


def _cannot_listen(config: ServiceConfig, error: Exception) -> ConfigError:
    return ConfigError(f"service cannot listen on {config.host}:{config.port}: {error}; is the port taken? choose another")


async def serve_until_signalled(frontend: Frontend, config: ServiceConfig, ready: Callable[[int], None]) -> None:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends the waiting. `ready` is called with the port."""
    server = GenerationServer(frontend, config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def signalled() -> None:
        if stop.is_set():
            server.hurry()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    try:
        ready(await server.start())
        await stop.wait()
        await server.drain()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

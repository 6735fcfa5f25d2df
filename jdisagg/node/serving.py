"""Serves a frontend until SIGTERM or SIGINT. The caller builds the frontend, so that this module
does not import JAX."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import TypeVar

from jdisagg.config import ServiceConfig
from jdisagg.dispatch.frontend import Frontend
from jdisagg.node.signals import StopSignals
from jdisagg.observe.observer import Observer
from jdisagg.observe.request_log import RequestLog
from jdisagg.service.http.page import PageSources
from jdisagg.service.server import GenerationServer
from jdisagg.settings.address import host_port

Broken = TypeVar("Broken")


async def serve_until_signalled(
    frontend: Frontend,
    config: ServiceConfig,
    ready: Callable[[ServiceConfig], None],
    broken: Callable[[], Coroutine[None, None, Broken]] | None = None,
    log: RequestLog | None = None,
    observer: Observer | None = None,
) -> Broken | None:
    """Serves until SIGTERM or SIGINT, then waits for running requests. A second signal ends the
    wait.

    Args:
        ready: Callback when the server listens. Its argument is the configuration with the bound
            ports.
        broken: Coroutine function that returns when the engine has failed. Running requests are
            then ended early, so that clients can resume them on another server.
        log: Request log.
        observer: Observer whose metrics and request traces the HTTP server publishes, or None.

    Returns:
        The result of `broken` if the engine has failed, or None after a signal.

    Raises:
        ConfigError: An address cannot be bound.
    """
    scrape = observer.metrics.scrape if observer else None
    server = GenerationServer(frontend, config.alone, (), log, scrape, page_sources(observer))
    if observer is not None:
        observer.metrics.watch_ready(lambda: server.ready)
    signals = StopSignals(server.force)
    stopping = asyncio.ensure_future(signals.first())
    breaking = asyncio.ensure_future(broken()) if broken else None
    try:
        await server.start()
        keep_for_good()
        ready(server.listens)
        await asyncio.wait(
            [task for task in (stopping, breaking) if task], return_when=asyncio.FIRST_COMPLETED
        )
        if breaking and breaking.done():
            server.force()
        await server.drain()
        return breaking.result() if breaking and breaking.done() else None
    finally:
        for task in (stopping, breaking):
            if task:
                task.cancel()
        signals.release()


def keep_for_good() -> None:
    """Excludes all existing objects from later garbage collections.

    A full collection of JAX's objects takes 190 ms, during which all streams pause. Must not be
    called in a process that may free a mesh before it exits, such as a worker that can change its
    role."""
    gc.collect()
    gc.freeze()


def page_sources(observer: Observer | None) -> PageSources:
    """Returns the sources of the web page's data: the traces of recent requests and the traffic
    totals. The page reads the cluster's status from the frontend."""
    if observer is None:
        return PageSources()
    return PageSources(observer.recent, observer.metrics.traffic)


def where(service: ServiceConfig) -> str:
    """Returns a server's addresses as text for a log line."""
    address = host_port(service.host, service.port)
    if service.http_port is None:
        return address
    scheme = "https" if service.tls_certificate else "http"
    return f"{address} and {scheme}://{host_port(service.host, service.http_port)}"


def curl(service: ServiceConfig) -> str:
    """Returns a curl command that sends a request to the HTTP API, to print when the server is
    ready. Returns "" if HTTP is off. Also returns "" with TLS, because the command would depend on
    the client's certificates."""
    if service.http_port is None or service.tls_certificate:
        return ""
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(service.host, service.host)
    key = " -H 'authorization: Bearer TOKEN'" if service.token_file else ""
    return (
        f"curl {host_port(host, service.http_port)}/v1/completions{key}"
        " -H 'content-type: application/json'"
        ' -d \'{"prompt": "Once upon a time"}\''
    )

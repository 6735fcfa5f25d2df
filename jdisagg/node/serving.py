"""Serves a frontend until a signal. Imports no JAX: the caller builds the frontend."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import TypeVar

from jdisagg.address import host_port
from jdisagg.config import ServiceConfig
from jdisagg.dispatch.frontend import Frontend
from jdisagg.node.guide import Guide
from jdisagg.node.signals import StopSignals
from jdisagg.observe.observer import Observer
from jdisagg.observe.request_log import RequestLog
from jdisagg.service.http.page import PageSources
from jdisagg.service.server import GenerationServer

Broken = TypeVar("Broken")


async def serve_until_signalled(
    frontend: Frontend,
    config: ServiceConfig,
    ready: Callable[[ServiceConfig], None],
    broken: Callable[[], Coroutine[None, None, Broken]] | None = None,
    log: RequestLog | None = None,
    observer: Observer | None = None,
) -> Broken | None:
    """Serves until SIGTERM or SIGINT, then drains. A second signal ends the drain.

    Args:
        ready: Called, once the server listens, with the configuration including actual ports.
        observer: Observer whose metrics and traced requests the HTTP server shows, or None.
        broken: Awaitable that returns when the engine has failed. Running requests are then cut
            short, so that clients continue on the next server, and its result is returned.
    """
    scrape = observer.metrics.scrape if observer else None
    server = GenerationServer(frontend, config, (), log, scrape, page_sources(observer, config))
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
    """Excludes all existing objects from garbage collection. With JAX's objects a full collection
    takes 190 ms, during which all streams pause. Do not call in a process that may free a mesh
    before its end, such as a worker that can change its role."""
    gc.collect()
    gc.freeze()


def page_sources(observer: Observer | None, config: ServiceConfig) -> PageSources:
    """Returns the data sources that the web page shows besides the status."""
    guide = Guide() if config.http_guide else None
    return PageSources(observer.recent if observer else None, guide)


def where(service: ServiceConfig) -> str:
    """Returns a server's addresses as text for a log line."""
    address = host_port(service.host, service.port)
    if service.http_port is None:
        return address
    scheme = "https" if service.tls_certificate else "http"
    return f"{address} and {scheme}://{host_port(service.host, service.http_port)}"


def curl(service: ServiceConfig) -> str:
    """A command that asks the HTTP API, to be printed below the ready line. Empty without HTTP, and
    with TLS, where it depends on the client's certificates."""
    if service.http_port is None or service.tls_certificate:
        return ""
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(service.host, service.host)
    key = " -H 'authorization: Bearer TOKEN'" if service.token_file else ""
    return (
        f"curl {host_port(host, service.http_port)}/v1/completions{key}"
        " -H 'content-type: application/json'"
        ' -d \'{"prompt": "Once upon a time"}\'\n'
    )

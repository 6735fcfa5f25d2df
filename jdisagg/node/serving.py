"""Serving from one process until a signal asks for the end. No JAX: what is served comes from the
caller."""

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
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends the waiting. `ready` is
    called with the configuration that has the ports. `observer`: whose metrics and traced requests
    the HTTP door shows.

    `broken` returns when what is behind the server cannot serve any more: running requests are
    then cut short at once, so that their clients go on with the next server, and its result is
    returned."""
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
    """What a process has when it begins to serve stays until its end: from here on the garbage
    collector does not look through it. A full collection beside JAX took 190 ms of a processor, in
    which no stream gets a token. Not where a role, and with it a mesh, may end before its
    process."""
    gc.collect()
    gc.freeze()


def page_sources(observer: Observer | None, config: ServiceConfig) -> PageSources:
    """What the web page shows beside the status."""
    guide = Guide() if config.http_guide else None
    return PageSources(observer.recent if observer else None, guide)


def where(service: ServiceConfig) -> str:
    """The addresses of a server's doors, for the line that says so."""
    address = host_port(service.host, service.port)
    if service.http_port is None:
        return address
    scheme = "https" if service.tls_certificate else "http"
    return f"{address} and {scheme}://{host_port(service.host, service.http_port)}"

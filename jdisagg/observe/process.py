"""Observes a whole process with one `async with`.

    async with observing("decode-0", config) as observer:
        executor = wrap.mesh("decode-0", executor, observer)

If configured, the context opens the metrics port and exports spans. Everything stops when the
context ends, even after an error. An error in the configuration is raised at the start of the
context."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from jdisagg.config import ObserveConfig, ServiceConfig
from jdisagg.errors import ConfigError
from jdisagg.observe.metrics import OTHER_METRICS_PORT
from jdisagg.observe.observer import Observer
from jdisagg.observe.tracing import otlp_processor
from jdisagg.settings.address import listening_socket


def check_ports(
    config: ObserveConfig, count: int = 1, service: ServiceConfig | None = None
) -> None:
    """Raises ConfigError if the metrics port, or one of the `count` - 1 ports after it, is in use,
    is a port of `service`, or does not exist. Does nothing if the metrics port is 0."""
    first = config.metrics_port
    if first and service and first in (service.port, service.http_port):
        raise ConfigError(
            f"--metrics_port={first} is also the port of another API (--port, --http_port);"
            f" {OTHER_METRICS_PORT}"
        )
    if first and first + count > 1 << 16:
        raise ConfigError(
            f"--metrics_port={first}: the {count} processes use consecutive ports, the last of them"
            f" {first + count - 1}, and ports end at 65535; choose a lower one"
        )
    for port in range(first, first + count if first else 0):
        listening_socket(config.metrics_host, port, OTHER_METRICS_PORT).close()


@contextlib.asynccontextmanager
async def observing(process: str, config: ObserveConfig) -> AsyncIterator[Observer | None]:
    """Context manager that creates the process's observer. Yields None if `config` requests no
    observability.

    Raises:
        ConfigError: The port is in use, or the span exporter is not installed.
    """
    if not config.on:
        yield None
        return
    processors = [otlp_processor(config.otlp_endpoint)] if config.otlp_endpoint else []
    observer = Observer(process, processors, recent=config.metrics)
    close = (
        observer.metrics.serve(config.metrics_port, config.metrics_host)
        if config.metrics_port
        else None
    )
    try:
        yield observer
    finally:
        if close is not None:
            # In a thread, because a scrape may be waiting for this loop.
            await asyncio.to_thread(close)
        await asyncio.to_thread(observer.tracing.close)

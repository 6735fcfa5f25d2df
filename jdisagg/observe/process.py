"""Observes a whole process with one `async with`.

    async with observing("decode-0", config) as observer:
        executor = wrap.mesh("decode-0", executor, observer)

If configured, the context opens the metrics port and exports spans. Everything stops when the
context ends, even after an error. An error in the configuration is raised at the start of the
context."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from jdisagg.address import listening_socket
from jdisagg.errors import ConfigError
from jdisagg.observe.logs import FORMATS
from jdisagg.observe.metrics import OTHER_METRICS_PORT
from jdisagg.observe.observer import Observer
from jdisagg.observe.tracing import otlp_processor


@dataclass(frozen=True)
class ObserveConfig:
    """Settings of a process's observability.

    Args:
        metrics_port: Port that serves Prometheus metrics, or 0 for no port.
        metrics_host: Network interface of the metrics port. 0.0.0.0 means all interfaces.
        log_format: One of `logs.FORMATS`.
        log_requests: Whether to log every finished request.
        otlp_endpoint: Address of an OTLP collector that receives spans, such as `http://host:4317`,
            or "".
        metrics: Whether to record metrics and the latest traced requests even without a metrics
            port, for the HTTP API and its web page.
    """

    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"
    log_format: str = "text"
    log_requests: bool = False
    otlp_endpoint: str = ""
    metrics: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.metrics_port <= 65535:
            raise ConfigError(
                f"metrics_port must be in [0, 65535], got {self.metrics_port}; 0 is off"
            )
        if self.log_format not in FORMATS:
            raise ConfigError(
                f"log_format must be one of {', '.join(FORMATS)}, got {self.log_format!r}"
            )
        if not self.metrics_host:
            raise ConfigError("metrics_host is empty; name an interface, or 0.0.0.0 for all")

    def check_ports(self, count: int = 1) -> None:
        """Raises ConfigError if the metrics port, or one of the `count` - 1 ports after it, is in
        use. Does nothing if the metrics port is 0."""
        for port in range(self.metrics_port, self.metrics_port + count if self.metrics_port else 0):
            listening_socket(self.metrics_host, port, OTHER_METRICS_PORT).close()

    @property
    def on(self) -> bool:
        return bool(self.metrics or self.metrics_port or self.otlp_endpoint)


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

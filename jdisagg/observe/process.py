"""Observes a whole process with one `async with`.

    async with observing("decode-0", config) as observer:
        executor = wrap.mesh("decode-0", executor, observer)

If configured, the context opens the metrics port, exports spans, and writes a timeline at the end
and on SIGUSR1."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from jdisagg.address import listening_socket
from jdisagg.errors import ConfigError
from jdisagg.folders import made_folder
from jdisagg.observe.logs import FORMATS
from jdisagg.observe.metrics import OTHER_METRICS_PORT
from jdisagg.observe.observer import Observer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ObserveConfig:
    """Settings of a process's observability.

    Args:
        metrics_port: Port that serves Prometheus metrics, or 0 for no port.
        metrics_host: Network interface of the metrics port. 0.0.0.0 means all interfaces.
        otlp_endpoint: Address of an OTLP collector that receives spans, such as `http://host:4317`,
            or "".
        metrics: Whether to record metrics and the latest traced requests even without a metrics
            port, for the HTTP API and its web page.
    """

    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"
    timelines: str = ""
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
        return bool(self.metrics or self.metrics_port or self.timelines or self.otlp_endpoint)


@contextlib.asynccontextmanager
async def observing(process: str, config: ObserveConfig) -> AsyncIterator[Observer | None]:
    """Context manager that creates the process's observer. Yields None if `config` requests no
    observability.

    Raises:
        ConfigError: The port is in use, the timeline folder cannot be created, or the span exporter
            is not installed.
    """
    if not config.on:
        with _on_usr1(None, ""):
            yield None
        return
    folder = str(made_folder("timelines", config.timelines)) if config.timelines else ""
    observer = Observer(process, bool(folder), config.otlp_endpoint, recent=config.metrics)
    close = (
        observer.metrics.serve(config.metrics_port, config.metrics_host)
        if config.metrics_port
        else None
    )
    try:
        with _on_usr1(observer, folder):
            yield observer
    finally:
        if close is not None:
            # In a thread, because a scrape may be waiting for this loop.
            await asyncio.to_thread(close)
        await asyncio.to_thread(_write, observer, folder)
        await asyncio.to_thread(observer.tracing.close)


def write_timeline(observer: Observer | None, folder: str) -> None:
    """Writes the process's timeline in a thread. Used as the handler of SIGUSR1. Call this function
    on the event loop."""
    if observer is None or not folder:
        _log.info("SIGUSR1: no timeline to write; start with --timelines=DIR")
        return
    asyncio.get_running_loop().run_in_executor(None, _write, observer, folder)


@contextlib.contextmanager
def _on_usr1(observer: Observer | None, folder: str) -> Iterator[None]:
    """Context manager that writes a timeline on SIGUSR1, so that the signal does not end the
    process."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGUSR1, write_timeline, observer, folder)
    except (ValueError, NotImplementedError, RuntimeError):
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _write(observer: Observer, folder: str) -> None:
    if observer.timeline is None:
        return
    try:
        observer.tracing.flush()
        path = observer.timeline.write(folder)
    except OSError as error:
        _log.warning("the timeline could not be written to %s: %s", folder, error)
    else:
        _log.info("timeline written to %s", path)

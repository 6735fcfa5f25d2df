"""Observing a whole process: one `with` around what it does.

    async with observing("decode-0", config) as observer:
        executor = wrap.mesh("decode-0", executor, observer)

Opens the metrics port where there is one, writes the timeline at the end and when asked to by
SIGUSR1, sends spans where they are wanted, and stops all of it whatever happened. A folder for
timelines that cannot be made is refused at the start; once work has begun, what is written down for
people never stops it: a timeline that cannot be written is then a line in the log. It is written
by a thread, so that streams go on meanwhile."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from jdisagg.errors import ConfigError
from jdisagg.folders import made_folder
from jdisagg.observe.logs import FORMATS
from jdisagg.observe.observer import Observer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ObserveConfig:
    """How a process is observed.

    Args:
      metrics_port: Of Prometheus metrics; 0: none.
      metrics_host: The interface that the port is opened on; 0.0.0.0 is all.
      timelines: A folder for timelines; empty: none is kept.
      log_format: One of `logs.FORMATS`.
      log_requests: A line in the log for every request that ended.
      otlp_endpoint: An OTLP collector for spans, `http://host:4317`; empty: none.
      metrics: Metrics are kept without a port of their own, and the latest traced requests: the
        HTTP door and its page show them.
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

    @property
    def on(self) -> bool:
        return bool(self.metrics or self.metrics_port or self.timelines or self.otlp_endpoint)


@contextlib.asynccontextmanager
async def observing(process: str, config: ObserveConfig) -> AsyncIterator[Observer | None]:
    """An observer for this process, on the running loop; None where nothing is asked for.

    Raises:
      ConfigError: when the port is taken, the timelines' folder cannot be made, or the exporter of
        spans is not installed.
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
            # A scrape may be waiting for this loop.
            await asyncio.to_thread(close)
        await asyncio.to_thread(_write, observer, folder)
        await asyncio.to_thread(observer.tracing.close)


def write_timeline(observer: Observer | None, folder: str) -> None:
    """What SIGUSR1 does: writes the timeline beside the work, or says that there is none. Call it
    on the event loop."""
    if observer is None or not folder:
        _log.info("SIGUSR1 writes the timeline, and none is kept here; start with --timelines=DIR")
        return
    asyncio.get_running_loop().run_in_executor(None, _write, observer, folder)


@contextlib.contextmanager
def _on_usr1(observer: Observer | None, folder: str) -> Iterator[None]:
    """The signal never ends the process. Outside the main thread there are no signals."""
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

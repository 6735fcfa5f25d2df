"""Observing a whole process: one `with` around what it does.

    async with observing("decode-0", config) as observer:
        executor = wrap.mesh("decode-0", executor, observer)

Starts the metrics port where there is one, writes the timeline at the end and at each SIGUSR1, and stops both whatever happened. A folder
for timelines that cannot be made is refused at the start; once work has begun, what is written down for people never stops it: a
timeline that cannot be written is then a line in the log.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from jdisagg.errors import ConfigError
from jdisagg.folders import made_folder
from jdisagg.observe.logs import FORMATS
from jdisagg.observe.metrics_server import MetricsServer, check_interface
from jdisagg.observe.observer import Observer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ObserveConfig:
    """`metrics_port` 0: no metrics port. `timelines`: a folder; empty: no timeline is kept."""

    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"
    timelines: str = ""
    log_format: str = "text"

    def __post_init__(self) -> None:
        if not 0 <= self.metrics_port <= 65535:
            raise ConfigError(f"metrics_port must be in [0, 65535], got {self.metrics_port}; 0 is off")
        if self.log_format not in FORMATS:
            raise ConfigError(f"log_format must be one of {', '.join(FORMATS)}, got {self.log_format!r}")
        check_interface(self.metrics_host)

    @property
    def on(self) -> bool:
        return bool(self.metrics_port or self.timelines)


@contextlib.asynccontextmanager
async def observing(process: str, config: ObserveConfig) -> AsyncIterator[Observer | None]:
    """An observer for this process, on the running loop; None where nothing is asked for. Raises ConfigError when the port is taken, or the
    timelines' folder cannot be made."""
    if not config.on:
        yield None
        return
    timelines = str(made_folder("timelines", config.timelines)) if config.timelines else ""
    observer = Observer(process, trace=bool(timelines))
    server = MetricsServer(observer.metrics, config.metrics_port, config.metrics_host) if config.metrics_port else None
    loop = asyncio.get_running_loop()
    if server is not None:
        await server.start()
    on_demand = timelines != "" and _on_signal(loop, lambda: _write(observer, timelines))
    try:
        yield observer
    finally:
        if on_demand:
            loop.remove_signal_handler(signal.SIGUSR1)
        if server is not None:
            await server.stop()
        _write(observer, timelines)


def _on_signal(loop: asyncio.AbstractEventLoop, write: Callable[[], None]) -> bool:
    """False where signals cannot be had: outside the main thread."""
    with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):
        loop.add_signal_handler(signal.SIGUSR1, write)
        return True
    return False


def _write(observer: Observer, folder: str) -> None:
    try:
        path = observer.write_timeline(folder) if folder else None
    except OSError as error:
        _log.warning("the timeline could not be written to %s: %s", folder, error)
    else:
        if path is not None:
            _log.info("timeline written to %s", path)

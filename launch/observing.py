"""The flags by which every launch script is observed, and what they come to.

from launch.observing import observe_config
config = observe_config()                        # after flags are parsed
configure_logging(config.log_format, process=name)
async with observing(name, config) as observer: ...
"""

from absl import flags

from jdisagg.observe.logs import FORMATS
from jdisagg.observe.process import ObserveConfig

_PORT = flags.DEFINE_integer("metrics_port", 0, "Port of Prometheus metrics (GET /metrics); 0 is off.")
_HOST = flags.DEFINE_string("metrics_host", "127.0.0.1", "The one interface on which metrics are served.")
_TIMELINES = flags.DEFINE_string("timelines", "", "Folder for timelines, written at the end and at SIGUSR1; see launch.trace. '' is off.")
_FORMAT = flags.DEFINE_enum("log_format", "text", list(FORMATS), "Lines for people, or one JSON object a line.")


def observe_config() -> ObserveConfig:
    """Raises ConfigError for what cannot be."""
    return ObserveConfig(_PORT.value, _HOST.value, _TIMELINES.value, _FORMAT.value)


def observe_flags(port: int = 0) -> list[str]:
    """The flags to give to a child process, so that it is observed alike; `port` is its own metrics port."""
    flags_given = [f"--metrics_host={_HOST.value}", f"--log_format={_FORMAT.value}"]
    if _TIMELINES.value:
        flags_given.append(f"--timelines={_TIMELINES.value}")
    return [*flags_given, *([f"--metrics_port={port}"] if port else [])]

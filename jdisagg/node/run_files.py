"""The configuration of a child process as one JSON file, which its parent writes and the process
reads.

The file has the form of the configuration's dataclasses, which validate it again when it is read.
Files hold paths of secrets, never secrets."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from jdisagg.config import WorkerConfig
from jdisagg.errors import ConfigError
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.node.router import RouterConfig
from jdisagg.observe.process import ObserveConfig


@dataclass(frozen=True)
class ProcessPlace:
    """The index of a process in a worker's instance. With `count` 0 the cluster's scheduler
    decides."""

    index: int = 0
    count: int = 1
    coordinator: str | None = None


@dataclass(frozen=True)
class WorkerProcessConfig:
    """A worker process.

    Attributes:
        devices: Virtual devices on CPU.
        place: Location of the worker, as in its card.
        sharers: Workers that share the host's memory, including this one.
    """

    name: str
    role: WorkerRole
    routers: tuple[str, ...]
    worker: WorkerConfig
    devices: int
    place: str
    process: ProcessPlace = field(default_factory=ProcessPlace)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    record_to: str = ""
    sharers: int = 1


@dataclass(frozen=True)
class RouterProcessConfig:
    """A router process. Only the tokenizer of the directory `model` is read."""

    router: RouterConfig
    model: str
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    decision_log: str = ""


ProcessConfig = TypeVar("ProcessConfig", WorkerProcessConfig, RouterProcessConfig)


def write_config(path: Path, config: WorkerProcessConfig | RouterProcessConfig) -> None:
    """Writes the file atomically, because a restarted process reads it again."""
    written = path.with_suffix(".part")
    written.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    written.replace(path)


def read_config(path: str, kind: type[ProcessConfig]) -> ProcessConfig:
    """Raises ConfigError for a file that cannot be read or is invalid."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"--config_file={path} is not a {kind.__name__} ({error}); give a file that jdisagg"
            " cluster wrote"
        ) from error

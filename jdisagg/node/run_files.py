"""Passes a child process's configuration in a JSON file that the parent writes.

The JSON mirrors the configuration's dataclasses, which validate the fields again on reading. Files
contain paths of secrets, never secrets."""

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
    """Index of a process in its instance, and number of processes. With `count` 0 the cluster's
    scheduler provides both."""

    index: int = 0
    count: int = 1
    coordinator: str | None = None


@dataclass(frozen=True)
class WorkerProcessConfig:
    """Configuration of a worker process.

    Attributes:
        devices: Number of virtual CPU devices.
        place: Location of the worker in the network, as in the worker's card.
        sharers: Number of workers that share the host's memory, including this one.
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
    """Configuration of a router process. Only the tokenizer of the directory `model` is read."""

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
    """Reads a configuration of type `kind`. Raises ConfigError for a missing or invalid file."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"--config_file={path} is not a {kind.__name__} ({error}); give a file that jdisagg"
            " cluster wrote"
        ) from error

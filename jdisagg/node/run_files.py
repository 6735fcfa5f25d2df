"""What a child process is, as one JSON file: its parent writes it, the process reads it.

The configuration's dataclasses are the file's form; they are validated again when they are read.
The files hold paths of secrets, never secrets."""

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
    """Which process of a worker's instance it is. `count` 0: as the cluster's scheduler says."""

    index: int = 0
    count: int = 1
    coordinator: str | None = None


@dataclass(frozen=True)
class WorkerProcessConfig:
    """A worker process. `devices`: virtual devices on CPU. `place`: as in its card. `sharers`: of
    the host's memory, this worker among them."""

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
    """A router process. `model`: a directory, whose tokenizer alone is read."""

    router: RouterConfig
    model: str
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    decision_log: str = ""


ProcessConfig = TypeVar("ProcessConfig", WorkerProcessConfig, RouterProcessConfig)


def write_config(path: Path, config: WorkerProcessConfig | RouterProcessConfig) -> None:
    """Whole or not at all: a process that is started again reads it anew."""
    written = path.with_suffix(".part")
    written.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    written.replace(path)


def read_config(path: str, kind: type[ProcessConfig]) -> ProcessConfig:
    """Raises ConfigError for a file that cannot be read or is none of this kind."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"--config_file={path} is no {kind.__name__} ({error}); give one that `jdisagg cluster`"
            " wrote"
        ) from error

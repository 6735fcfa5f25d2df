"""Passes a configuration from a parent process to a child process, in a JSON file.

The JSON has the structure of the configuration's dataclasses. They validate the fields again when
the file is read. The files contain paths of token and key files, but no secrets."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from jdisagg.config import ObserveConfig, WorkerConfig
from jdisagg.errors import ConfigError
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.node.router import RouterConfig


@dataclass(frozen=True)
class ProcessPlace:
    """Index of a process in its instance, and the instance's number of processes.

    If `count` is 0, the cluster scheduler (such as Slurm) provides both. `coordinator` is the
    address of the JAX coordinator, or None for an instance of one process."""

    index: int = 0
    count: int = 1
    coordinator: str | None = None


@dataclass(frozen=True)
class WorkerProcessConfig:
    """Configuration of a worker process.

    Attributes:
        place: Location of the worker in the network, as in `WorkerCard`.
        sharers: Number of workers on this host that share its memory, including this one.
        elastic: Whether the programs of both roles, prefill and decode, are compiled before the
            worker serves. Otherwise a role change compiles those of the new role.
    """

    name: str
    role: WorkerRole
    routers: tuple[str, ...]
    worker: WorkerConfig
    devices: int
    place: str
    process: ProcessPlace = field(default_factory=ProcessPlace)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    sharers: int = 1
    elastic: bool = False


@dataclass(frozen=True)
class RouterProcessConfig:
    """From the checkpoint folder `model`, the router reads only the tokenizer."""

    router: RouterConfig
    model: str
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    decision_log: str = ""


ProcessConfig = TypeVar("ProcessConfig", WorkerProcessConfig, RouterProcessConfig)


def write_config(path: Path, config: WorkerProcessConfig | RouterProcessConfig) -> None:
    """Writes a configuration file. The file is replaced atomically, because a child process that is
    restarted may read it at the same time. Its folder is made again if a cleaner of temporary
    files has removed it."""
    path.parent.mkdir(0o700, exist_ok=True)
    written = path.with_suffix(".part")
    written.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    written.replace(path)


def read_config(path: str, kind: type[ProcessConfig]) -> ProcessConfig:
    """Raises ConfigError if the file is missing or invalid."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"--config_file={path} is not a {kind.__name__} ({error}); give a file that jdisagg"
            " cluster wrote"
        ) from error

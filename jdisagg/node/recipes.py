"""Reads and writes recipes. A recipe is a Python file with a function `get_config()` that returns
an `EngineConfig`, and optionally a function `get_cluster()` that returns a `ClusterShape`.

An embedded cluster has one instance of each role. A multi-process cluster has as many as the
`ClusterShape` states. This module starts no process."""

import dataclasses
import importlib.util
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from jdisagg.config import EngineConfig, InstanceConfig, Mode, ModelConfig, WorkerConfig
from jdisagg.errors import ConfigError, JdisaggError
from jdisagg.layout.axes import Layout
from jdisagg.messages.worker_status import WorkerRole

Returned = TypeVar("Returned")


@dataclass(frozen=True)
class ClusterShape:
    """Number of instances of each role in a cluster."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0

    def __post_init__(self) -> None:
        if min(self.prefill, self.decode, self.mixed) < 0 or not (
            self.mixed or (self.prefill and self.decode)
        ):
            raise ConfigError(
                f"cluster shape: {self}: give one prefill and one decode instance at least, or some"
                " mixed ones"
            )


def load_recipe(path: str) -> EngineConfig:
    """Runs a recipe file and returns its configuration. Raises ConfigError if the file is not a
    recipe or raises an error. The message has the line."""
    config = _told(path, getattr(_run(path), "get_config", lambda: None))
    if not isinstance(config, EngineConfig):
        raise ConfigError(
            f"config {path!r} has no get_config() that returns an EngineConfig; see"
            " configs/tiny_cpu.py"
        )
    return config


def load_shape(path: str, mode: Mode | None = None) -> ClusterShape:
    """Returns the result of the recipe's `get_cluster()`. Without this function, returns one
    instance of each role of `mode`. If `mode` is None, the recipe's mode is used."""
    module = _run(path)
    if not hasattr(module, "get_cluster"):
        return (
            ClusterShape(prefill=1, decode=1)
            if (mode or load_recipe(path).mode) is Mode.DISAGGREGATED
            else ClusterShape(mixed=1)
        )
    shape = _told(path, module.get_cluster)
    if not isinstance(shape, ClusterShape):
        raise ConfigError(
            f"config {path!r}: get_cluster() must return a ClusterShape, got {type(shape).__name__}"
        )
    return shape


def _run(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipe", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ConfigError(
            f"config {path!r} is not a Python file; give a recipe such as configs/tiny_cpu.py"
        )
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    _told(path, lambda: loader.exec_module(module))
    return module


def _told(path: str, call: Callable[[], Returned]) -> Returned:
    """Calls a function of the recipe. Converts its exceptions to a ConfigError with the line in the
    recipe."""
    try:
        return call()
    except JdisaggError as error:
        raise type(error)(f"config {path!r}{_line(path, error)}: {error.message}") from error
    except Exception as error:
        raise ConfigError(
            f"config {path!r}{_line(path, error)}: {type(error).__name__}: {error}; correct the"
            " recipe"
        ) from error


def _line(path: str, error: Exception) -> str:
    """Returns ", line N" with the number of the recipe's line that raised the error, or "" if
    unknown."""
    if (
        isinstance(error, SyntaxError)
        and error.lineno
        and error.filename
        and Path(error.filename).name == Path(path).name
    ):
        return f", line {error.lineno}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename) == Path(path).absolute()
    ]
    return f", line {lines[-1]}" if lines else ""


def worker_config(config: EngineConfig, role: WorkerRole) -> WorkerConfig:
    """Returns the configuration of a worker in `role`, derived from the recipe's configuration."""
    instance = config.prefill if role is WorkerRole.PREFILL else config.decode
    cut = config.prefill  # Both sides of a hand-off must use the same layer groups.
    two_meshes = config.mode is Mode.DISAGGREGATED
    return WorkerConfig(
        model=config.model,
        mode=Mode.CHUNKED if two_meshes else config.mode,
        instance=dataclasses.replace(
            instance, layer_groups=cut.layer_groups, block_bytes=cut.block_bytes
        ),
        limits=config.limits,
        prefix=config.prefix,
        service=config.service,
        warm_up=config.warm_up,
        compilation_cache=config.compilation_cache,
        kernels=config.kernels,
    )


def recipe_text(config: EngineConfig, shape: ClusterShape, docstring: str) -> str:
    """Returns the text of a recipe file: model, mode, the instance configurations that the mode
    uses, and the number of instances."""
    two = config.mode is Mode.DISAGGREGATED
    parts = [f"model={_call(config.model, ModelConfig())},", f"mode=Mode.{config.mode.name},"]
    parts += [f"prefill={_call(config.prefill, InstanceConfig())},"] if two else []
    parts += [f"decode={_call(config.decode, InstanceConfig())},"]
    body = "\n".join(f"        {part}" for part in parts)
    counts = ", ".join(
        f"{name}={count}" for name, count in dataclasses.asdict(shape).items() if count
    )
    return f'''"""{docstring}"""

from jdisagg.config import EngineConfig, InstanceConfig, Mode, ModelConfig
from jdisagg.layout.axes import Layout
from jdisagg.node.recipes import ClusterShape


def get_config() -> EngineConfig:
    return EngineConfig(
{body}
    )


def get_cluster() -> ClusterShape:
    return ClusterShape({counts})
'''


def _call(value: ModelConfig | InstanceConfig, defaults: ModelConfig | InstanceConfig) -> str:
    """Returns the Python text of a constructor call that creates `value`. Omits arguments that
    equal the default."""
    fields = [
        (spec.name, getattr(value, spec.name))
        for spec in dataclasses.fields(value)
        if getattr(value, spec.name) != getattr(defaults, spec.name)
    ]
    written = ", ".join(
        f"{name}={_layout(item) if isinstance(item, Layout) else repr(item)}"
        for name, item in fields
    )
    return f"{type(value).__name__}({written})"


def _layout(layout: Layout) -> str:
    return f"Layout(dp={layout.dp}, tp={layout.tp}, ep={layout.ep})"

"""Reads and writes recipes, which are configuration files in Python, YAML or JSON.

A Python recipe has a function `get_config()` that returns an `EngineConfig`. It may have a function
`get_cluster()` that returns a `ClusterShape`. A YAML or JSON recipe has the fields of
`EngineConfig` that differ from the defaults. Its fields under `cluster` are those of
`ClusterShape`, and its fields under `instance` apply to both prefill and decode."""

import dataclasses
import importlib.util
import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import yaml

from jdisagg.config import EngineConfig, InstanceConfig, Mode, ModelConfig
from jdisagg.errors import ConfigError, JdisaggError
from jdisagg.layout.axes import Layout
from jdisagg.settings.declared import SettingError, changed

Returned = TypeVar("Returned")
DATA = (".yaml", ".yml", ".json")
BOTH_SIDES = ("prefill", "decode")


@dataclass(frozen=True)
class ClusterShape:
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

    @property
    def instances(self) -> int:
        return self.prefill + self.decode + self.mixed


def load_recipe(path: str) -> EngineConfig:
    """Raises ConfigError if the file is not a recipe, or if its code raises an error."""
    if Path(path).suffix in DATA:
        fields = {name: value for name, value in _data(path).items() if name != "cluster"}
        return _told(path, lambda: changed(EngineConfig(), of_both_sides(_settings(fields))))
    config = _told(path, getattr(_run(path), "get_config", lambda: None))
    if not isinstance(config, EngineConfig):
        raise ConfigError(
            f"config {path!r} has no get_config() that returns an EngineConfig; see"
            " configs/tiny_cpu.py"
        )
    return config


def recipe_sets(path: str, setting: str) -> bool:
    """Returns whether a YAML or JSON recipe has `setting`, such as service.http_port, also if its
    value is the default."""
    return Path(path).suffix in DATA and setting in dict(_settings(_data(path)))


def load_shape(path: str, mode: Mode | None = None) -> ClusterShape:
    """Returns the numbers of instances of a recipe: the result of `get_cluster()`, or its `cluster`
    fields. If the recipe has neither, returns one instance of each role that `mode` has."""
    if Path(path).suffix in DATA:
        counts = _data(path).get("cluster")
        make = None if counts is None else lambda: _shape(counts)
    else:
        make = getattr(_run(path), "get_cluster", None)
    if make is None:
        return (
            ClusterShape(prefill=1, decode=1)
            if (mode or load_recipe(path).mode) is Mode.DISAGGREGATED
            else ClusterShape(mixed=1)
        )
    shape = _told(path, make)
    if not isinstance(shape, ClusterShape):
        raise ConfigError(
            f"config {path!r}: get_cluster() must return a ClusterShape, got {type(shape).__name__}"
        )
    return shape


def _data(path: str) -> dict[str, object]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
        repeated = list(_repeated(_composed(text)))
    except OSError as error:
        raise ConfigError(f"config {path!r} cannot be read ({error.strerror}); give a file") from (
            error
        )
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        kind = Path(path).suffix[1:].upper()
        raise ConfigError(f"config {path!r} is not valid {kind}: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigError(
            f"config {path!r} must hold the fields of a configuration, such as"
            " `decode: {layout: dp=2}`; see docs/reference/configuration.md"
        )
    if repeated:
        raise ConfigError(f"config {path!r}, line {repeated[0]} is set twice; keep one of them")
    return found


def _composed(text: str) -> yaml.Node | None:
    return yaml.compose(text.replace("\t", " "), yaml.SafeLoader)  # YAML holds JSON, but for tabs


def _repeated(node: yaml.Node | None, at: str = "") -> Iterator[str]:
    """Yields line and path of settings that occur before. Parsers would drop the earlier ones."""
    known: set[str] = set()
    for key, inner in node.value if isinstance(node, yaml.MappingNode) else ():
        path = f"{at}{key.value}"
        if path in known:
            yield f"{key.start_mark.line + 1}: {path}"
        known.add(path)
        yield from _repeated(inner, f"{path}.")


def _settings(fields: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in fields.items():
        if isinstance(value, dict) and name != "layout":
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def of_both_sides(settings: Iterable[tuple[str, object]]) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for path, value in settings:
        name = path.removeprefix("instance.")
        sides = [path] if name == path else [f"{side}.{name}" for side in BOTH_SIDES]
        found += [(side, value) for side in sides]
    return found


def _shape(counts: object) -> ClusterShape:
    names = [spec.name for spec in dataclasses.fields(ClusterShape)]
    if not isinstance(counts, dict) or not all(
        name in names and type(count) is int for name, count in counts.items()
    ):
        raise ConfigError(f"cluster: {counts!r} must hold numbers for some of {', '.join(names)}")
    return ClusterShape(**counts)


def _run(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipe", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ConfigError(
            f"config {path!r} is not a Python, YAML or JSON file; give a recipe such as"
            " configs/tiny_cpu.py"
        )
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    _told(path, lambda: loader.exec_module(module))
    return module


def _told(path: str, call: Callable[[], Returned]) -> Returned:
    try:
        return call()
    except JdisaggError as error:
        kind = ConfigError if isinstance(error, SettingError) else type(error)
        raise kind(f"config {path!r}{_line(path, error)}: {error.message}") from error
    except Exception as error:
        raise ConfigError(
            f"config {path!r}{_line(path, error)}: {type(error).__name__}: {error}; correct the"
            " recipe"
        ) from error


def _line(path: str, error: Exception) -> str:
    if isinstance(error, SettingError) and Path(path).suffix in DATA:
        line = _place(_composed(Path(path).read_text(encoding="utf-8")), error.path.split("."))[1]
        return f", line {line}" if line else ""
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


def _place(node: yaml.Node | None, names: list[str]) -> tuple[int, int]:
    """Returns how many of `names` a file has, and the line of the last of them."""
    places = [(0, 0)]
    for key, inner in node.value if isinstance(node, yaml.MappingNode) and names else ():
        if key.value == names[0] or (key.value == "instance" and names[0] in BOTH_SIDES):
            depth, line = _place(inner, names[1:])
            places.append((depth + 1, line or key.start_mark.line + 1))
    return max(places)


def recipe_text(config: EngineConfig, shape: ClusterShape, docstring: str) -> str:
    """Returns the text of a Python recipe. It sets the model, the mode, the configurations of the
    instances that the mode uses, and the number of instances."""
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
    stages = f", pp={layout.pp}" if layout.pp > 1 else ""
    return f"Layout(dp={layout.dp}, tp={layout.tp}, ep={layout.ep}{stages})"


def for_accelerators(recipe: EngineConfig, devices: int, meshes: int = 2) -> EngineConfig:
    """Returns a copy of a recipe with layouts and sizes for the accelerators of a host.

    The accelerators are divided into meshes of equal size, which is a power of two. A prefill mesh
    uses them as tp, a decode mesh as dp. If there are fewer accelerators than meshes, one mesh runs
    prefill and decode in the same steps (mode chunked)."""
    sizes = InstanceConfig(slots_per_rank=32, chunk_tokens=1024, min_chunk_tokens=256)
    each = 1 << (max(1, devices // meshes).bit_length() - 1)
    prefill, decode = (replace(sizes, layout=one) for one in (Layout(tp=each), Layout(dp=each)))
    mode = Mode.CHUNKED if devices < meshes else recipe.mode
    return replace(recipe, mode=mode, prefill=prefill, decode=decode)

"""What `--hardware=` and `--model=` mean where costs are computed: names of the tables, or files. Loads no weights and no JAX.

Hardware files are written by `launch.measure_costs`.
"""

import dataclasses
import json
from pathlib import Path

from jdisagg.errors import ConfigError
from jdisagg.router.hardware import HARDWARE, Accelerator, accelerator, accelerator_from_fields
from jdisagg.router.model_geometry import CATALOG, CostGeometry, from_hf_fields, geometry


def find_accelerator(name: str) -> Accelerator:
    """Of the table by its name, or of a file where `name` ends in .json."""
    if name in HARDWARE or not name.endswith(".json"):
        return accelerator(name)
    try:
        fields = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"hardware file {name} cannot be read ({error}); write one with launch.measure_costs") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"hardware file {name} must hold a JSON object, got {type(fields).__name__}; write one with launch.measure_costs")
    return accelerator_from_fields(fields, f"hardware file {name}")


def find_geometry(model: str) -> CostGeometry:
    """Of a model directory or a name of the catalogue."""
    directory = Path(model)
    if model in CATALOG or not directory.is_dir():
        return geometry(model)
    path = directory / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{str(directory)!r} has no config.json; give a model directory or a name of the catalogue") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable as JSON ({error}); fetch it again") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(fields).__name__}; fetch it again")
    return from_hf_fields(fields, str(path))


def write_accelerator(path: Path, measured: Accelerator, notes: dict[str, object]) -> None:
    """`notes`: how it was measured; kept under "measured", which readers pass over."""
    path.write_text(json.dumps({**dataclasses.asdict(measured), "measured": notes}, indent=1) + "\n")

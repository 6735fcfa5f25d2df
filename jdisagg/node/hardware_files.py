"""Reads and writes accelerator descriptions, from which the router predicts times.

The configuration field `hardware` is the name of a known accelerator (costs/hardware.py), or the
path of a JSON file that `jdisagg measure_costs` wrote."""

import dataclasses
import json
from pathlib import Path

from jdisagg.costs.hardware import HARDWARE, Accelerator, accelerator, accelerator_from_fields
from jdisagg.errors import ConfigError


def find_accelerator(name: str) -> Accelerator:
    """Raises ConfigError if there is no accelerator or .json file of this name, or the file is
    invalid."""
    if name in HARDWARE or not name.endswith(".json"):
        return accelerator(name)
    try:
        fields = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"hardware file {name} cannot be read ({error}); write one with jdisagg measure_costs"
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(
            f"hardware file {name} must hold a JSON object, got {type(fields).__name__}; write one"
            " with jdisagg measure_costs"
        )
    return accelerator_from_fields(fields, f"hardware file {name}")


def write_accelerator(path: Path, measured: Accelerator, notes: dict[str, object]) -> None:
    """`notes` about the measurement are stored under "measured", which readers ignore."""
    path.write_text(
        json.dumps({**dataclasses.asdict(measured), "measured": notes}, indent=1) + "\n"
    )

"""Assigns a host's TPU chips to child processes by environment variables of libtpu. Only one
process can use a chip. This module imports neither JAX nor libtpu."""

import importlib.util
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from jdisagg.errors import ConfigError
from jdisagg.layout.platforms import TPU_CHIPS, libtpu_variables
from jdisagg.node.gpus import may_use


def has_libtpu() -> bool:
    """Returns whether libtpu is installed. Device files alone do not show that a host has TPUs,
    because other devices have files with the same names."""
    return importlib.util.find_spec("libtpu") is not None


def chips_of_host(environment: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[int, ...]:
    """Returns an empty tuple if libtpu is not installed, or if JAX is configured for other
    platforms."""
    if not has_libtpu() or not may_use(environment, "tpu"):
        return ()
    if visible := environment.get(TPU_CHIPS):
        return tuple(int(part) for part in visible.split(",") if part.strip().isdigit())
    files = list(devices.glob("accel[0-9]*"))
    if not files and (devices / "vfio").is_dir():
        files = [path for path in (devices / "vfio").iterdir() if path.name.isdigit()]
    return tuple(range(len(files)))


def chip_environment(
    environment: Mapping[str, str], chips: Sequence[int | str], all_chips: Sequence[int | str]
) -> dict[str, str]:
    """Returns `environment` with the variables that give one process its TPU chips. Raises
    ConfigError if libtpu does not support such a division of a host's chips, or a chip is given to
    two processes."""
    shared = [chip for chip, count in Counter(all_chips).items() if count > 1]
    if shared:
        raise ConfigError(
            f"--gpus: TPU chip {shared[0]} is given to two workers, and a chip belongs to one"
            " process; start fewer workers, or choose smaller layouts"
        )
    return {**environment, **libtpu_variables(chips)}

"""Finds and imports the folders `models`, `launch` and `configs`.

To avoid a static import of these folders, this package loads their modules by name. In a checkout
the three folders are at the top level. A wheel has them in `jdisagg/_app`, so that it installs no
packages with such general names."""

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jdisagg.errors import ConfigError


def folder() -> Path:
    package = Path(__file__).resolve().parent
    return package / "_app" if (package / "_app").is_dir() else package.parent


def load(name: str) -> Any:
    """Imports a module of the folders `models`, `launch` or `configs`, such as "launch.model".

    Appends the parent of these folders to the end of the module search path, so that a module of
    the caller is never hidden.

    Raises:
        ConfigError: The process finds another module with the name `models`, `launch` or `configs`
            first.
    """
    if str(folder()) not in sys.path:
        sys.path.append(str(folder()))
    for top in ("models", "launch", "configs"):
        spec = find_spec(top)
        if spec is None or spec.origin is None or folder() not in Path(spec.origin).parents:
            found = spec.origin or spec.submodule_search_locations if spec else None
            raise ConfigError(
                f"jdisagg needs its own module {top!r}, and {found} has that name; run from another"
                " folder, or rename it"
            )
    return importlib.import_module(name)

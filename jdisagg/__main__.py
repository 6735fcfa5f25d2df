"""`python -m jdisagg COMMAND`, and the command `jdisagg` of an installed wheel.

The application's folders `models`, `launch` and `configs` are top-level in a checkout. A wheel
holds them in `jdisagg/_app`, so that site-packages has no generic names. This module puts them on
the path of its process before it imports anything from them."""

import os
import runpy
import signal
import sys
from pathlib import Path


def application() -> Path:
    """Returns the folder that holds `models`, `launch` and `configs`."""
    package = Path(__file__).resolve().parent
    return package / "_app" if (package / "_app").is_dir() else package.parent


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # until the command installs its own
        signal.signal(number, lambda number, _: os._exit(128 + number))
    sys.path.insert(0, str(application()))
    runpy.run_module("launch", run_name="__main__")


if __name__ == "__main__":
    main()

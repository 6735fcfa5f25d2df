"""`python -m jdisagg COMMAND`, and the command `jdisagg` of an installed wheel.

The application's folders, `models`, `launch` and `configs`, are top-level in a checkout and lie in
`jdisagg/_app` in a wheel, so that site-packages holds no generic name. Here they are put on the
path of this process alone, before anything of theirs is imported."""

import os
import runpy
import signal
import sys
from pathlib import Path


def application() -> Path:
    """The folder that holds `models`, `launch` and `configs`."""
    package = Path(__file__).resolve().parent
    return package / "_app" if (package / "_app").is_dir() else package.parent


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # until the command itself takes them over
        signal.signal(number, lambda number, _: os._exit(128 + number))
    sys.path.insert(0, str(application()))
    runpy.run_module("launch", run_name="__main__")


if __name__ == "__main__":
    main()

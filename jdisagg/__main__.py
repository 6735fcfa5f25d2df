"""`python -m jdisagg COMMAND`, and the command `jdisagg` of an installed wheel. Puts the folder
that holds `models`, `launch` and `configs` first on the process's module search path
(`jdisagg/application.py`)."""

import os
import runpy
import signal
import sys

from jdisagg.application import folder


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # until the command installs its own handlers
        signal.signal(number, lambda number, _: os._exit(128 + number))
    sys.path.insert(0, str(folder()))
    runpy.run_module("launch", run_name="__main__")


if __name__ == "__main__":
    main()

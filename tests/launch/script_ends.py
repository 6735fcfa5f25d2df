"""How a launch script ends for several command lines, all of which it refuses before it begins: in one process, for most of each would be
the start of an interpreter.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import contextlib, importlib, io, json, os, sys
from absl import flags

script = importlib.import_module(sys.argv[1])
os._exit = sys.exit  # how launch.worker ends
ends = []
for given in json.loads(sys.argv[2]):
    for name in flags.FLAGS:
        flags.FLAGS[name].unparse()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = script.main(flags.FLAGS([sys.argv[1], *given]))
        except SystemExit as end:
            status = end.code
        except flags.Error as error:  # as absl.app says it, and ends
            status = f"FATAL Flags parsing error: {error}"
    if isinstance(status, str):
        err.write(status + chr(10))
        status = 1
    ends.append((status or 0, out.getvalue(), err.getvalue()))
print(json.dumps(ends))
"""


class End(NamedTuple):
    status: int
    out: str
    err: str


def ends(module: str, *command_lines: tuple[str, ...]) -> list[End]:
    """Of `python -m launch.MODULE` with the flags of each, in turn."""
    command = [sys.executable, "-c", RUN, f"launch.{module}", json.dumps(command_lines)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [End(*end) for end in json.loads(done.stdout.splitlines()[-1])]

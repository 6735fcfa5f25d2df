"""How a launch page ends for several command lines, all of which it refuses before it begins: in
one process, for most of each would be the start of an interpreter."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests import time_scale

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import contextlib, importlib, io, json, os, sys
from launch import console

page = importlib.import_module(sys.argv[1])
os._exit = sys.exit  # how launch.worker ends
ends = []
for given in json.loads(sys.argv[2]):
    for name in page.flags.names:
        page.flags.values[name].unparse()
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, [sys.argv[1], *given]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            console.run(page.main, page.flags, refused=getattr(page, "REFUSED", 1))
        except SystemExit as end:
            status = end.code
    sys.argv = argv
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


def ends(module: str, *command_lines: tuple[str, ...], package: str = "launch") -> list[End]:
    """Of `python -m PACKAGE.MODULE` with the flags of each, in turn."""
    command = [sys.executable, "-c", RUN, f"{package}.{module}", json.dumps(command_lines)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=time_scale.seconds(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [End(*end) for end in json.loads(done.stdout.splitlines()[-1])]

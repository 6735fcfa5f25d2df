"""How a launch page ends for several command lines, all of which it refuses before it begins: in
one process, for most of each would be the start of an interpreter."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
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


def ended(*arguments: str) -> End:
    """Of a Python process of its own in the root of the tree."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=time_scale.seconds(120),
        check=False,
    )
    return End(done.returncode, done.stdout, done.stderr)


def ends(
    module: str, *command_lines: tuple[str, ...], package: str = "launch", before: str = ""
) -> list[End]:
    """Of `python -m PACKAGE.MODULE` with the flags of each, in turn, after the program `before`."""
    done = ended("-c", before + RUN, f"{package}.{module}", json.dumps(command_lines))
    assert done.status == 0, done.err
    return [End(*end) for end in json.loads(done.out.splitlines()[-1])]


def not_refused(
    module: str,
    rows: Iterable[tuple[tuple[str, ...], str]],
    status: int | Callable[[str], int] = 1,
    package: str = "launch",
) -> list[str]:
    """The command lines that do not end at once, with this status, with nothing on stdout and with
    one line on stderr that says the words beside them. A test asserts that there are none."""
    rows = list(rows)
    found = []
    for (flags, said), end in zip(
        rows, ends(module, *(flags for flags, _ in rows), package=package), strict=True
    ):
        wanted = status if isinstance(status, int) else status(said)
        one_line = end.err.startswith("error: ") and end.err.count("\n") == 1
        if (end.status, end.out) != (wanted, "") or not one_line or said not in end.err:
            found.append(f"{' '.join(flags)}: {said!r} is not what ended it: {end}")
    return found

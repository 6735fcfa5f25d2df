"""What a start of `jdisagg serve` spends when all its programs are in the folder of compiled
programs: found without tracing, and traced and found by their text.

    python -m benchmarks.restarts [--rounds=3] [--model=shipped|measured] [-- FLAGS OF SERVE]

Each start is a process of its own; the two kinds alternate. For "traced", the entries of the store
(`executor/program_store.py`) are removed before the start, which writes them again. Shown are the
seconds until the server accepts requests, the seconds until all programs are loaded, and the
processor seconds up to then. Writes results/restarts_<model>.json."""

import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from absl import app, flags

from benchmarks import measure
from benchmarks.clusters import processor_seconds_of
from benchmarks.peers.checkpoint import measured_checkpoint
from jdisagg.executor.program_store import SUFFIX

_ROUNDS = flags.DEFINE_integer("rounds", 3, "Starts of each kind.")
_MODEL = flags.DEFINE_enum("model", "shipped", ["shipped", "measured"], "Model to serve.")

LOADED = re.compile(r"all programs are loaded|could not be loaded")
PROGRAMS = re.compile(r"(\d+) programs, (\d+) of them found")


class Start(NamedTuple):
    """Seconds until requests are accepted, seconds until all programs are loaded, processor seconds
    up to then, number of programs, and number of those found without tracing."""

    accepts: float
    loaded: float
    processor: float
    programs: int
    found: int


def start(folder: str, arguments: list[str]) -> Start:
    """Starts a server, waits until its programs are loaded, and ends it."""
    command = [sys.executable, "-u", "-m", "launch.serve", "--port=0", "--http_port=-1"]
    began = time.monotonic()
    with subprocess.Popen(
        [*command, f"--compilation_cache={folder}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        accepts = 0.0
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith("jdisagg serves"):
                    accepts = time.monotonic() - began
                if LOADED.search(line):
                    loaded, counts = time.monotonic() - began, PROGRAMS.search(line)
                    if counts is None:
                        raise SystemExit(f"the server says: {line}")
                    spent = processor_seconds_of(child.pid)
                    return Start(accepts, loaded, spent, int(counts[1]), int(counts[2]))
        finally:
            child.terminate()
    raise SystemExit("the server ended before its programs were loaded")


def main(argv: list[str]) -> None:
    arguments = argv[1:]
    if _MODEL.value == "measured":
        arguments.append(f"--model={measured_checkpoint()}")
    starts: dict[str, list[Start]] = {"found": [], "traced": []}
    with TemporaryDirectory() as folder:
        cold = start(folder, arguments)
        print(f"empty folder: {cold}", flush=True)
        for _ in range(_ROUNDS.value):
            for kind in starts:
                if kind == "traced":
                    for path in Path(folder).glob(f"*{SUFFIX}*"):
                        path.unlink()
                one = start(folder, arguments)
                assert one.found == (one.programs if kind == "found" else 0), one
                starts[kind].append(one)
                print(f"{kind}: {one}", flush=True)
    figures: dict[str, object] = {"model": _MODEL.value, "flags": argv[1:], "cold": cold._asdict()}
    for name in ("accepts", "loaded", "processor"):
        found, traced = ([getattr(one, name) for one in starts[kind]] for kind in starts)
        figures[name] = measure.paired(found, traced)
    print(measure.save(f"restarts_{_MODEL.value}", figures))


if __name__ == "__main__":
    app.run(main)

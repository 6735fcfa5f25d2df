"""Measures the programs and the service on a GPU or a TPU, in parts of a few minutes.

    python -m benchmarks.device_day PART --out=DIR [--small] [--minutes=8]

Parts, in the order of what they unblock: serve (over gRPC: start, streams, cache hit, restart, and
split on one device; on TPUs, rows that share a chip are skipped: a chip belongs to one process),
decode and prefill (the executor's own programs), handoff (KV between two processes on one device),
kernels (each op against the same op in float32), probe (machine, measured ceilings, kinds of shared
memory that the driver supports), tests (tests that need one device). `all` runs each part in a
separate process; with the parts' own limits it takes 15 minutes. DIR/PART.json is written after
each row. A row that fails is stored with its error. No row starts after the part's minutes are
over. A table is printed at the end. Compiled programs are kept in DIR/xla, or in --programs.

--small runs the same rows on the CPU with small sizes, so that a test finds code that no longer
works. Its figures have no meaning."""

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

MINUTES = {  # after which no row of a part is begun
    "serve": 5.0,
    "decode": 2.0,
    "prefill": 1.5,
    "handoff": 1.5,
    "kernels": 2.0,
    "probe": 1.0,
    "tests": 2.0,
}
PARTS = tuple(MINUTES)


def main() -> int:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=(*PARTS, "all"))
    parser.add_argument("--out", type=Path, required=True, help="Folder of the results.")
    parser.add_argument("--small", action="store_true", help="On the CPU, in small sizes.")
    parser.add_argument(
        "--minutes", type=float, help="After which no row is begun; without: the part's own."
    )
    parser.add_argument("--programs", help="Folder of compiled programs; without: DIR/xla.")
    parser.add_argument("--only", default="", help="Regular expression of the rows to run.")
    given = parser.parse_args()
    if given.part == "all":
        return max(_alone(part, sys.argv[1:]) for part in PARTS)
    programs = given.programs or str(given.out / "xla")
    minutes = MINUTES[given.part] if given.minutes is None else given.minutes
    limits = (60 * minutes, given.only)
    return _run(given.part, given.out, given.small, *limits, programs)


def _alone(part: str, arguments: list[str]) -> int:
    """Runs one part in a separate process, because each part needs the device's memory."""
    rest = [part if word == "all" else word for word in arguments]
    print(f"== {part}", flush=True)
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.device_day", *rest], check=False
    ).returncode


def _run(part: str, out: Path, small: bool, seconds: float, only: str, programs: str) -> int:
    if small:
        os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported, for children too
    from benchmarks.device_day.day import Day, table
    from jdisagg.executor.program_cache import use_compilation_cache

    use_compilation_cache(programs)
    day = Day(part, out, small, seconds, only)
    module = importlib.import_module(f"benchmarks.device_day.{part}")
    if part not in ("handoff", "tests", "serve"):  # their children need the device whole
        from benchmarks.measure import machine

        day.write(machine())
    module.run(day)
    print(table(day.rows))
    return int(any("error" in row for row in day.rows))


if __name__ == "__main__":
    sys.exit(main())

"""How do our programs run on a GPU or a TPU? All measurements, in parts of a few minutes.

    python -m benchmarks.device_day PART --out=DIR [--small] [--minutes=8]

Parts, in the order of what they tell: probe (the machine, its ceilings, what its driver can share),
kernels (each op against the same in float32), decode and prefill (our executor's own programs),
handoff (KV between two processes on one device), tests (those that need one device), serve (over
gRPC, unified and split on one device; a TPU chip belongs to one process, and the rows that share
one are skipped there); `all` is each of them, in a process of its own. DIR/PART.json is
written after every row; a row that fails is a row with its error, and nothing is begun once the
part's minutes are over. A table comes last. Compiled programs are kept in DIR/xla, or --programs.

--small runs the same rows on the CPU, in sizes for it: what can rot without a GPU does so in a
test. Its figures mean nothing."""

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

PARTS = ("probe", "kernels", "decode", "prefill", "handoff", "tests", "serve")


def main() -> int:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=(*PARTS, "all"))
    parser.add_argument("--out", type=Path, required=True, help="Folder of the results.")
    parser.add_argument("--small", action="store_true", help="On the CPU, in small sizes.")
    parser.add_argument("--minutes", type=float, default=8.0, help="After which no row is begun.")
    parser.add_argument("--programs", help="Folder of compiled programs; without: DIR/xla.")
    given = parser.parse_args()
    if given.part == "all":
        return max(_alone(part, sys.argv[1:]) for part in PARTS)
    programs = given.programs or str(given.out / "xla")
    return _run(given.part, given.out, given.small, 60 * given.minutes, programs)


def _alone(part: str, arguments: list[str]) -> int:
    """Runs one part in a separate process, because each part needs the device's memory."""
    rest = [part if word == "all" else word for word in arguments]
    print(f"== {part}", flush=True)
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.device_day", *rest], check=False
    ).returncode


def _run(part: str, out: Path, small: bool, seconds: float, programs: str) -> int:
    """Runs a part. Returns 0 if no row failed."""
    if small:
        os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported, for children too
    from benchmarks.device_day.day import Day, table
    from jdisagg.engine.compilation import use_compilation_cache

    use_compilation_cache(programs)
    day = Day(part, out, small, seconds)
    module = importlib.import_module(f"benchmarks.device_day.{part}")
    if part not in ("handoff", "tests", "serve"):  # their children need the device whole
        from benchmarks.measure import machine

        day.write(machine())
    module.run(day)
    print(table(day.rows))
    return int(any("error" in row for row in day.rows))


if __name__ == "__main__":
    sys.exit(main())

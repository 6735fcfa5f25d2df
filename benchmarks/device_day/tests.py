"""Runs the tests that need one device: `pytest -m one_device`."""

import os
import re
import sys

from benchmarks.device_day.day import Day, Figures, run_whole

WORKERS = 14  # with 5 % of the memory each
# small: enough to show that the marker selects and the summary is read
SMALL = ("tests/ops/test_rope.py", "tests/ops/test_kv_pages.py")


def run(day: Day) -> None:
    day.row("one_device", lambda: tests(day))


def tests(day: Day) -> Figures:
    where = SMALL if day.small else ()
    several = () if day.small or day.tpu else ("-n", str(WORKERS), "--dist", "loadfile")
    options = "-m one_device -p no:cacheprovider -p no:benchmark"
    command = (sys.executable, "-m", "pytest", *options.split())
    environment = dict(os.environ)
    if not day.small:
        environment |= {
            "JAX_PLATFORMS": "tpu,cpu" if day.tpu else "cuda,cpu",
            "JAX_DEFAULT_MATMUL_PRECISION": "highest",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": ".05",
        }
    log = day.out / "tests.log"
    code = run_whole((*command, *several, *where), environment, day.left, log)
    lines = log.read_text().splitlines()
    counted = {
        kind: int(number)
        for number, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)", lines[-1])
    }
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if code:
        raise RuntimeError(f"pytest ended with {code}: {lines[-1]}; {failed[:20]}")
    return counted

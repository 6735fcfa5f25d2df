"""Runs the tests that need one device: `pytest -m one_device`."""

import os
import re
import subprocess
import sys

from benchmarks.device_day.day import Day, Figures

WORKERS = 8
# small: enough to show that the marker selects and the summary is read
SMALL = ("tests/ops/test_rope.py", "tests/ops/test_kv_pages.py")


def run(day: Day) -> None:
    day.row("one_device", lambda: tests(day))


def tests(day: Day) -> Figures:
    where = SMALL if day.small else ()
    several = () if day.small or day.tpu else ("-n", str(WORKERS), "--dist", "loadfile")
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "one_device",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
    )
    environment = dict(os.environ)
    if not day.small:
        environment |= {
            "JAX_PLATFORMS": "tpu,cpu" if day.tpu else "cuda,cpu",
            "JAX_DEFAULT_MATMUL_PRECISION": "highest",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": ".05",
        }
    log = day.out / "tests.log"
    with log.open("w") as output:
        code = subprocess.run(
            (*command, *several, *where), env=environment, stdout=output, stderr=output,
            timeout=max(1.0, day.left),
        ).returncode  # fmt: skip
    lines = log.read_text().splitlines()
    counted = {
        kind: int(number)
        for number, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)", lines[-1])
    }
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if code:
        raise RuntimeError(f"pytest ended with {code}: {lines[-1]}; {failed[:20]}")
    return counted

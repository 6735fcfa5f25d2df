"""The end of `jdisagg serve` when one of its meshes breaks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jdisagg.client import Client
from jdisagg.errors import UnavailableError
from jdisagg.supervisor.supervisor import EXIT_BROKEN
from tests import time_scale
from tests.programs import PROGRAMS

pytestmark = pytest.mark.ci

ROOT = Path(__file__).resolve().parents[2]
# Without warm-up the first prompt waits for compilation, which takes longer than a
# millisecond.
STALLS = (
    "--set=warm_up=False",
    "--set=limits.step_seconds=0.001",
    "--set=mode=unified",
    "--set=decode.layout=dp=1,tp=1",
)


def test_a_server_whose_mesh_broke_tells_its_clients_and_ends_so_that_it_is_started_again() -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "launch.serve",
            "--port=0",
            "--http_port=-1",
            *STALLS,
            f"--set=compilation_cache={PROGRAMS}",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        ready = re.search(r" on (127\.0\.0\.1:\d+)$", line)
        assert ready, line + process.stderr.read()
        with Client(ready[1], resume_seconds=0.0) as client, pytest.raises(UnavailableError):
            client.complete("Once upon a time", max_tokens=5)
        _, err = process.communicate(timeout=time_scale.seconds(60))
    finally:
        process.kill()
    assert process.returncode == EXIT_BROKEN, err
    last = err.splitlines()[-1]
    assert last.startswith("error: the mesh's program failed: ") and last.endswith(
        "restart the worker"
    ), err

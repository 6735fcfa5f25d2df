"""The router, the supervisor of a cluster and what computes or asks from outside are light
processes: they never load JAX."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import time_scale

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "module",
    [
        "launch.router",
        "launch.cluster",
        "launch.ask",
        "launch.replay_trace",
        "launch.plan",
        "launch.kv_calculator",
    ],
)
def test_a_script_without_a_mesh_does_not_load_jax(module: str):
    program = (
        f"import sys, {module}; print([name for name in ('jax', 'jaxlib', 'flax', 'orbax') if name"
        " in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=time_scale.seconds(60),
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr

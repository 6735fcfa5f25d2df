"""What XLA makes of our programs for an H200, without one: needs the CUDA plugin and a target
config, else skipped.

`JDISAGG_GPU_TARGET_CONFIG` names a file with the GPU's target config (BUILD.md says where it comes
from). Compiling shows in-place updates, copies and CUDA graphs; it shows neither speed nor numbers,
nor whether cuDNN has a plan."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from collections import Counter

import pytest

TARGET_CONFIG = os.environ.get("JDISAGG_GPU_TARGET_CONFIG", "")
PLUGIN = any(importlib.util.find_spec(name) for name in ("jax_cuda13_plugin", "jax_cuda12_plugin"))

pytestmark = pytest.mark.skipif(
    not (PLUGIN and os.path.exists(TARGET_CONFIG)),
    reason="needs the CUDA plugin and JDISAGG_GPU_TARGET_CONFIG",
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, int], Counter[str]]:
    """Sizes that the script printed, and how often each kind of thunk occurs in the decode step."""
    dump = tmp_path_factory.mktemp("dump")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": "",
    }
    command = [sys.executable, "-m", "tests.gpu.decode_step", TARGET_CONFIG, str(dump)]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, cwd=root, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    sequences = sorted(dump.glob("*jit_decode*thunk_sequence_after_thunk_passes.txt"))
    assert sequences, sorted(path.name for path in dump.iterdir())
    kinds = Counter(re.findall(r"^\s*\d+: (k\w+)", sequences[-1].read_text(), re.MULTILINE))
    return json.loads(done.stdout.splitlines()[-1]), kinds


def test_the_decode_step_updates_its_pages_in_place(
    compiled: tuple[dict[str, int], Counter[str]],
) -> None:
    sizes, _ = compiled
    assert sizes["alias_bytes"] >= sizes["pool_bytes"]
    assert sizes["temp_bytes"] < 300e6


def test_the_decode_step_is_one_cuda_graph_without_copies_or_host_loops(
    compiled: tuple[dict[str, int], Counter[str]],
) -> None:
    _, kinds = compiled
    assert kinds["kCommandBuffer"] == 1, kinds
    assert not {kind for kind in kinds if kind in ("kCopy", "kWhile") or "Copy" in kind}, kinds


def test_prefill_of_one_sequence_with_a_past_takes_two_cudnn_calls(
    compiled: tuple[dict[str, int], Counter[str]],
) -> None:
    sizes, _ = compiled
    assert sizes["prefill_cudnn_calls"] == 2

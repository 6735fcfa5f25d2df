"""Measuring this machine: real programs, a file that the other scripts read; and bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jdisagg.errors import CheckpointError, ConfigError
from jdisagg.node.hardware_files import find_accelerator
from launch.cost_inputs import find_geometry
from tests import time_scale
from tests.launch.script_ends import ends

ROOT = Path(__file__).resolve().parents[2]


def run(*flags: str) -> "tuple[int, str, str]":
    command = [sys.executable, "-m", "launch.measure_costs", *flags]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=time_scale.seconds(240)
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.ci
def test_this_machine_is_measured_into_a_file_that_others_read(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    status, out, err = run(
        f"--output={path}",
        "--name=here",
        "--rounds=1",
        "--steps=6",
        "--prompts=64,128",
        "--batches=1,2",
    )
    assert status == 0, err
    assert out == f"{path}\n"
    assert "held out" in err
    measured = find_accelerator(str(path))
    assert measured.name == "here"
    assert measured.peak_flops > 1e9 and measured.memory_bytes_per_second > 1e7
    assert len(json.loads(path.read_text())["measured"]["steps"]) == 2 + 2 * 2


@pytest.mark.ci
def test_bad_input_is_one_line_that_names_it_before_anything_is_measured() -> None:
    refused = (
        (
            ("--prompts=4992",),
            "--prompts: 4992 tokens and 32 steps exceed the model's context of 1024",
        ),
        (("--prompts=17",), "--prompts must be multiples of 16, got 17; take 32"),
        (("--batches=two",), "--batches must be whole numbers, got 'two'"),
        (
            ("--output=/nowhere/at/all.json",),
            "--output=/nowhere/at/all.json: its folder does not exist",
        ),
        (("--memory_gigabytes=-1",), "--memory_gigabytes must be positive, got -1; omit it"),
        (("--memory_gigabytes=0",), "--memory_gigabytes must be positive, got 0"),
    )
    *ended, devices = ends("measure_costs", *(flags for flags, _ in refused), ("--devices=0",))
    for end, (_, message) in zip(ended, refused, strict=True):
        assert (end.status, end.out) == (1, "")
        assert end.err.startswith(f"error: {message}") and end.err.count("\n") == 1, end.err
    assert devices.status == 2 and "--devices=0: 0 is not a positive integer" in devices.err


def test_files_nested_without_end_are_refused_as_what_cannot_be_read(tmp_path: Path) -> None:
    for name in ("hardware.json", "config.json"):
        (tmp_path / name).write_text("[" * 200_000)
    with pytest.raises(ConfigError, match="hardware.json cannot be read"):
        find_accelerator(str(tmp_path / "hardware.json"))
    with pytest.raises(CheckpointError, match="config.json is not valid JSON"):
        find_geometry(str(tmp_path))

"""Measuring this machine: real programs, a file that the other scripts read; and bad input."""

import json
from pathlib import Path

import pytest

from jdisagg.errors import CheckpointError, ConfigError
from jdisagg.node.hardware_files import find_accelerator
from launch.cost_inputs import find_geometry
from tests.launch.script_ends import ends, not_refused


@pytest.mark.ci
def test_this_machine_is_measured_into_a_file_that_others_read(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    flags = (f"--output={path}", "--name=here", "--rounds=1", "--steps=6")
    (done,) = ends("measure_costs", (*flags, "--prompts=64,128", "--batches=1,2"))
    assert (done.status, done.out) == (0, f"{path}\n"), done.err
    assert "held out" in done.err
    measured = find_accelerator(str(path))
    assert measured.name == "here"
    assert measured.peak_flops > 1e9 and measured.memory_bytes_per_second > 1e7
    assert len(json.loads(path.read_text())["measured"]["steps"]) == 2 + 2 * 2


@pytest.mark.ci
def test_bad_input_is_one_line_that_names_it_before_anything_is_measured() -> None:
    length = "--prompts: 4992 tokens and 32 steps exceed the model's context of 1024"
    folder = "--output=/nowhere/at/all.json: its folder does not exist"
    refused = (
        ("--prompts=4992", length),
        ("--prompts=17", "--prompts must be multiples of 16, got 17; take 32"),
        ("--batches=two", "--batches must be whole numbers, got 'two'"),
        ("--output=/nowhere/at/all.json", folder),
        ("--memory_gigabytes=-1", "--memory_gigabytes must be positive, got -1"),
        ("--memory_gigabytes=0", "--memory_gigabytes must be positive, got 0"),
        ("--devices=0", "--devices must be positive, got 0"),
    )
    rows = (((flag,), said) for flag, said in refused)
    assert not_refused("measure_costs", rows) == []


def test_files_nested_without_end_are_refused_as_what_cannot_be_read(tmp_path: Path) -> None:
    for name in ("hardware.json", "config.json"):
        (tmp_path / name).write_text("[" * 200_000)
    with pytest.raises(ConfigError, match="hardware.json cannot be read"):
        find_accelerator(str(tmp_path / "hardware.json"))
    with pytest.raises(CheckpointError, match="config.json is not valid JSON"):
        find_geometry(str(tmp_path))

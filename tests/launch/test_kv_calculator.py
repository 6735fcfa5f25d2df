"""The KV calculator as a user meets it: a table on stdout, or one line that says what is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch.shipped import SHIPPED_MODEL
from tests import time_scale

ROOT = Path(__file__).resolve().parents[2]


def run(*flags: str) -> "tuple[int, str, str]":
    command = [sys.executable, "-m", "launch.kv_calculator", *flags]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=time_scale.seconds(60)
    )
    return done.returncode, done.stdout, done.stderr


def test_a_prompt_of_a_known_model_is_priced_on_each_link() -> None:
    status, out, err = run(
        "--model=llama-3-70b",
        "--prompt_tokens=1000",
        "--tokens_per_second=10000",
        "--links=infiniband-ndr,pcie5",
    )
    assert (status, err) == (0, "")
    assert "327,680 bytes (2 x 80 layers x 8 KV heads x 128 x 2 bytes)" in out
    assert "3.28 GB/s" in out
    # 327.68 MB at 45 GB/s, and 3.2768 of 45 GB/s
    row = next(line for line in out.splitlines() if "infiniband-ndr" in line).split()
    assert row == ["infiniband-ndr", "50", "45", "7.29", "7.3", "%"]
    assert "pcie5" in out and "nvlink" not in out


def test_kv_that_is_kept_in_fp8_has_half_the_bytes() -> None:
    status, out, err = run("--model=llama-3-70b", "--kv_dtype=fp8", "--links=pcie5")
    assert (status, err) == (0, "")
    assert "163,840 bytes (2 x 80 layers x 8 KV heads x 128 x 1 bytes)" in out


def test_a_model_directory_does_as_well_as_a_name() -> None:
    status, out, err = run(f"--model={SHIPPED_MODEL}", "--dtype=float32", "--hardware=a100")
    assert (status, err) == (0, "")
    assert "2,048 bytes (2 x 4 layers x 4 KV heads x 16 x 4 bytes)" in out
    assert "on 1 a100" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model=nope",), "no model named 'nope'"),
        (
            ("--model=opt-13b", "--prompt_tokens=0"),
            "--prompt_tokens must be within 1 and the model's context of 2048, got 0",
        ),
        (("--model=opt-13b", "--prompt_tokens=4096"), "context of 2048, got 4096"),
        (("--model=opt-13b", "--links=string"), "no link named 'string'"),
        (("--model=opt-13b", "--kv_dtype=fp8", "--codec=int8"), "--kv_dtype=fp8 keeps them in one"),
        (("--model=opt-13b", "--codec=zip"), "--codec=zip: value should be one of"),
        (("--model=opt-13b", "--hardware=l40s", "--layout=tp=3"), "layout tp=3 does not divide"),
    ],
)
def test_bad_input_is_one_line_that_names_it(flags: tuple[str, ...], message: str) -> None:
    status, out, err = run(*flags)
    assert status == (2 if "codec=zip" in message else 1)
    assert out == ""
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("content", ["{", "[1]", json.dumps({"hidden_size": 8})])
def test_a_broken_config_is_refused_and_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    status, out, err = run(f"--model={tmp_path}")
    assert (status, out) == (1, "")
    assert "config.json" in err and "Traceback" not in err

"""launch.simulate as a user runs it: defaults that work, outputs in a folder, and errors that say
what to do."""

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import time_scale
from tests.lanes import first_quick


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launch.simulate", *arguments],
        capture_output=True,
        text=True,
        timeout=time_scale.seconds(120),
        check=False,
    )


def test_defaults_work_and_everything_lands_in_the_folder(tmp_path: Path) -> None:
    done = run(
        "--requests=40",
        "--rate=4",
        "--ttft=1",
        "--tpot=0.1",
        f"--out={tmp_path / 'run'}",
        f"--decision_log={tmp_path / 'log.jsonl'}",
    )
    assert done.returncode == 0, done.stderr
    assert (
        "goodput" in done.stdout
        and "disaggregated: prefill " in done.stdout.splitlines()[0]
        and "utilisation" in done.stdout
        and "dollars a million" in done.stdout
    )
    with open(tmp_path / "run" / "requests.csv") as table:
        rows = list(csv.DictReader(table))
    assert (
        len(rows) == 40
        and {row["end"] for row in rows} == {"finished"}
        and {row["prefill"] for row in rows} == {"prefill-0"}
    )
    figures = json.loads((tmp_path / "run" / "report.json").read_text())
    assert figures["report"]["requests"] == 40 and figures["flags"]["rate"] == 4.0
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 40
    assert {path.name for path in (tmp_path / "run").glob("*.png")} == {
        "ttft.png",
        "tbt.png",
        "timelines.png",
        "load.png",
    }


def test_a_trace_in_one_pool_with_a_fault_gives_the_same_twice(tmp_path: Path) -> None:
    trace = tmp_path / "own.csv"
    trace.write_text(
        "at_seconds,prompt_tokens,output_tokens\n"
        + "".join(f"{number / 2},{100 + 10 * number},20\n" for number in range(30))
    )
    flags = (
        f"--trace={trace}",
        "--mode=chunked",
        "--decode_workers=2",
        "--fault=death:mixed-0:5:3",
        "--plots=false",
    )
    first, second = (run(*flags, f"--out={tmp_path / name}") for name in ("one", "two"))
    assert first.returncode == second.returncode == 0, first.stderr
    assert (tmp_path / "one" / "requests.csv").read_bytes() == (
        tmp_path / "two" / "requests.csv"
    ).read_bytes()


@pytest.mark.parametrize(
    ("flags", "said"),
    first_quick(
        [
            (("--trace=/nowhere/trace.csv",), "/nowhere/trace.csv"),
            (("--model=llama-9",), "llama-9"),
            (("--prefill_hardware=abacus",), "abacus"),
            (("--prefill=tp=3",), "tp=3"),
            (("--prefill=tp=1",), "no room for KV"),
            (("--prefill_workers=0",), "at least 1"),
            (("--rate=-1",), "positive"),
            (("--prompt_tokens=0",), "at least 1"),
            (("--fault=flood:decode-0:1",), "the forms are"),
            (("--fault=death:decode-9:1",), "decode-9"),
            (("--fault=cancels:1:7",), "(0, 1], got 7"),
            (("--fault=cancels:1:nan",), "(0, 1], got nan"),
            (("--elastic", "--switch_seconds=-5"), "--switch_seconds must be 0 or more, got -5"),
            (("--set=limits.nonsense=1",), "nonsense"),
            (("--link=string",), "string"),
            (("--ttft=-1",), "positive"),
            (("--rate=0",), "--rate must be a positive number, got 0"),
            (("--chunk_tokens=0",), "chunk_tokens"),
            (
                ("--mode=chunked", "--prefill_workers=3"),
                "--prefill_workers=3 has no effect in mode chunked",
            ),
            (("--speed=2",), "--speed=2 needs --trace"),
            (("--think_seconds=2",), "--think_seconds=2.0 needs --turns"),
            (("--turns=0.5",), "1 turn or more"),
            (("--spread_tick_seconds=3",), "--spread_tick_seconds=3 needs --trace"),
            (("--concurrency=2", "--rate=3"), "--rate=3.0 and --concurrency=2 both determine"),
        ],
        quick=7,
    ),
)
def test_what_cannot_be_is_refused_in_a_line(flags: tuple[str, ...], said: str) -> None:
    done = run(*flags, "--requests=3")
    assert done.returncode == 1
    assert (
        said in done.stderr and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    )


@pytest.mark.ci
def test_what_was_found_of_prompts_that_begin_alike_is_told(tmp_path: Path) -> None:
    trace = tmp_path / "turns.jsonl"
    row = '{{"timestamp": {}, "input_length": 1024, "output_length": 4, "hash_ids": [1, 2]}}'
    trace.write_text("\n".join(row.format(9000 * number) for number in range(5)))
    done = run(f"--trace={trace}", "--prefix_cache", "--host_cache_gib=1")
    assert done.returncode == 0, done.stderr
    # four of five prompts, but for the last block, one token of which is computed
    assert "prefix cache: not computed 70.0% of 5120 tokens; not transferred 80.0%" in done.stdout
    done = run("--turns=4", "--requests=40", "--prefix_cache", "--think_seconds=60")
    assert done.returncode == 0, done.stderr
    assert "prefix cache: not computed" in done.stdout and " 0.0%" not in done.stdout


def test_why_requests_did_not_finish_is_told() -> None:
    done = run("--requests=3", "--prompt_tokens=1000000")
    assert done.returncode == 0 and "3 failed" in done.stdout
    assert done.stderr.startswith("3 x failed: ") and "shorten" in done.stderr


@pytest.mark.parametrize(
    ("script", "needed"),
    [
        ("launch.simulate", ()),
        ("launch.plan", ("--model=opt-13b",)),
        ("launch.replay_trace", ("--trace=t.csv",)),
    ],
)
def test_a_negative_seed_is_refused_by_its_flag(script: str, needed: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", script, "--seed=-1", *needed],
        capture_output=True,
        text=True,
        timeout=time_scale.seconds(120),
        check=False,
    )
    assert done.returncode == 2 and "--seed=-1" in done.stderr and "Traceback" not in done.stderr


def test_an_interrupted_run_ends_at_once_without_a_word(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    program = """
import signal
from launch import console, simulate
console.run(simulate.main, simulate.flags)
"""
    command = [
        sys.executable,
        "-c",
        program,
        "--requests=100000",
        "--rate=5",
        f"--decision_log={log}",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None and not (log.exists() and log.stat().st_size):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=time_scale.seconds(60))
    assert (process.returncode, out, err) == (130, "", "")


BARE = """
import sys
sys.modules["matplotlib"] = sys.modules["pyarrow"] = None
from launch import console, simulate
console.run(simulate.main, simulate.flags)
"""


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("", "no plots"),
        ("--plots", "error: --plots needs matplotlib"),
        ("--format=parquet", "parquet needs pyarrow"),
    ],
)
def test_without_what_pictures_and_parquet_need_it_is_said_before_the_run_and_the_rest_is_written(
    tmp_path: Path, flag: str, said: str
) -> None:
    command = [
        sys.executable,
        "-c",
        BARE,
        "--requests=3",
        f"--out={tmp_path}",
        *filter(None, [flag]),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=time_scale.seconds(120), check=False
    )
    assert said in done.stderr and done.returncode == (1 if flag else 0), done.stderr
    assert {path.name for path in tmp_path.iterdir()} == (
        set() if flag else {"report.json", "requests.csv"}
    )


def test_traces_with_holes_are_refused(tmp_path: Path) -> None:
    for text, said in (
        ("at_seconds,prompt_tokens\n0,5\n", "output"),
        ("at_seconds,prompt_tokens,output_tokens\n0,-5,3\n", "-5"),
        ("at_seconds,prompt_tokens,output_tokens\n", "no requests"),
    ):
        (tmp_path / "bad.csv").write_text(text)
        done = run(f"--trace={tmp_path / 'bad.csv'}")
        assert done.returncode == 1 and said in done.stderr, done.stderr

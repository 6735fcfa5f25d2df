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
from tests.launch.script_ends import ends, not_refused


def test_defaults_work_everything_is_written_and_failures_are_told(tmp_path: Path) -> None:
    done, failed = ends(
        "simulate",
        (
            *("--requests=40", "--rate=4", "--ttft=1", "--tpot=0.1"),
            *(f"--out={tmp_path / 'run'}", f"--decision_log={tmp_path / 'log.jsonl'}"),
        ),
        ("--requests=3", "--prompt_tokens=1000000"),
    )
    assert failed.status == 0 and "3 failed" in failed.out
    assert failed.err.startswith("3 x failed: ") and "shorten" in failed.err
    assert done.status == 0, done.err
    assert "disaggregated: prefill " in done.out.splitlines()[0]
    for words in ("goodput", "utilisation", "dollars a million"):
        assert words in done.out
    with open(tmp_path / "run" / "requests.csv") as table:
        rows = list(csv.DictReader(table))
    assert len(rows) == 40 and {row["end"] for row in rows} == {"finished"}
    assert {row["prefill"] for row in rows} == {"prefill-0"}
    figures = json.loads((tmp_path / "run" / "report.json").read_text())
    assert figures["report"]["requests"] == 40 and figures["flags"]["rate"] == 4.0
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 40
    plots = {path.stem for path in (tmp_path / "run").glob("*.png")}
    assert plots == {"ttft", "tbt", "timelines", "load"}


def test_a_trace_in_one_pool_with_a_fault_gives_the_same_twice(tmp_path: Path) -> None:
    trace = tmp_path / "own.csv"
    trace.write_text(
        "at_seconds,prompt_tokens,output_tokens\n"
        + "".join(f"{number / 2},{100 + 10 * number},20\n" for number in range(30))
    )
    flags = (f"--trace={trace}", "--mode=chunked", "--decode_workers=2", "--plots=false")
    flags += ("--fault=death:mixed-0:5:3",)
    folders = (tmp_path / "one", tmp_path / "two")
    assert [end.status for end in ends("simulate", *((*flags, f"--out={o}") for o in folders))] == [
        0,
        0,
    ]
    one, two = ((folder / "requests.csv").read_bytes() for folder in folders)
    assert one == two


REFUSED = [
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
    (("--elastic", "--switch_seconds=-5"), "--switch_seconds must not be negative, got -5"),
    (("--set=limits.nonsense=1",), "nonsense"),
    (("--link=string",), "string"),
    (("--ttft=-1",), "positive"),
    (("--rate=0",), "--rate must be positive, got 0"),
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
]


def test_what_cannot_be_is_refused_in_a_line(tmp_path: Path) -> None:
    rows = list(REFUSED)
    for name, text, said in (
        ("columns", "at_seconds,prompt_tokens\n0,5\n", "output"),
        ("negative", "at_seconds,prompt_tokens,output_tokens\n0,-5,3\n", "-5"),
        ("none", "at_seconds,prompt_tokens,output_tokens\n", "no requests"),
    ):
        path = tmp_path / f"{name}.csv"
        path.write_text(text)
        rows.append(((f"--trace={path}",), said))
    given = ((("--requests=3", *flags), said) for flags, said in rows)
    assert not_refused("simulate", given) == []


@pytest.mark.ci
def test_what_was_found_of_prompts_that_begin_alike_is_told(tmp_path: Path) -> None:
    trace = tmp_path / "turns.jsonl"
    row = '{{"timestamp": {}, "input_length": 1024, "output_length": 4, "hash_ids": [1, 2]}}'
    trace.write_text("\n".join(row.format(9000 * number) for number in range(5)))
    traced, drawn = ends(
        "simulate",
        (f"--trace={trace}", "--prefix_cache", "--host_cache_gib=1"),
        ("--turns=4", "--requests=40", "--prefix_cache", "--think_seconds=60"),
    )
    # the decode worker computes the last block of four prompts itself, and the others are cached
    told = "prefix cache: not computed 0.0% of 1024 tokens; not transferred 70.0% of 5120 tokens"
    assert told in traced.out
    assert "prefix cache: not computed" in drawn.out and " 0.0%" not in drawn.out


def test_an_interrupted_run_ends_at_once_without_a_word(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    program = """
import signal
from launch import console, simulate
console.run(simulate.main, simulate.flags)
"""
    flags = ["--requests=100000", "--rate=5", f"--decision_log={log}"]
    command = [sys.executable, "-c", program, *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None and not (log.exists() and log.stat().st_size):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=time_scale.seconds(60))
    assert (process.returncode, out, err) == (130, "", "")


def test_without_what_pictures_and_parquet_need_it_is_said_before_the_run_and_the_rest_is_written(
    tmp_path: Path,
) -> None:
    cases = (
        ("", "no plots"),
        ("--plots", "error: --plots needs matplotlib"),
        ("--format=parquet", "parquet needs pyarrow"),
    )
    folders = [tmp_path / str(number) for number in range(len(cases))]
    found = ends(
        "simulate",
        *(
            ("--requests=3", f"--out={folder}", *filter(None, [flag]))
            for folder, (flag, _) in zip(folders, cases, strict=True)
        ),
        before="import sys\nsys.modules['matplotlib'] = sys.modules['pyarrow'] = None\n",
    )
    for folder, (flag, said), end in zip(folders, cases, found, strict=True):
        assert said in end.err and end.status == (1 if flag else 0), end
        written = {path.name for path in folder.iterdir()} if folder.exists() else set()
        assert written == (set() if flag else {"report.json", "requests.csv"})

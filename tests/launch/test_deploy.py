"""The files of deploy/ name commands, flags and folders that there are, and the Slurm script starts
a cluster: with stand-ins for `srun` and `scontrol`, which start real processes on this host."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jdisagg.client import Client
from jdisagg.errors import JdisaggError
from jdisagg.node.cluster_plan import free_ports
from tests import time_scale
from tests.end_to_end.clusters import LLAMA
from tests.end_to_end.test_cluster import PROMPT, oracle, wait_until
from tests.launch.script_ends import ROOT, ends
from tests.programs import CACHE_FLAG

DEPLOY = ROOT / "deploy"


def command_lines(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(command, names of its flags), wherever one is written: in a line, over several lines, or as
    a list of arguments. What a comment explains counts as well."""
    words = re.sub(r"[\[\]\",\\#]|^\s*- ", " ", text, flags=re.M).split()
    for at, word in enumerate(words):
        if word in ("router", "worker", "serve"):
            flags = []
            for following in words[at + 1 :]:
                if not following.startswith("--") and not following.startswith("$"):
                    break
                flags += re.findall(r"^--(\w+)", following)
            if flags:
                yield word, tuple(flags)


@pytest.mark.ci
def test_every_flag_of_every_command_there_is_one_of_its_page() -> None:
    found = {
        path.name: list(command_lines(path.read_text()))
        for path in sorted(DEPLOY.rglob("*"))
        if path.is_file() and path.suffix not in (".json", "")
    }
    found["Dockerfile"] = list(command_lines((DEPLOY / "Dockerfile").read_text()))
    assert {name for name, lines in found.items() if lines} >= {
        *("Dockerfile", "kubernetes.yaml", "slurm.sbatch"),
        *("jdisagg-router.service", "jdisagg-worker@.service"),
    }
    pages = {}
    for name in ("router", "worker", "serve"):
        (shown,) = ends(name, ("--help",))
        pages[name] = set(re.findall(r"^  --(?:\[no\])?(\w+)", shown.out, flags=re.M))
    for file, lines in found.items():
        for command, flags in lines:
            assert set(flags) <= pages[command], f"{file}: {set(flags) - pages[command]}"


def test_an_image_is_made_of_what_the_package_is_made_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = (DEPLOY / "Dockerfile").read_text()
    copied = {
        name
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M)
        for name in line.split()
    }
    assert all((ROOT / name).exists() for name in copied)
    folders = {name.split(".")[0] for name in project["tool"]["setuptools"]["packages"]}
    folders |= set(project["tool"]["setuptools"]["package-dir"].values())
    assert {folder.split("/")[0] for folder in folders} <= copied
    extras = set(project["project"]["optional-dependencies"])
    assert set(re.findall(r"EXTRAS=(\w+)", text)) <= extras


@pytest.mark.ci
def test_a_slurm_job_serves_and_drains_when_it_is_cancelled(tmp_path: Path) -> None:
    """Both nodes are this host."""
    stubs = {
        "scontrol": 'printf "127.0.0.1\\n127.0.0.1\\n"',
        "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
        "jdisagg": f'exec {sys.executable} -m launch "$@"',
    }
    for name, line in stubs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    ports = free_ports("127.0.0.1", 1)
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "MODEL": str(LLAMA),
        "PORT": str(ports[0]),
        "PREFILL_LAYOUT": "tp=2",
        "DECODE_LAYOUT": "dp=2",
        "TMPDIR": str(tmp_path),
        "ROUTER_FLAGS": "--drain_seconds=20",
        "WORKER_FLAGS": f"--chunk_tokens=64 --page_size=16 --slots_per_rank=4 --set=warm_up=False"
        f" --drain_seconds=20 {CACHE_FLAG}",
    }
    log = (tmp_path / "log").open("w")
    job = subprocess.Popen(
        [str(DEPLOY / "slurm.sbatch")], cwd=ROOT, env=environment, stdout=log, stderr=log
    )
    try:
        with Client(f"127.0.0.1:{ports[0]}") as client:

            def serves() -> bool:
                assert job.poll() is None, (tmp_path / "log").read_text()
                try:
                    return len(client.status()) == 2
                except JdisaggError:
                    return False

            wait_until(serves, "no cluster came up", time_scale.seconds(180.0))
            text, tokens = oracle(6)
            done = client.complete(PROMPT, max_tokens=6, temperature=0, ignore_eos=True)
            assert (done.text, list(done.choices[0].token_ids)) == (text, tokens)
        children = psutil.Process(job.pid).children(recursive=True)
        assert len(children) >= 3
        job.send_signal(signal.SIGTERM)
        assert job.wait(time_scale.seconds(60.0)) == 0
        assert not list(tmp_path.glob("jdisagg-token.*"))
        assert not any(child.is_running() for child in children)
    finally:
        for child in psutil.Process(job.pid).children(recursive=True) if job.poll() is None else ():
            child.kill()
        if job.poll() is None:
            job.kill()
        job.wait()
        log.close()

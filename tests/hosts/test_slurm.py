"""`deploy/slurm.sbatch` under a real Slurm: a controller and three nodes, each on a host of its own
(hosts.py). Skipped where Slurm is not installed:

    apt-get install slurmctld slurmd slurm-client munge
    python -m pytest -m slow tests/hosts/test_slurm.py
"""

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jdisagg.client import Client
from tests.end_to_end.clusters import LLAMA
from tests.hosts.hosts import ROOT, Hosts, hosts, missing
from tests.hosts.lab import PYTHON, START_SECONDS, WORKER_FLAGS, all_free, check_answers, wait_until

NODES = 3
PORT = 19300
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel")
ABSENT = [name for name in PROGRAMS if shutil.which(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing() or ABSENT), reason=missing() or f"no {ABSENT}"),
]


def configuration(made: Hosts, folder: Path) -> str:
    nodes = [
        f"NodeName={made.name(at)} NodeAddr={made.address(at)} CPUs=2" for at in range(1, NODES + 1)
    ]
    return "\n".join(
        [
            "ClusterName=lab",
            f"SlurmctldHost={made.name(1)}({made.address(1)})",
            "SlurmUser=root",
            f"AuthInfo=socket={folder}/munge.socket",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool-%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/slurmd-%n.pid",
            "ProctrackType=proctrack/pgid",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SlurmdParameters=config_overrides",
            "MpiDefault=none",
            "ReturnToService=2",
            *nodes,
            "PartitionName=all Nodes=ALL Default=YES State=UP",
            "",
        ]
    )


@contextmanager
def slurm(folder: Path) -> Iterator[tuple[Hosts, dict[str, str]]]:
    """Starts munge, the controller and the nodes. Yields the hosts, and the environment of Slurm's
    commands."""
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(64))
    for path in (key, folder):
        path.chmod(0o700)
    with hosts(NODES, folder) as made:
        conf = folder / "slurm.conf"
        conf.write_text(configuration(made, folder))
        # No plugin that uses control groups is on, and containers may lack them.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        environment = {**os.environ, "SLURM_CONF": str(conf)}
        with_conf = ["env", f"SLURM_CONF={conf}"]
        paths = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *paths]
        daemon = subprocess.Popen(munged)
        try:
            wait_until((folder / "munge.socket").exists, "munge", START_SECONDS)
            made.run(1, [*with_conf, "slurmctld", "-D"])
            for at in range(1, NODES + 1):
                made.run(at, [*with_conf, "slurmd", "-D"])

            def idle() -> bool:
                done = subprocess.run(
                    ["sinfo", "-h", "-o", "%T %D"], env=environment, capture_output=True, text=True
                )
                return done.stdout.split() == ["idle", str(NODES)]

            wait_until(idle, "the nodes are idle", START_SECONDS)
            yield made, environment
        finally:
            daemon.terminate()
            daemon.wait()


def test_the_batch_script_serves_until_it_is_cancelled(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "jdisagg"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {PYTHON} -m jdisagg "$@"\n')
    program.chmod(0o755)
    flags = " ".join(flag for flag in WORKER_FLAGS if not flag.startswith("--model="))
    with slurm(tmp_path) as (made, environment):
        exported = {
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "MODEL": str(LLAMA),
            "PORT": str(PORT),
            "PREFILL_LAYOUT": "tp=1",
            "DECODE_LAYOUT": "dp=1",
            "ROUTER_FLAGS": "--canary_seconds=0",
            "WORKER_FLAGS": f"{flags} --drain_seconds=10",
        }
        submitted = subprocess.run(
            ["sbatch", f"--nodes={NODES}", "--time=10", str(ROOT / "deploy" / "slurm.sbatch")],
            cwd=tmp_path,
            env={**environment, **exported},
            capture_output=True,
            text=True,
            check=True,
        )
        job = re.findall(r"Submitted batch job (\d+)", submitted.stdout)[0]
        logs = tmp_path / f"jdisagg-{job}"
        workers = ["prefill-0", "decode-1", "decode-2"]
        try:
            with Client(f"{made.address(1)}:{PORT}", connect_seconds=START_SECONDS) as client:
                wait_until(lambda: all_free(client, workers), "workers register", START_SECONDS)
                check_answers(client)
            assert not list(logs.glob("token.*")) or oct(
                next(logs.glob("token.*")).stat().st_mode
            ).endswith("600")
            subprocess.run(["scancel", job], env=environment, check=True)

            def ended() -> bool:
                listed = subprocess.run(
                    ["squeue", "-h", "-j", job], env=environment, capture_output=True, text=True
                )
                return not listed.stdout.strip()

            wait_until(ended, "the job ends", START_SECONDS)
            assert not list(logs.glob("token.*"))
        except BaseException:
            for path in [*logs.glob("*.log"), *tmp_path.glob("*.log")]:
                print(f"---- {path.name}\n{path.read_text()[-2000:]}")
            raise

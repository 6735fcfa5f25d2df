"""Instances of two real processes, under jax.distributed and gloo, compared with one process of the
same layout."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jdisagg.node.cluster_plan import free_ports
from tests import time_scale
from tests.instance.member import Task, build, script
from tests.lanes import first_ci
from tests.programs import PROGRAMS

pytestmark = pytest.mark.ci

ROOT = Path(__file__).resolve().parents[2]
LLAMA, MOE = (str(ROOT / "models" / "tiny" / name) for name in ("llama", "qwen3_moe"))
SECONDS = time_scale.seconds(300)
FLAGS = "--xla_backend_optimization_level=0"  # as in this process


def start(task: Task, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    command = [sys.executable, "-m", "tests.instance.member", json.dumps(dataclasses.asdict(task))]
    with log.open("wb") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )


@contextlib.contextmanager
def running(
    folder: Path, name: str, processes: int, task: Task
) -> Iterator[list[subprocess.Popen[bytes]]]:
    coordinator = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    job = {"processes": processes, "coordinator": coordinator, "devices": task.devices // processes}
    children = [
        start(dataclasses.replace(task, process=number, **job), folder / f"{name}-{number}.log")
        for number in range(processes)
    ]
    try:
        yield children
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait(10)


def complete(folder: Path, name: str, task: Task) -> dict[str, object]:
    """Runs a script over two processes to its end; each must leave cleanly."""
    with running(folder, name, 2, task) as children:
        for number, child in enumerate(children):
            assert child.wait(SECONDS) == 0, (folder / f"{name}-{number}.log").read_text()
    return json.loads(Path(task.result).read_text())


@pytest.mark.parametrize(
    ("model", "layout"),
    first_ci(
        [(LLAMA, "dp=2,tp=2"), (LLAMA, "pp=2,tp=2"), (MOE, "dp=2,tp=2,ep=4"), (MOE, "tp=4,ep=4")]
    ),
)
async def test_two_processes_give_the_tokens_of_one(
    tmp_path: Path, model: str, layout: str
) -> None:
    task = Task(model=model, layout=layout, result=str(tmp_path / "two.json"), cache=str(PROGRAMS))
    here = build(task)
    one = await script(here, task.steps)
    await asyncio.to_thread(here.close)
    two = complete(tmp_path, "two", task)
    assert two["first"] == one["first"] and two["tokens"] == json.loads(json.dumps(one["tokens"]))
    assert two["through_host"] == one["through_host"] and all(one["through_host"])  # type: ignore[call-overload]
    assert one["logprobs"], "the sampled row asks for them"
    assert two["logprobs"] == pytest.approx(one["logprobs"], abs=1e-4)


@contextlib.contextmanager
def under_way(folder: Path) -> Iterator[tuple[Path, list[subprocess.Popen[bytes]]]]:
    """Two processes that decode until the instance fails. Yields where it says so."""
    path = folder / "result.json"
    task = Task(
        model=LLAMA, layout="tp=2", devices=2, steps=0, result=str(path), cache=str(PROGRAMS)
    )
    with running(folder, "hurt", 2, task) as children:
        wait_for(path, "ready", folder)
        yield path, children


@pytest.mark.parametrize(("number",), first_ci([(signal.SIGKILL,), (signal.SIGSTOP,)]))
def test_a_follower_that_dies_or_stops_fails_the_instance(
    tmp_path: Path, number: signal.Signals
) -> None:
    with under_way(tmp_path) as (path, (leader, follower)):
        follower.send_signal(number)
        assert "process 1" in str(wait_for(path, "failure", tmp_path))
        assert leader.wait(10) == 1


@pytest.mark.slow
def test_followers_end_when_their_leader_dies(tmp_path: Path) -> None:
    with under_way(tmp_path) as (_, (leader, follower)):
        leader.kill()
        assert follower.wait(20) != 0


def wait_for(path: Path, key: str, logs: Path) -> object:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if key in (found := json.loads(path.read_text())):
                return found[key]
        time.sleep(0.02)
    raise AssertionError(
        f"no {key!r} in time: " + "\n".join(log.read_text() for log in logs.glob("*.log"))
    )

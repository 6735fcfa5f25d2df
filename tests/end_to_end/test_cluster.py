"""A cluster of real processes on one host: what it streams, what becomes of it when a process is
killed, and how it ends.

What it says is held against a dense forward pass made here. Programs are compiled once, into a
folder that all share."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jdisagg.client import Client
from jdisagg.errors import JdisaggError, UnavailableError
from jdisagg.request import FinishReason
from models.tokenizer import Tokenizer
from tests import time_scale
from tests.end_to_end.clusters import LLAMA, collect, dense_greedy
from tests.programs import CACHE_FLAG

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "Once upon a time"
SMALL = (
    "--chunk_tokens=64",
    "--page_size=16",
    "--slots_per_rank=4",
    "--set=warm_up=False",
    "--drain_seconds=20",
)
READY = r"jdisagg cluster serves on (127\.0\.0\.1:\d+)(.*): (.+)\n"
START_SECONDS = time_scale.seconds(120.0)
END_SECONDS = time_scale.seconds(60.0)


class RunningCluster:
    """The parent process, where its router listens, and its log. `urls`: Where its routers serve
    HTTP."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path, ready: "re.Match[str]") -> None:
        self.process, self.log, self.address = process, log, ready[1]
        self.urls, self.workers = re.findall(r"http://[\d.:]+\d", ready[2]), ready[3].split(", ")

    def pids(self) -> set[int]:
        """The parent's and all its descendants'."""
        with_children = psutil.Process(self.process.pid).children(recursive=True)
        return {self.process.pid, *(child.pid for child in with_children)}

    def worker(self, name: str) -> psutil.Process | None:
        """A worker, or process k of it as name.k. None while it does not run."""
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.Error):
                if any(text.endswith(f"/{name}.json") for text in child.cmdline()):
                    return child
        return None

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_SECONDS)


@contextmanager
def cluster(folder: Path, *flags: str) -> Iterator[RunningCluster]:
    """On leaving no process of it lives, whatever happened."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    log = folder / f"cluster-{time.monotonic_ns()}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.cluster", "--port=0", "--http_port=-1", *SMALL, CACHE_FLAG, *flags],  # noqa: E501
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,  # noqa: E501
        )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = re.fullmatch(READY, line)
        assert ready, f"no ready line but {line!r}: {log.read_text()}"
        yield RunningCluster(process, log, ready)
    except BaseException:
        print(log.read_text())  # pytest shows it
        raise
    finally:
        pids = (
            psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        )
        process.kill()
        process.communicate()
        psutil.wait_procs(pids, timeout=time_scale.seconds(10))
        assert not [pid for pid in pids if pid.is_running()], "children outlived their parent"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


def oracle(count: int) -> tuple[str, list[int]]:
    """Greedy text and tokens, EOS ignored."""
    tokenizer = Tokenizer.from_directory(LLAMA)
    ids = tokenizer.encode(PROMPT)
    tokens = dense_greedy(LLAMA, ids, count)
    return tokenizer.decode(ids + tokens)[len(tokenizer.decode(ids)) :], tokens


def wait_until(condition: Callable[[], bool], what: str, seconds: float = END_SECONDS) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def all_free(client: Client, workers: list[str]) -> bool:
    try:
        statuses = {status.name: status for status in client.status()}
    except JdisaggError:
        return False
    return set(workers) == set(statuses) and all(
        status.free_pages == status.total_pages and not status.running and not status.handoffs
        for status in statuses.values()
    )


def healthy(running: RunningCluster) -> bool:
    """What the standard health service says of the generation service."""
    with grpc.insecure_channel(running.address) as channel:
        request = health_pb2.HealthCheckRequest(service="jdisagg.v1.GenerationService")
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(request, timeout=time_scale.seconds(10))  # pyright: ignore[reportAttributeAccessIssue]
        return answer.status == health_pb2.HealthCheckResponse.SERVING


def ask(running: RunningCluster, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [
        sys.executable,
        "-m",
        "launch.ask",
        f"--target={running.address}",
        f"--prompt={PROMPT}",
        *flags,
    ]
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=time_scale.seconds(120),
        check=False,
    )


def check_a_life(running: RunningCluster, killed: str) -> None:
    """Streams, is seen, loses a worker and gets it back, streams again, and ends without a
    trace."""
    text, tokens = oracle(60)
    with Client(running.address) as client:
        answer = ask(running, "--max_tokens=60", "--ignore_eos", "--temperature=0")
        assert (answer.returncode, answer.stdout) == (0, text + "\n"), answer.stderr
        assert {status.name: status.layout for status in client.status()}.keys() == set(
            running.workers
        )
        wait_until(
            lambda: all_free(client, running.workers), "pages are not free once all is quiet"
        )

        wait_until(lambda: healthy(running), "no canary made the trip")
        worker = running.worker(killed)
        assert worker is not None
        worker.kill()
        wait_until(lambda: running.worker(killed) not in (None, worker), "it was not started again")
        said: list[list[int]] = []

        def usable_again() -> bool:
            with suppress(UnavailableError):
                said.append(
                    client.complete(PROMPT, max_tokens=60, ignore_eos=True, temperature=0)
                    .choices[0]
                    .token_ids
                )
            return bool(said)

        wait_until(usable_again, "the cluster is not usable again")
        assert said == [tokens]
        wait_until(
            lambda: all_free(client, running.workers), "pages are not free after a worker's death"
        )
        wait_until(lambda: healthy(running), "no canary made the trip after the restart")

        events = client.generate(PROMPT, max_tokens=200, ignore_eos=True, temperature=0)
        seen = [next(events)]
        pids = running.pids()
        running.process.send_signal(signal.SIGTERM)
        seen += events
        assert seen[-1].finish_reason is FinishReason.LENGTH, (
            "a running stream was cut short by SIGTERM"
        )
        assert len(collect(seen).tokens[0]) == 200
    assert running.process.wait(END_SECONDS) == 0, running.log.read_text()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.ci
def test_a_cluster_streams_survives_a_killed_decode_worker_and_ends_without_a_trace(folder: Path):
    with cluster(folder, "--prefill_workers=1", "--decode_workers=1") as running:
        assert running.workers == ["decode-0", "prefill-0"]
        check_a_life(running, "decode-0")


@pytest.mark.slow
def test_two_of_each_kind_survive_a_killed_prefill_worker(folder: Path):
    with cluster(folder, "--prefill_workers=2", "--decode_workers=2") as running:
        assert len(running.workers) == 4
        check_a_life(running, "prefill-1")


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["decode-0.0", "prefill-0.1"])
def test_instances_of_two_processes_each_survive_the_death_of_one_of_them(
    folder: Path, killed: str
):
    layouts = ("--prefill=dp=1,tp=4", "--decode=dp=2,tp=2")
    with cluster(
        folder, "--prefill_workers=1", "--decode_workers=1", "--processes_per_instance=2", *layouts
    ) as running:
        assert len(running.pids()) == 6
        check_a_life(running, killed)


@pytest.mark.ci
def test_mixed_workers_alone_serve_too(folder: Path):
    text, _ = oracle(30)
    with cluster(folder, "--mixed_workers=1") as running:
        assert running.workers == ["mixed-0"]
        answer = ask(running, "--max_tokens=30", "--ignore_eos", "--temperature=0")
        assert (answer.returncode, answer.stdout) == (0, text + "\n"), answer.stderr
        assert running.end() == 0


@pytest.mark.ci
def test_children_die_with_a_parent_that_is_killed(folder: Path):
    with cluster(folder, "--mixed_workers=1") as running:
        pids = running.pids()
        assert len(pids) >= 3
        running.process.kill()
        running.process.wait()
        wait_until(lambda: not [pid for pid in pids if psutil.pid_exists(pid)], "orphans")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--prefill_workers=1", "--decode_workers=0"),
            "give one prefill and one decode instance at least",
        ),
        (("--prefill=dp=1,tp=3", "--processes_per_instance=2"), "does not divide"),
        (
            ("--decode=pp=2", "--processes_per_instance=2"),
            "pp=2 has 1 devices a pipeline stage, which --processes_per_instance=2 does not divide",
        ),
        (
            ("--elastic", "--prefill=tp=4", "--processes_per_instance=2"),
            "cannot change their roles; give each instance one process",
        ),
        (("--model=/nowhere",), "/nowhere"),
        (("--set=instance.nonsense=1",), "InstanceConfig has no field 'nonsense'"),
    ],
)
def test_a_cluster_that_cannot_work_says_so_and_ends(flags: tuple[str, ...], message: str):
    command = [sys.executable, "-m", "launch.cluster", "--port=0", "--http_port=-1", *flags]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=time_scale.seconds(120),
        check=False,
    )
    assert ended.returncode == 1 and message in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr

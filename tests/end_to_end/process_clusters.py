"""Clusters of real processes on one host, and what they say."""

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
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jdisagg.client import Client
from jdisagg.errors import JdisaggError
from models.tokenizer import Tokenizer
from tests import time_scale
from tests.end_to_end.clusters import dense_greedy
from tests.programs import CACHE_FLAG
from tests.shapes import LLAMA

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
def cluster(folder: Path, *flags: str, xla_flags: str = "") -> Iterator[RunningCluster]:
    """On leaving no process of it lives, whatever happened."""
    environment = {**os.environ, "XLA_FLAGS": xla_flags}
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


def launched(
    module: str, *flags: str, env: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """A launch command that ends by itself."""
    command = [sys.executable, "-m", f"launch.{module}", *flags]
    seconds = time_scale.seconds(300)
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=seconds, check=False
    )


def ask(running: RunningCluster, *flags: str) -> "subprocess.CompletedProcess[str]":
    return launched("ask", f"--target={running.address}", f"--prompt={PROMPT}", *flags)

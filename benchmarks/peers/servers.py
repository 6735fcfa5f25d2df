"""Servers that run side by side: a peer's, and ours in three modes, each bound to its cores. All
serve the measured checkpoint with an OpenAI-compatible HTTP API."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from jdisagg.errors import ConfigError, UnavailableError

VLLM = Path(__file__).with_name("vllm_command.py")
PEER = "vLLM"
KINDS = (PEER, "unified", "chunked", "disaggregated")
STOP_SECONDS = 30.0
QUIET_SECONDS = 5.0
IDLE_PART = 0.1  # of a core
_TAIL = 2000


class Sizes(NamedTuple):
    """Settings that all servers share. `cores`: at least two; in disaggregated mode the first half
    prefills and the other half decodes."""

    folder: Path
    dtype: str
    cores: tuple[int, ...]
    sequences: int = 32
    context_tokens: int = 2304
    chunk_tokens: int = 512


class Program(NamedTuple):
    """One process of a server."""

    command: list[str]
    cores: tuple[int, ...]
    environment: dict[str, str]


def programs(kind: str, sizes: Sizes, peer_python: str, http_port: int, port: int) -> list[Program]:
    """Returns the processes of a server. `port`: gRPC port of our servers."""
    if kind == PEER:
        command = [peer_python, str(VLLM), "serve", str(sizes.folder), "--host=127.0.0.1"]
        command += [f"--port={http_port}", f"--dtype={sizes.dtype}"]
        command += [f"--served-model-name={sizes.folder.name}"]
        command += [f"--max-model-len={sizes.context_tokens}", "--no-enable-prefix-caching"]
        command += [f"--max-num-seqs={sizes.sequences}"]
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sizes.cores)),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return [Program(command, sizes.cores, environment)]
    model = f"--model={sizes.folder}"
    engine = [model, f"--dtype={sizes.dtype}", "--page_size=128"]
    engine += [f"--context_tokens={sizes.context_tokens}", f"--chunk_tokens={sizes.chunk_tokens}"]
    engine += [f"--slots_per_rank={sizes.sequences}"]
    doors = [f"--port={port}", f"--http_port={http_port}"]

    def ours(page: str, cores: tuple[int, ...], *arguments: str) -> Program:
        return Program([sys.executable, "-m", f"launch.{page}", *arguments], cores, {})

    if kind != "disaggregated":
        one = ("--prefill=tp=1", "--decode=tp=1", "--devices=1")
        return [ours("serve", sizes.cores, *engine, f"--mode={kind}", *one, *doors)]
    half = len(sizes.cores) // 2
    if not half:
        raise ConfigError(
            f"a disaggregated server needs two cores, one a role, and has {sizes.cores};"
            " give the benchmark more"
        )
    worker = (*engine, "--mode=disaggregated", "--layout=tp=1", f"--router=127.0.0.1:{port}")
    return [
        ours("router", sizes.cores, model, *doors),
        ours("worker", sizes.cores[:half], "--role=prefill", *worker),
        ours("worker", sizes.cores[half:], "--role=decode", *worker),
    ]


@contextlib.contextmanager
def serving(kind: str, sizes: Sizes, peer_python: str, start_seconds: float) -> Iterator[str]:
    """Context manager that yields the URL of a server that has answered a request. Ends the
    server's processes afterwards."""
    http_port, port = _free_ports(2)
    url = f"http://127.0.0.1:{http_port}"
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as log:
        try:
            for program in programs(kind, sizes, peer_python, http_port, port):
                children.append(_start(program, log))
            until = time.monotonic() + start_seconds
            _wait(_Starting(kind, url, sizes.folder.name, children, log), start_seconds)
            settle(children, until)
            yield url
        finally:
            _stop(children)


def peer_versions(python: str) -> dict[str, str]:
    """Returns the versions of the peer and of its libraries. Raises `ConfigError` if that Python
    lacks them."""
    code = (
        "import importlib.metadata as m, json, platform; v = {n: m.version(n) for n in"
        " ('vllm-cpu', 'torch')}; print(json.dumps(v | {'python': platform.python_version()}))"
    )
    try:
        run = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"--peer_python={python} has no vllm-cpu ({error}); give the Python of an environment"
            " in which it is installed, such as ENV/bin/python"
        ) from error
    return json.loads(run.stdout)


def _start(program: Program, log: IO[bytes]) -> subprocess.Popen[bytes]:
    bound = ["taskset", "--cpu-list", ",".join(map(str, program.cores)), *program.command]
    environment = {**os.environ, **program.environment}
    if str(VLLM) in program.command:
        environment.pop("PYTHONPATH", None)  # nothing of ours is imported there
    return subprocess.Popen(bound, stdout=log, stderr=log, env=environment, start_new_session=True)


class _Starting(NamedTuple):
    kind: str
    url: str
    model: str
    children: list[subprocess.Popen[bytes]]
    log: IO[bytes]


def _wait(server: _Starting, seconds: float) -> None:
    body = {"model": server.model, "prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
    question = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    until = time.monotonic() + seconds
    while True:
        try:
            for asked in (f"{server.url}/health", question):  # the first costs a server nothing
                with urllib.request.urlopen(asked, timeout=seconds) as answer:
                    answer.read()
            return
        except (urllib.error.URLError, OSError) as error:
            ended = any(child.poll() is not None for child in server.children)
            if ended or time.monotonic() > until:
                size = server.log.seek(0, os.SEEK_END)
                server.log.seek(max(0, size - _TAIL))
                words = server.log.read().decode(errors="replace").strip()
                raise UnavailableError(
                    f"the server {server.kind!r} did not start in {seconds:g} s ({error}); its last"
                    f" words: {words}"
                ) from error
        time.sleep(0.5)


def settle(children: Sequence[subprocess.Popen[bytes]], until: float) -> None:
    """Waits until the processes are idle: a server that answers may still load programs, on cores
    where other servers are measured."""
    used, quiet = processor_seconds(children), 0.0
    while quiet < QUIET_SECONDS and time.monotonic() < until:
        time.sleep(1.0)
        now = processor_seconds(children)
        quiet = quiet + 1.0 if now - used < IDLE_PART else 0.0
        used = now


def processor_seconds(children: Sequence[subprocess.Popen[bytes]]) -> float:
    """Returns the processor seconds so far of all processes of these sessions."""
    sessions, ticks = {child.pid for child in children}, 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) in sessions:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _stop(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]

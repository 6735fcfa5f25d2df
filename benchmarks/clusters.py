"""Starts processes to measure: `jdisagg cluster` or `jdisagg serve` as a child process, and a
client that waits until the process answers."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from jdisagg.client import AsyncClient
from jdisagg.errors import JdisaggError

READY_SECONDS = 240.0
_pids: dict[str, int] = {}  # of running commands, by address


def cluster(*arguments: str) -> contextlib.AbstractContextManager[str]:
    """Context manager that yields the address of a running `jdisagg cluster`."""
    return _child("launch.cluster", "jdisagg cluster serves on", arguments)


def server(*arguments: str) -> contextlib.AbstractContextManager[str]:
    """Context manager that yields the address of a running `jdisagg serve`."""
    return _child("launch.serve", "jdisagg serves", arguments)


@contextlib.contextmanager
def _child(page: str, said: str, arguments: tuple[str, ...]) -> Iterator[str]:
    """Starts a command as a child process. Yields the address in the line that begins with
    `said`."""
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-u", "-m", page, "--port=0", "--http_port=-1", *arguments]
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith(said) and (address := re.search(r" on ([^\s:,]+:\d+)", line)):
                    _pids[address[1]] = child.pid
                    yield address[1]
                    break
            else:
                log.seek(0)
                raise SystemExit(f"{page} did not start: {log.read()[-2000:]}")
        except KeyboardInterrupt:  # the start took too long
            log.seek(0)
            print(log.read()[-4000:], file=sys.stderr)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)
            child.wait(timeout=60)


def pid_of(address: str) -> int:
    """Returns the process id of the command at `address`."""
    return _pids[address]


def processor_seconds(address: str) -> float:
    """Returns the processor seconds that the command at `address` has used, without those of its
    child processes."""
    return processor_seconds_of(_pids[address])


def processor_seconds_of(pid: int) -> float:
    """Returns the processor seconds that a running process has used, without those of its child
    processes."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def ready(target: str) -> AsyncIterator[AsyncClient]:
    """Returns a client when the cluster has answered a request."""
    async with AsyncClient(target) as client:
        until = time.monotonic() + READY_SECONDS
        while True:
            try:
                await client.complete("Once", max_tokens=2)
                break
            except JdisaggError:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.5)
        yield client

"""A cluster of real processes to be measured: `launch.cluster` as a child, and a client that waits
until it answers."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator

from jdisagg.client import AsyncClient
from jdisagg.errors import JdisaggError

READY_SECONDS = 240.0


@contextlib.contextmanager
def cluster(*arguments: str) -> Iterator[str]:
    """The address of a running `launch.cluster`."""
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-u", "-m", "launch.cluster", "--port=0", *arguments]
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith("jdisagg cluster serves on"):
                    yield (
                        line.split(" on ")[1].split(":")[0]
                        + ":"
                        + line.split(" on ")[1].split(":")[1]
                    )
                    break
            else:
                log.seek(0)
                raise SystemExit(f"the cluster did not start: {log.read()[-2000:]}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)
            child.wait(timeout=60)


@contextlib.asynccontextmanager
async def ready(target: str) -> AsyncIterator[AsyncClient]:
    """A client, once the cluster answers a request."""
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

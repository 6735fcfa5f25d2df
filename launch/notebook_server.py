"""A server for a notebook: `server = await start_server("--mode=unified")` in a cell.

The server is `jdisagg serve` in a separate process, on loopback ports that the system chooses. The
notebook's kernel does not import JAX, and the server does not slow the kernel. A cell therefore
measures the same times as any other client. The server ends when `stop` is called or when the
kernel ends."""

import asyncio
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from jdisagg.errors import ConfigError, DeadlineExceededError
from jdisagg.supervisor.child_process import ChildProcess, Command

ROOT = Path(__file__).resolve().parent.parent
SERVE = (sys.executable, "-m", "launch.serve", "--port=0", "--http_port=0")
START_SECONDS = 1800.0  # includes compilation on the first start
STOP_SECONDS = 30.0
LAST_LINES = 12

# With --log_format=json, the line is a part of an object.
_READY = re.compile(r"jdisagg serves (.+) \(\w+\) on (\S+) and (https?://[^\s\"]+)")


class NotebookServer:
    """A running server.

    Attributes:
        url: Address of the HTTP API. OpenAI clients take `url + "/v1"` as `base_url`.
        target: Address of the gRPC service, for `jdisagg.client`.
    """

    def __init__(self, url: str, target: str, model: str, process: ChildProcess) -> None:
        self.url, self.target = url, target
        self.model = model
        self._process = process

    async def stop(self) -> None:
        """Drains and stops the server. Kills the server if this takes longer than 30 seconds."""
        await _end(self._process)


async def start_server(
    *flags: str, program: Sequence[str] = SERVE, seconds: float = START_SECONDS
) -> NotebookServer:
    """Starts a server and returns when the server is ready.

    Args:
      program: Command line to which the flags are appended.

    Raises:
      ConfigError: The server exited. The message has the last lines of its output.
      DeadlineExceededError: The server was not ready in time and was stopped.
    """
    lines: deque[str] = deque(maxlen=LAST_LINES)
    ready: asyncio.Future[re.Match[str]] = asyncio.get_running_loop().create_future()

    def take(_: str, line: str) -> None:
        lines.append(line)
        if (found := _READY.search(line)) and not ready.done():
            ready.set_result(found)

    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    process = await ChildProcess.start(Command("serve", (*program, *flags), environment), take)
    ended = asyncio.ensure_future(process.ended())
    try:
        await asyncio.wait({ready, ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    except BaseException:  # the cell was interrupted
        process.kill()
        raise
    if ready.done():
        model, target, url = ready.result().groups()
        return NotebookServer(url, target, model, process)
    said = "\n".join(lines)
    if ended.done():
        raise ConfigError(
            f"the server ended with status {ended.result()} before it served; its last lines:"
            f"\n{said}"
        )
    await _end(process)
    raise DeadlineExceededError(
        f"the server did not serve within {seconds:g} s; give it more (seconds=); its last lines:"
        f"\n{said}"
    )


async def _end(process: ChildProcess) -> None:
    process.signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.ended(), STOP_SECONDS)
    except TimeoutError:
        process.kill()
        await process.ended()

"""Starts a child process in its own process group and reads its output line by line.

On Linux, the kernel kills the child when its parent ends for any reason (leash.py). The child has
its own session, so that Ctrl-C on the terminal signals only the parent. The parent then stops its
children in order. When a child has ended, processes that it started and that still run are
killed."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_READ_BYTES = 64 << 10
_LONGEST_LINE_BYTES = 1 << 20
_OUTPUT_SECONDS = 2.0
_LEASH = str(Path(__file__).with_name("leash.py"))

TakeLine = Callable[[str, str], None]


@dataclass(frozen=True)
class Command:
    """A command line and a name for its process. `environment` has all environment variables of the
    process. If it is None, the process has the variables of its parent."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] | None = field(default=None)


class ChildProcess:
    """A child process, running or ended. `status` is None while the process runs. After that, it is
    the exit status, or minus the number of the signal that ended the process."""

    def __init__(
        self,
        command: Command,
        process: asyncio.subprocess.Process,
        output: int,
        take_line: TakeLine,
    ) -> None:
        self.name = command.name
        self.pid = process.pid
        self._process = process
        self._reading = asyncio.create_task(
            _read_lines(output, lambda line: take_line(command.name, line))
        )

    @classmethod
    async def start(cls, command: Command, take_line: TakeLine) -> "ChildProcess":
        """Starts the child.

        No Python code runs between fork and exec (`preexec_fn`), because it might hang if the
        parent has other threads, such as gRPC's.

        Args:
            take_line: Callback for each line of stdout and stderr, in order. Its arguments are the
                process's name and the line.

        Raises:
            OSError: The program does not exist, or the system cannot start a process.
        """
        if shutil.which(command.arguments[0]) is None:
            raise FileNotFoundError(f"there is no program {command.arguments[0]!r}")
        # The output has a pipe of its own. With asyncio's pipe, `wait` would also wait for other
        # processes that inherited the writing end.
        output, into = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *_on_leash(command.arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=into,
                stderr=into,
                env=None if command.environment is None else dict(command.environment),
                start_new_session=True,
            )
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(into)
        return cls(command, process, output, take_line)

    @property
    def status(self) -> int | None:
        return self._process.returncode

    async def ended(self) -> int:
        """Waits until the process ends, and then briefly for its last output. Returns the exit
        status."""
        status = await self._process.wait()
        self._kill_group()
        await asyncio.wait({self._reading}, timeout=_OUTPUT_SECONDS)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        return status

    def signal(self, number: signal.Signals) -> None:
        """Signals the process, but not its children. Does nothing after the process has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        if self._process.returncode is None:
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _on_leash(arguments: tuple[str, ...]) -> tuple[str, ...]:
    if sys.platform != "linux":
        return arguments
    return (sys.executable, "-I", "-S", _LEASH, str(os.getpid()), *arguments)


async def _read_lines(output: int, take: Callable[[str], None]) -> None:
    """Calls `take` with each line of the output. `StreamReader.readline` is not used, because it
    raises an error for long lines."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(output, "rb", buffering=0)
    )
    rest = b""
    try:
        while chunk := await reader.read(_READ_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                take(_text(line))
            if len(rest) > _LONGEST_LINE_BYTES:
                take(_text(rest))
                rest = b""
    finally:
        transport.close()
        if rest:
            take(_text(rest))


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace").rstrip("\r")

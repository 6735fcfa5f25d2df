"""A peer's engine as a child process: it reads one JSON object per line from stdin and answers each
with one line.

    {"do": "start", "model": FOLDER, "dtype": "float32", "context_tokens": 2304, "sequences": 32,
     "cores": [0, 1]}                       -> {"versions": {"vllm": "0.32.0", ...}, ...}
    {"do": "generate", "prompts": [[5, 9, 7]], "tokens": 64}
    -> {"seconds": 1.5, "tokens": [[...]], "times": [[...]]}
    {"do": "stop"}                          -> {}

`times` are seconds from the question to each token of each stream, measured in the peer's process.
An error is answered as {"error": "..."}. The driver is our script, such as `vllm_driver.py`. It
runs under the peer's Python and does not import our code."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jdisagg.errors import ConfigError, UnavailableError

ANSWER_SECONDS, STOP_SECONDS = 900.0, 30.0
_TAIL = 2000


@contextlib.contextmanager
def started(python: str, driver: Path, answer_seconds: float = ANSWER_SECONDS) -> Iterator["Peer"]:
    """Context manager: starts the driver under the peer's Python and ends it afterwards. Raises
    `ConfigError` if this Python cannot be run."""
    # Nothing of ours is imported there.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryFile() as log:
        try:
            child = subprocess.Popen(
                [python, "-u", str(driver)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(
                f"--peer_python={python} cannot be run ({error.strerror}); give the Python of an"
                " environment in which the peer is installed, such as ENV/bin/python"
            ) from error
        with child:
            peer = Peer(child, log, answer_seconds)
            try:
                yield peer
            finally:
                peer.close()


class Peer:
    """A running driver. `ask` blocks until the driver has answered, and our process is idle
    meanwhile."""

    def __init__(
        self, child: subprocess.Popen[bytes], log: IO[bytes], answer_seconds: float
    ) -> None:
        self._child, self._log, self._seconds = child, log, answer_seconds
        self._rest = b""

    def ask(self, do: str, **fields: object) -> dict:
        """Returns the answer to one question. Raises `UnavailableError` if the driver reports an
        error, has ended, or does not answer in time."""
        assert self._child.stdin
        with contextlib.suppress(BrokenPipeError):  # what it wrote before it ended says why
            self._child.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            self._child.stdin.flush()
        answer = json.loads(self._line(do))
        if "error" in answer:
            raise UnavailableError(f"the peer cannot {do}: {answer['error']}; {self._words()}")
        return answer

    def cpu_seconds(self) -> float:
        """Returns the processor seconds so far of all processes of the peer's session."""
        ticks = 0
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == self._child.pid:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Ends the peer's processes."""
        if self._child.poll() is None:
            with contextlib.suppress(UnavailableError):
                self._seconds = min(self._seconds, STOP_SECONDS)
                self.ask("stop")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)

    def _line(self, do: str) -> bytes:
        assert self._child.stdout
        until = time.monotonic() + self._seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise UnavailableError(
                        f"the peer did not answer {do!r} in {self._seconds:.0f} s; {self._words()}"
                    )
                data = os.read(self._child.stdout.fileno(), 1 << 20)
                if not data:
                    raise UnavailableError(f"the peer ended at {do!r}; {self._words()}")
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _words(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _TAIL))
        return f"its last words: {self._log.read().decode(errors='replace').strip() or 'none'}"

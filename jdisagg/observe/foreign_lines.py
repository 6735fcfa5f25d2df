"""Program that reads lines from stdin and writes each to stdout as one JSON object.

The program must outlive the logging process to read its last lines. It therefore ignores signals to
the process group, and ends at the end of its input. On a full disk, lines are lost until there is
room again."""

import contextlib
import json
import os
import re
import signal
import sys
import time

# Prefix of glog's and absl's lines: severity, month and day, time, thread, file:line.
_NATIVE = re.compile(r"^([IWEF])\d{4} [\d:.]+ +\d+ ")
_LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}

_USUAL = {"stderr": "WARNING", "stdout": "INFO"}


def wrapped(line: str, process: str, now: float, stream: str = "stderr") -> str:
    """Converts an output line to the text of a JSON object. A line that is one already is returned
    unchanged."""
    try:
        if isinstance(json.loads(line), dict):
            return line
    except ValueError:
        pass
    severity = _NATIVE.match(line)
    usual = "ERROR" if line.startswith("error: ") else _USUAL[stream]
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
    return json.dumps(
        {
            "time": f"{at}.{int(now % 1 * 1000):03d}Z",
            "level": _LEVELS[severity[1]] if severity else usual,
            "logger": stream,
            "message": line,
            "process": process,
        }
    )


def main(process: str, stream: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for data in sys.stdin.buffer:
        for line in data.decode("utf-8", "replace").replace("\r", "\n").splitlines():
            if line.strip():
                text = f"{wrapped(line, process, time.time(), stream)}\n"
                with contextlib.suppress(OSError):
                    os.write(1, text.encode())


if __name__ == "__main__":
    main(*sys.argv[1:])

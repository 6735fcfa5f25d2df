"""Logs of a process: text lines, or one JSON object per line.

    start_logging("json", process="decode-0")
    log.warning("pull failed", extra={"request_id": request_id, "offer": offer_id})

In JSON format, a record is exactly one line of valid JSON. Lines that are written directly to
stderr (by native code of gRPC, XLA and Gloo, or by a crashing interpreter) are converted to JSON
too (`foreign_lines.py`)."""

import contextlib
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

from pythonjsonlogger.core import LogData
from pythonjsonlogger.json import JsonFormatter

from jdisagg.config import LOG_FORMATS
from jdisagg.errors import ConfigError

OURS = ("jdisagg", "launch", "models")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(JsonFormatter):
    """Formats a record as a JSON object with time (UTC, ISO 8601), level, process, worker,
    request_id, logger, message, error, and the fields of `extra`."""

    def __init__(self, process: str, worker: str = "") -> None:
        super().__init__(
            ["levelname", "name", "message"],
            style="sequence",
            rename_fields={"levelname": "level", "name": "logger", "exc_info": "error"},
            static_fields={"process": process, **({"worker": worker} if worker else {})},
            reserved_attrs=_STANDARD,
        )

    def format(self, record: logging.LogRecord) -> str:
        try:
            record.getMessage()
        except Exception as error:  # the arguments do not match the format
            text = f"{record.msg!r} with {_plain(record.args)!r} ({type(error).__name__})"
            record = logging.makeLogRecord({**vars(record), "msg": text, "args": None})
        return super().format(record)

    def process_log_record(self, log_data: LogData) -> LogData:
        return {name: _plain(value) for name, value in log_data.items()}

    def add_fields(
        self, log_data: LogData, record: logging.LogRecord, message_dict: LogData
    ) -> None:
        log_data["time"] = _utc(record.created)
        super().add_fields(log_data, record, message_dict)


class TextFormatter(logging.Formatter):
    """Formats a record as `12:00:00.000 WARNING decode-0 [request] message  field=value`, followed
    by the traceback of an exception."""

    def __init__(self, process: str, worker: str = "") -> None:
        super().__init__()
        self._names = "/".join(dict.fromkeys(name for name in (process, worker) if name))

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        request = _one_line(fields.pop("request_id", ""))
        at = f"{time.strftime('%H:%M:%S', time.localtime(record.created))}.{int(record.msecs):03d}"
        message = record.getMessage()
        words = [at, record.levelname, self._names, f"[{request}]" if request else "", message]
        line = " ".join(word for word in words if word) + "".join(
            f"  {name}={_one_line(_plain(value))}" for name, value in fields.items()
        )
        if record.exc_info and record.exc_info[1] is not None:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure_logging(
    log_format: str,
    process: str,
    worker: str = "",
    level: int = logging.INFO,
    stream: TextIO | None = None,
) -> logging.Handler:
    """Installs the root logger's only handler, which replaces absl's.

    Args:
        worker: Name of the worker, if it differs from the process's name.
        level: Level of jdisagg's loggers. The level of other libraries is WARNING.

    Raises:
        ConfigError: The format is unknown.
    """
    if log_format not in LOG_FORMATS:
        raise ConfigError(f"log_format must be one of {', '.join(LOG_FORMATS)}, got {log_format!r}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        JsonLines(process, worker) if log_format == "json" else TextFormatter(process, worker)
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for ours in OURS:
        logging.getLogger(ours).setLevel(level)
    return handler


def start_logging(log_format: str, process: str) -> None:
    """Configures logging for an entry point (see `configure_logging`). With the format "json",
    lines that the process writes directly to stderr and stdout are also converted to JSON."""
    handler = configure_logging(log_format, process)
    if log_format == "json" and isinstance(handler, logging.StreamHandler):
        _wrap_foreign_lines(handler, process)


def say(text: str, *, error: bool = False) -> None:
    """Prints a line to stdout, or with `error` to stderr. If the disk is full or the reader has
    gone, the line is lost, and the process continues."""
    with contextlib.suppress(OSError):
        # one write, which lines of other processes do not divide
        print(f"{text}\n", end="", file=sys.stderr if error else sys.stdout, flush=True)


def _wrap_foreign_lines(handler: logging.StreamHandler, process: str) -> None:
    own = _through_reader(2, process, "stderr")
    sys.stdout.flush()
    os.close(_through_reader(1, process, "stdout"))
    handler.setStream(os.fdopen(own, "w", encoding="utf-8", errors="replace", buffering=1))


def _through_reader(descriptor: int, process: str, name: str) -> int:
    own = os.dup(descriptor)
    program = str(Path(__file__).with_name("foreign_lines.py"))
    reader = subprocess.Popen(
        [sys.executable, "-I", "-S", program, process, name],
        stdin=subprocess.PIPE,
        stdout=own,
        stderr=own,
        start_new_session=True,
    )
    assert reader.stdin is not None
    os.dup2(reader.stdin.fileno(), descriptor)
    reader.stdin.close()
    return own


def _utc(created: float) -> str:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created))
    return f"{at}.{int(created % 1 * 1000):03d}Z"


def _one_line(value: object) -> str:
    """Escapes control characters, because clients choose ids: one with a line break would forge a
    line of the log."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))


def _plain(value: object) -> object:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)  # JSON has no NaN and no infinity
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__}: its text raised {type(error).__name__}>"

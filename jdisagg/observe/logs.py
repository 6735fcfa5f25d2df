"""Logs of a process, as lines for people or as one JSON object a line for machines.

    start_logging("json", process="decode-0")
    log.warning("pull failed", extra={"request_id": request_id, "offer": offer_id})

Whatever `extra` holds becomes a field. A record is always exactly one line of valid JSON, whatever
is in it: line ends are escaped, values that JSON does not know are shown as text, and a value whose
text cannot be had does not lose the record. What libraries write to stderr past any logger (gRPC's,
XLA's and Gloo's native lines, what an interpreter says as it dies) becomes JSON too
(`foreign_lines.py`)."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

from pythonjsonlogger.core import LogData
from pythonjsonlogger.json import JsonFormatter

from jdisagg.errors import ConfigError

FORMATS = ("text", "json")
OURS = ("jdisagg", "launch", "models")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(JsonFormatter):
    """time (UTC, ISO 8601), level, process, worker, request_id where there is one, logger,
    message, error, and the fields of `extra`."""

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
        except Exception as error:  # wrong arguments for the format: say what there is
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
    """`12:00:00.000 WARNING decode-0 [request] message  field=value`; what was raised follows on
    lines of its own."""

    def __init__(self, process: str, worker: str = "") -> None:
        super().__init__()
        self._names = "/".join(dict.fromkeys(name for name in (process, worker) if name))

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        request = fields.pop("request_id", "")
        at = f"{time.strftime('%H:%M:%S', time.localtime(record.created))}.{int(record.msecs):03d}"
        message = record.getMessage()
        words = [at, record.levelname, self._names, f"[{request}]" if request else "", message]
        line = " ".join(word for word in words if word) + "".join(
            f"  {name}={_plain(value)}" for name, value in fields.items()
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
    """Makes this the root logger's only handler, in place of what absl put there.

    Args:
      log_format: One of FORMATS.
      process: The name of the process; a field of every line.
      worker: The worker's name, where it differs.
      level: Of our own loggers; of other libraries, warnings and worse are shown.
      stream: Where lines go; stderr.

    Returns:
      The handler.

    Raises:
      ConfigError: for an unknown format.
    """
    if log_format not in FORMATS:
        raise ConfigError(f"log_format must be one of {', '.join(FORMATS)}, got {log_format!r}")
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
    """`configure_logging` for an entry point: with "json", whatever else the process writes to
    stderr is JSON as well."""
    handler = configure_logging(log_format, process)
    if log_format == "json" and isinstance(handler, logging.StreamHandler):
        _wrap_foreign_lines(handler, process)


def _wrap_foreign_lines(handler: logging.StreamHandler, process: str) -> None:
    """From now on what is written to this process's stderr, by whatever is in it, is one JSON
    object a line: `handler`'s own lines as they are, others as messages of the logger "stderr".

    The lines pass through a small process, so that the last words of one that crashes are not
    lost with it. It ends when the last writer does.
    """
    own = os.dup(2)
    program = str(Path(__file__).with_name("foreign_lines.py"))
    reader = subprocess.Popen(
        [sys.executable, "-I", "-S", program, process],
        stdin=subprocess.PIPE,
        stdout=own,
        stderr=own,
        start_new_session=True,
    )
    assert reader.stdin is not None
    os.dup2(reader.stdin.fileno(), 2)
    reader.stdin.close()
    handler.setStream(os.fdopen(own, "w", encoding="utf-8", errors="replace", buffering=1))


def _utc(created: float) -> str:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created))
    return f"{at}.{int(created % 1 * 1000):03d}Z"


def _plain(value: object) -> object:
    """What JSON knows: the value itself, or its text."""
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

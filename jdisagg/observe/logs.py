"""Logs of a process, as lines for people or as one JSON object a line for machines.

    configure_logging("json", process="decode-0")
    log.warning("pull failed", extra={"request_id": request_id, "offer": offer_id})

Whatever `extra` holds becomes a field. A record is always exactly one line of valid JSON, whatever is in it: line ends are escaped,
values that JSON does not know are shown as text, and a value whose text cannot be had does not lose the record.
"""

import json
import logging
import sys
import time
import traceback
from typing import TextIO

from jdisagg.errors import ConfigError

FORMATS = ("text", "json")
OURS = ("jdisagg", "launch", "models")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """time (UTC, ISO 8601), level, process, worker, request_id, logger, message, error, fields."""

    def __init__(self, process: str, worker: str = "") -> None:
        super().__init__()
        self._process = process
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        line: dict[str, object] = {
            "time": _utc(record),
            "level": record.levelname,
            "process": self._process,
            "worker": fields.pop("worker", self._worker),
            "request_id": fields.pop("request_id", ""),
            "logger": record.name,
            "message": _message(record),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        if fields:
            line["fields"] = {name: _plain(value) for name, value in fields.items()}
        return json.dumps({name: _plain(value) for name, value in line.items()}, ensure_ascii=True)


class TextFormatter(logging.Formatter):
    """`12:00:00.000 WARNING decode-0 [request] message  field=value`; what was raised follows on lines of its own."""

    def __init__(self, process: str, worker: str = "") -> None:
        super().__init__()
        self._who = "/".join(dict.fromkeys(name for name in (process, worker) if name))

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        request = fields.pop("request_id", "")
        at = f"{time.strftime('%H:%M:%S', time.localtime(record.created))}.{int(record.msecs):03d}"
        words = [at, record.levelname, self._who, f"[{request}]" if request else "", _message(record)]
        line = " ".join(word for word in words if word) + "".join(f"  {name}={_plain(value)}" for name, value in fields.items())
        if record.exc_info and record.exc_info[1] is not None:
            line += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
        return line


def configure_logging(
    log_format: str, process: str, worker: str = "", level: int = logging.INFO, stream: TextIO | None = None
) -> logging.Handler:
    """Makes this the root logger's only handler, in place of what absl put there. Returns it. `log_format` is one of FORMATS.

    `level` is that of our own loggers; of other libraries, warnings and worse are shown.
    """
    if log_format not in FORMATS:
        raise ConfigError(f"log_format must be one of {', '.join(FORMATS)}, got {log_format!r}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process, worker) if log_format == "json" else TextFormatter(process, worker))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for ours in OURS:
        logging.getLogger(ours).setLevel(level)
    return handler


def _utc(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as error:  # wrong arguments for the format: say what there is
        return f"{record.msg!r} with {_plain(record.args)!r} ({type(error).__name__})"


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

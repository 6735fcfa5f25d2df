"""Logs: one line of JSON a record, whatever is in it."""

import io
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jdisagg.errors import ConfigError
from jdisagg.observe import foreign_lines
from jdisagg.observe.logs import OURS, configure_logging

FULL = Path("/dev/full")


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    loggers = [root, *(logging.getLogger(name) for name in OURS)]
    handlers, levels = root.handlers[:], [logger.level for logger in loggers]
    yield root
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


class Unspeakable:
    def __str__(self) -> str:
        raise RuntimeError("no")


def logged(
    log_format: str,
    *args: object,
    extra: dict[str, object] | None = None,
    error: Exception | None = None,
) -> str:
    stream = io.StringIO()
    configure_logging(log_format, "decode-0", "decode", stream=stream)
    logging.getLogger("jdisagg.test").warning(*args, extra=extra, exc_info=error)  # type: ignore[arg-type]
    return stream.getvalue()


def test_a_json_record_has_its_fields(root: logging.Logger) -> None:
    line = json.loads(logged("json", "pull %d failed", 3, extra={"request_id": "r1", "offer": 7}))
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "WARNING",
        "process": "decode-0",
        "worker": "decode",
        "request_id": "r1",
        "logger": "jdisagg.test",
        "message": "pull 3 failed",
        "offer": 7,
    }


def test_every_record_is_one_line_of_valid_json(root: logging.Logger) -> None:
    fields: dict[str, object] = {
        "a": "x\n\ud800y",
        "b": float("nan"),
        "c": Unspeakable(),
        "d": {1: (2, b"\xff")},
    }
    text = logged("json", "two\nlines\x00", extra=fields, error=ValueError("why\nnot"))
    assert text.count("\n") == 1 and text.endswith("\n") and text.isascii()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert line["message"] == "two\nlines\x00"
    assert line["error"].endswith("ValueError: why\nnot")
    assert line["a"] == "x\n\ud800y" and line["b"] == "nan"


def test_a_message_whose_arguments_do_not_fit_is_not_lost(root: logging.Logger) -> None:
    assert "%d apples" in json.loads(logged("json", "%d apples", "three"))["message"]


def test_text_names_process_request_and_fields(root: logging.Logger) -> None:
    text = logged("text", "pull failed", extra={"request_id": "r1", "offer": 7})
    assert "WARNING decode-0/decode [r1] pull failed  offer=7" in text


def test_an_id_that_a_client_chose_forges_no_line(root: logging.Logger) -> None:
    chosen = {"request_id": "a\n12:00:00 ERROR", "session": "b\x1b[2J é"}
    (line,) = logged("text", "ended", extra=chosen).splitlines()
    assert line.endswith(r"[a\n12:00:00 ERROR] ended  session=b\x1b[2J é")


def test_other_handlers_go(root: logging.Logger) -> None:
    logging.getLogger().addHandler(logging.NullHandler())
    handler = configure_logging("json", "p", stream=io.StringIO())
    assert root.handlers == [handler]


def test_only_our_own_loggers_talk_of_what_is_normal(root: logging.Logger) -> None:
    stream = io.StringIO()
    configure_logging("text", "p", stream=stream)
    logging.getLogger("jdisagg.x").info("ours")
    logging.getLogger("other").info("theirs")
    logging.getLogger("other").warning("their trouble")
    assert [line.split(" p ")[1] for line in stream.getvalue().splitlines()] == [
        "ours",
        "their trouble",
    ]


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="xml"):
        configure_logging("xml", "p")


DYING = """
import os, sys, logging
from jdisagg.observe.logs import start_logging
start_logging("json", "decode-0")
logging.getLogger("jdisagg.x").info("ours", extra={"request_id": "r1"})
os.write(2, b"I1122 19:18:35.123456   77 ssl_transport_security.cc:2563] Handshake failed\\n")
print("printed", file=sys.stderr, flush=True)
os.write(2, b"compiling:   3%|\\rcompiling:  90%|\\n")
print("ready", flush=True)
print("error: it broke", file=sys.stderr, flush=True)
os.write(2, b"last words")
os.abort()
"""


def test_whatever_a_process_writes_is_json_its_last_words_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DYING], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -signal.SIGABRT
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert all({"time", "level", "process", "message"} <= set(line) for line in lines)
    assert {line["process"] for line in lines} == {"decode-0"}
    messages = {line["message"]: line for line in lines}
    assert messages["ours"]["request_id"] == "r1" and messages["ours"]["logger"] == "jdisagg.x"
    (native,) = [line for message, line in messages.items() if "Handshake failed" in message]
    assert native["level"] == "INFO" and native["logger"] == "stderr"
    (out,) = map(json.loads, done.stdout.splitlines())
    assert (out["message"], out["logger"], out["level"]) == ("ready", "stdout", "INFO")
    assert messages["error: it broke"]["level"] == "ERROR"
    assert {"printed", "compiling:   3%|", "compiling:  90%|", "last words"} <= set(messages)


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full")
def test_what_turns_lines_into_json_outlives_a_full_disk() -> None:
    with FULL.open("w") as full:
        command = [sys.executable, "-I", "-S", foreign_lines.__file__, "p", "stderr"]
        ended = subprocess.run(
            command, input=b"one\ntwo\n", stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert (ended.returncode, ended.stderr) == (0, b"")

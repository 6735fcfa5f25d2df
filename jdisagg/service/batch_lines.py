"""Batch files: one request per line in the form of OpenAI's Batch API, and one answer per line.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "batch_req_a", "custom_id": "a", "response": {"status_code": 200, ...}, "error": null}

Answers are appended in the order in which they arrive, each with one write. A line without its line
break, which a killed process may leave, is no answer. A later run removes it, and sends only
requests that have no answer."""

import asyncio
import fcntl
import hashlib
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from jdisagg.errors import ConfigError, UnavailableError, first_error

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MAX_ID_CHARACTERS = 512
MAX_FAULTS = 20
# Statuses of a server that may answer later. 0: no connection.
PASSING = (0, 408, 429, 502, 503, 529)
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 10.0

_encode = msgspec.json.encode


class BatchReply(NamedTuple):
    """`status` is the HTTP status, or 0 if there was no connection."""

    status: int
    body: bytes
    retry_after_seconds: float | None = None

    @property
    def failed(self) -> bool:
        return self.status != 200


class BatchLine(msgspec.Struct):
    """One request. `number` is the number of its line, from 1."""

    custom_id: str
    url: str
    body: dict[str, msgspec.Raw]
    method: str = "POST"
    number: int = 0


class LineFault(msgspec.Struct):
    """Why a line cannot be sent."""

    line: int
    code: str
    message: str


Answer = Callable[[BatchLine], Awaitable[BatchReply]]
_decode = msgspec.json.Decoder(BatchLine).decode


def read_lines(path: Path) -> Iterator[BatchLine | LineFault]:
    """Reads the requests of a file one by one. Empty lines are skipped."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield _line(text, number)


def checked(path: Path, endpoint: str = "") -> tuple[list[str], list[LineFault]]:
    """Reads a whole file. Returns the ids of its requests, and the first faults.

    Args:
        endpoint: The only `url` that requests may have, if not empty.
    """
    ids: dict[str, int] = {}
    faults: list[LineFault] = []
    for line in read_lines(path):
        if isinstance(line, BatchLine):
            wrong = ""
            if endpoint and line.url != endpoint:
                wrong = f"url={line.url[:80]!r} is not the batch's endpoint {endpoint!r}"
            elif (first := ids.setdefault(line.custom_id, line.number)) != line.number:
                wrong = f"custom_id={line.custom_id!r} is that of line {first} too; ids are unique"
            line = LineFault(line.number, "invalid_request", wrong) if wrong else line
        if isinstance(line, LineFault):
            faults.append(line)
            if len(faults) >= MAX_FAULTS:
                break
    if not ids and not faults:
        faults.append(LineFault(0, "empty_file", "the file has no requests"))
    return list(ids), faults


def _line(text: bytes, number: int) -> BatchLine | LineFault:
    try:
        line = _decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        return LineFault(
            number,
            "invalid_json_line",
            f"line {number} must be an object with custom_id, method, url and body: {error}",
        )
    line.number = number
    wrong = ""
    if not 0 < len(line.custom_id) <= MAX_ID_CHARACTERS:
        wrong = f"custom_id must have 1 to {MAX_ID_CHARACTERS} characters"
    elif line.method != "POST":
        wrong = f"method must be POST, got {line.method[:80]!r}"
    elif line.url not in ENDPOINTS:
        wrong = f"url must be one of {', '.join(ENDPOINTS)}, got {line.url[:80]!r}"
    elif bytes(line.body.get("stream", b"null")) not in (b"null", b"false"):
        wrong = "body.stream must be false: an answer is one line"
    return LineFault(number, "invalid_request", f"line {number}: {wrong}") if wrong else line


class AnswerFile:
    """A file of answers that one process appends to.

    Attributes:
        ids: Ids of the requests that have an answer in the file.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if another process appends to the file, or if it has other lines than
        answers."""
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.ids = self._read()
        except BlockingIOError:
            os.close(self._file)
            raise ConfigError(f"{path} is being written by another process; wait for it") from None
        except BaseException:
            os.close(self._file)
            raise

    def _read(self) -> set[str]:
        ids: set[str] = set()
        whole_bytes = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                whole_bytes += len(line)
                try:
                    ids.add(msgspec.json.decode(line, type=dict[str, Any])["custom_id"])
                except (msgspec.MsgspecError, KeyError) as error:
                    raise ConfigError(
                        f"{self.path}: line {number} is not an answer of a batch ({error}); give"
                        " another file"
                    ) from None
        os.ftruncate(self._file, whole_bytes)
        return ids

    def add(self, line: bytes) -> None:
        written = os.write(self._file, line)
        while written < len(line):  # a full disk raises an error
            written += os.write(self._file, line[written:])

    def close(self) -> None:
        os.fsync(self._file)
        os.close(self._file)


def answer_line(line: BatchLine, reply: BatchReply) -> bytes:
    try:
        body: object = msgspec.json.decode(reply.body, type=msgspec.Raw)
    except msgspec.MsgspecError:
        body = reply.body.decode("utf-8", "replace")  # of a proxy
    response = {"status_code": reply.status, "request_id": _name(line), "body": body}
    return _written(line, response, None)


def error_line(line: BatchLine, code: str, message: str) -> bytes:
    """The answer of a request that was not sent."""
    return _written(line, None, {"code": code, "message": message})


def _written(line: BatchLine, response: object, error: object) -> bytes:
    fields = {"id": _name(line), "custom_id": line.custom_id, "response": response, "error": error}
    return _encode(fields).replace(b"\n", b"") + b"\n"


def _name(line: BatchLine) -> str:
    return f"batch_req_{hashlib.sha256(line.custom_id.encode()).hexdigest()[:24]}"


async def send_lines(
    lines: Iterable[BatchLine],
    answer: Answer,
    take: Callable[[BatchLine, BatchReply], None],
    at_once: int,
    patience_seconds: float | None = None,
) -> None:
    """Sends requests, `at_once` at a time, and passes each reply to `take`. A request is sent again
    if the server may answer it later.

    Args:
        patience_seconds: Time without any reply after which UnavailableError is raised, or None.
    """
    left = iter(lines)
    clock = asyncio.get_running_loop().time
    replied_at = clock()

    async def send() -> None:
        nonlocal replied_at
        for line in left:
            pause_seconds = FIRST_PAUSE_SECONDS
            while (reply := await answer(line)).status in PASSING:
                if patience_seconds is not None and clock() - replied_at > patience_seconds:
                    shown = reply.body[:200].decode("utf-8", "replace")
                    raise UnavailableError(
                        f"no request was answered for {patience_seconds:g} s; the last was refused"
                        f" with status {reply.status}: {shown}; run the batch again to continue"
                    )
                wait_seconds = reply.retry_after_seconds or pause_seconds
                await asyncio.sleep(min(wait_seconds, LONGEST_PAUSE_SECONDS))
                pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)
            replied_at = clock()
            take(line, reply)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(send())
    except BaseExceptionGroup as failed:
        raise first_error(failed) from None

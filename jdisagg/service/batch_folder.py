"""Files and batches of clients in a folder, which outlive the server.

    files/ID.jsonl, files/ID.json       a file and its description
    batches/ID.json                     a batch
    batches/ID.output, batches/ID.errors  answers so far; at the end they become files

A description is replaced as a whole. Only clients with the identity that made a file or a batch see
it."""

import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from jdisagg.dispatch import caller
from jdisagg.dispatch.caller import Caller, KeyLimits
from jdisagg.errors import ConfigError
from jdisagg.service.batch_lines import LineFault
from jdisagg.service.http.errors import HttpRefusal

ENDED = ("completed", "failed", "cancelled", "expired")
MAX_FILES = 10_000  # of one client
_ID = re.compile(r"(file|batch)_[0-9a-f]{24}")


class Owner(msgspec.Struct, frozen=True):
    """The client that made a file. `key` and the limits are those of its token."""

    tenant: str = ""
    token: str = ""
    key: str = ""
    streams: int | None = None
    requests_per_second: float | None = None
    tokens_per_second: float | None = None

    @classmethod
    def current(cls) -> "Owner":
        who = caller.current()
        limits = who.limits
        return cls(
            who.tenant,
            who.token,
            who.key,
            limits.streams,
            limits.requests_per_second,
            limits.tokens_per_second,
        )

    @property
    def caller(self) -> Caller:
        limits = KeyLimits(self.streams, self.requests_per_second, self.tokens_per_second)
        return Caller(self.tenant, self.token, self.key, limits)

    @property
    def calls(self) -> bool:
        """Whether this is the caller of the current call."""
        return self.caller == caller.current()


class StoredFile(msgspec.Struct):
    id: str
    owner: Owner
    filename: str
    purpose: str
    bytes: int
    created_at: int


class Batch(msgspec.Struct):
    """`times`: when the batch came into its states, by the field of OpenAI's API."""

    id: str
    owner: Owner
    endpoint: str
    input_file_id: str
    status: str
    total: int
    created_at: int
    expires_at: int
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    faults: list[LineFault] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    completed: int = 0
    failed: int = 0
    times: dict[str, int] = {}


Stored = TypeVar("Stored", StoredFile, Batch)


class BatchFolder:
    """Use it in one process at a time. Raises ConfigError if the folder cannot be used."""

    def __init__(self, path: Path) -> None:
        self._files, self._batches = path / "files", path / "batches"
        try:
            for folder in (self._files, self._batches):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(
                f"service.batch_folder={path} is used by another server; give each its own"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"service.batch_folder={path} cannot be used: {error}; give a folder to write to"
            ) from error
        self.files = {one.id: one for one in _read(self._files, StoredFile)}
        self.batches = {one.id: one for one in _read(self._batches, Batch)}

    def close(self) -> None:
        os.close(self._lock)

    def content(self, file_id: str) -> Path:
        return self._files / f"{file_id}.jsonl"

    def answers(self, batch: Batch, *, failed: bool) -> Path:
        return self._batches / f"{batch.id}.{'errors' if failed else 'output'}"

    def file(self, file_id: str) -> StoredFile:
        """Returns the caller's file. Raises HttpRefusal (404) if the caller has none of this id."""
        return _given(self.files, file_id, "file")

    def batch(self, batch_id: str) -> Batch:
        """Returns the caller's batch, or raises the same error as `file`."""
        return _given(self.batches, batch_id, "batch")

    def new_file(self, data: bytes, filename: str, purpose: str) -> StoredFile:
        owner = Owner.current()
        if sum(one.owner.calls for one in self.files.values()) >= MAX_FILES:
            raise HttpRefusal(
                f"you have {MAX_FILES} files here; delete some", 429, "too_many_files"
            )
        file = StoredFile(new_id("file"), owner, filename, purpose, len(data), int(time.time()))
        path = self.content(file.id)
        _replace(path, data)
        self._keep_file(file)
        return file

    def adopt(self, answers: Path, batch: Batch, name: str) -> str | None:
        """Makes a file of a batch's answers. Returns its id, or None if there are none."""
        file_id = f"file_{batch.id.removeprefix('batch_')}"[:-1] + (
            "0" if name == "output" else "1"
        )
        path = self.content(file_id)
        if answers.exists() and answers.stat().st_size:
            os.replace(answers, path)
        answers.unlink(missing_ok=True)
        if not path.exists():
            return None
        size, filename = path.stat().st_size, f"{batch.id}_{name}.jsonl"
        now = int(time.time())
        self._keep_file(StoredFile(file_id, batch.owner, filename, "batch_output", size, now))
        return file_id

    def _keep_file(self, file: StoredFile) -> None:
        _replace(self._files / f"{file.id}.json", msgspec.json.encode(file))
        self.files[file.id] = file

    def delete_file(self, file: StoredFile) -> None:
        (self._files / f"{file.id}.json").unlink(missing_ok=True)
        self.content(file.id).unlink(missing_ok=True)
        del self.files[file.id]

    def keep(self, batch: Batch) -> None:
        _replace(self._batches / f"{batch.id}.json", msgspec.json.encode(batch))
        self.batches[batch.id] = batch


def new_id(kind: str) -> str:
    # The last digit tells files of answers apart.
    return f"{kind}_{secrets.token_hex(12)[:-1]}2"


def _given(stored: dict[str, Stored], name: str, kind: str) -> Stored:
    found = stored.get(name)
    if found is None or not found.owner.calls:
        raise HttpRefusal(f"No such {kind}: {name[:80]!r}", 404, "not_found")
    return found


def _read(folder: Path, kind: type[Stored]) -> Iterator[Stored]:
    for path in sorted(folder.glob("*.json")):
        if not _ID.fullmatch(path.stem):
            continue
        try:
            yield msgspec.json.decode(path.read_bytes(), type=kind)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path} cannot be read: {error}; move it away") from error


def _replace(path: Path, data: bytes) -> None:
    """The file has the old or the new content, also after a power failure."""
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)

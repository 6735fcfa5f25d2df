"""Stores blocks of KV on disk, one file for each block (`transfer/block_file.py`).

A worker locks the first worker folder that no other process has locked. A worker never changes
files of another namespace.

Every call returns immediately with a future of a `DiskOutcome`. The future never raises an
exception: if the disk is full, read-only, slow or missing, the outcome names the cause."""

import contextlib
import fcntl
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from jdisagg.transfer.block_file import (
    FAILED,
    FOREIGN,
    GONE,
    KILLED,
    LOCKED,
    SUFFIX,
    UNFINISHED,
    VERSION_DIFFERS,
    SavedArray,
    SpoiledFileError,
    cause_of,
    read_block,
    read_header,
    write_block,
)

MOST_WORKERS = 64  # limit of the workers that use one directory
CLOSE_SECONDS = 2.0  # time that `close` leaves to a write
LOCK = "lock"
SECRET, SECRET_BYTES = "key", 32

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiskOutcome:
    """The result of one call of `DiskStore`. A call sets only the fields that belong to its kind of
    operation.

    Attributes:
        error: Name of the cause of a failure (`block_file.cause_of`), or "".
        ages: Seconds since each block in `names` was written.
        skipped: Number of files without a valid block, by cause.
    """

    error: str = ""
    names: tuple[bytes, ...] = ()
    ages: tuple[float, ...] = ()
    arrays: tuple[SavedArray, ...] = ()
    checksums: tuple[int, ...] = ()
    skipped: tuple[tuple[str, int], ...] = ()
    bytes: int = 0


class DiskStore:
    def __init__(self, directory: str, name: str) -> None:
        self._directory = Path(directory).expanduser()
        self._writing = _Line(f"{name}-disk-out")
        self._reading = _Line(f"{name}-disk-in")
        self._namespace = b""
        self._folder: Path | None = None  # of this worker
        self._lock: int | None = None

    def find(self, namespace: bytes) -> "Future[DiskOutcome]":
        """Locks a worker folder and lists its blocks, least recently used first. Counts files
        without a valid block, and removes such a file unless it belongs to another namespace or
        format version."""

        def find() -> DiskOutcome:
            try:
                return self._find(namespace)
            except Exception as error:
                _log.warning("KV on disk: %s cannot be used: %s", self._directory, error)
                raise

        return self._writing.submit(find)

    def write(
        self,
        name: bytes,
        index: int,
        arrays: Callable[[], Sequence[SavedArray]],
        checksums: tuple[int, ...],
    ) -> "Future[DiskOutcome]":
        def write() -> DiskOutcome:
            path = self._path(name)
            bytes_ = write_block(
                path, self._namespace, name, arrays(), checksums, written_at=time.time()
            )
            _used(path, index)
            return DiskOutcome(bytes=bytes_)

        return self._writing.submit(write)

    def read(self, name: bytes, index: int) -> "Future[DiskOutcome]":
        def read() -> DiskOutcome:
            path = self._path(name)
            arrays, checksums, bytes_ = read_block(path, self._namespace, name)
            _used(path, index)
            return DiskOutcome(arrays=arrays, checksums=checksums, bytes=bytes_)

        return self._reading.submit(read)

    def remove(self, names: Sequence[bytes]) -> "Future[DiskOutcome]":
        def remove() -> DiskOutcome:
            for name in names:
                self._path(name).unlink(missing_ok=True)
            return DiskOutcome()

        return self._writing.submit(remove)

    def remove_all(self) -> "Future[DiskOutcome]":
        """Removes this namespace's blocks in this worker's folder and in worker folders that no
        process has locked."""
        return self._writing.submit(self._remove_all)

    def close(self) -> None:
        """Drops the calls that have not started. Idempotent."""
        self._reading.close(0.0)
        if self._writing.close(CLOSE_SECONDS) and self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _path(self, name: bytes) -> Path:
        if self._folder is None:
            raise SpoiledFileError(GONE)
        return self._folder / (name.hex() + SUFFIX)

    def _find(self, namespace: bytes) -> DiskOutcome:
        self._namespace = namespace
        home = self._home(namespace)
        self._directory.mkdir(0o700, exist_ok=True)
        home.mkdir(0o700, exist_ok=True)
        for number in range(MOST_WORKERS):
            folder = home / str(number)
            folder.mkdir(0o700, exist_ok=True)
            lock = _locked(folder)
            if lock is not None:
                self._folder, self._lock = folder, lock
                return _look(folder, namespace)
        return DiskOutcome(LOCKED)

    def _home(self, namespace: bytes) -> Path:
        return self._directory / namespace[:8].hex()

    def _remove_all(self) -> DiskOutcome:
        if not self._namespace:
            raise SpoiledFileError(GONE)
        home = self._home(self._namespace)
        for folder in list(home.iterdir()) if home.exists() else ():
            lock = None
            try:
                if folder == self._folder or (lock := _locked(folder)) is not None:
                    for path in list(folder.iterdir()):
                        if path.suffix in (SUFFIX, UNFINISHED):
                            path.unlink(missing_ok=True)
            finally:
                if lock is not None:
                    os.close(lock)
        return DiskOutcome()


def _look(folder: Path, namespace: bytes) -> DiskOutcome:
    found: list[tuple[float, bytes, float]] = []
    now = time.time()
    skipped: dict[str, int] = {}
    for entry in list(os.scandir(folder)):
        path = Path(entry.path)
        if path.suffix not in (SUFFIX, UNFINISHED):
            continue
        try:
            if path.suffix == UNFINISHED:
                raise SpoiledFileError(KILLED)
            with path.open("rb") as file:
                header = read_header(file, namespace)
            if header.name.hex() != path.stem:
                raise SpoiledFileError(FOREIGN)
            age = max(0.0, now - header.written_at)  # 0 if the clock was set back
            found.append((entry.stat().st_mtime, header.name, age))
        except (SpoiledFileError, OSError) as error:
            cause = cause_of(error)
            skipped[cause] = skipped.get(cause, 0) + 1
            if isinstance(error, SpoiledFileError) and cause not in (FOREIGN, VERSION_DIFFERS):
                _removed(path)
    found.sort()
    names, ages = tuple([one[1] for one in found]), tuple([one[2] for one in found])
    return DiskOutcome(names=names, ages=ages, skipped=tuple(sorted(skipped.items())))


def _locked(folder: Path) -> int | None:
    lock = os.open(folder / LOCK, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except BaseException:
        os.close(lock)
        raise
    return lock


def _removed(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s could not be removed: %s", path, error)


def _used(path: Path, index: int) -> None:
    """Later blocks of a sequence get slightly earlier times, so that they are evicted first."""
    instant = time.time() - index
    with contextlib.suppress(OSError):
        os.utime(path, (instant, instant))


class _Line:
    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[
            tuple[Callable[[], DiskOutcome], Future[DiskOutcome]] | None
        ] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, call: Callable[[], DiskOutcome]) -> "Future[DiskOutcome]":
        future: Future[DiskOutcome] = Future()
        if self._closed:
            future.set_result(DiskOutcome(GONE))
            return future
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._calls.put((call, future))
        return future

    def close(self, seconds: float) -> bool:
        self._closed = True
        if self._thread is None:
            return True
        self._calls.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            future.set_result(DiskOutcome(GONE) if self._closed else _outcome(call))
            del item, call, future  # they hold arrays


def _outcome(call: Callable[[], DiskOutcome]) -> DiskOutcome:
    try:
        return call()
    except Exception as error:
        cause = cause_of(error)
        if cause == FAILED:
            _log.warning("KV on disk: %s: %s", type(error).__name__, error)
        return DiskOutcome(cause)


def directory_secret(directory: str) -> bytes:
    """Returns the random secret that is stored in `directory`, and creates it at first use. If
    the secret cannot be stored, each process uses a new secret, and a restarted worker finds no
    blocks."""
    root, fresh = Path(directory).expanduser(), secrets.token_bytes(SECRET_BYTES)
    path = root / SECRET
    try:
        root.mkdir(0o700, exist_ok=True)
        made = root / f"{SECRET}.{fresh[:8].hex()}"
        try:
            with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(fresh)
            if path.exists() and path.stat().st_size != SECRET_BYTES:
                path.unlink()
            try:
                os.link(made, path)  # unless another process was faster
            except FileExistsError:
                path.chmod(0o600)
        finally:
            made.unlink(missing_ok=True)
        return path.read_bytes()
    except OSError as error:
        _log.warning(
            "KV on disk: %s cannot be stored (%s); a restarted worker will find no blocks",
            path,
            error,
        )
        return fresh

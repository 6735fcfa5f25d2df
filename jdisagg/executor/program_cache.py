"""JAX's persistent compilation cache, made safe for concurrent processes. By default the cache is
in the user's cache folder. Entries are written atomically. If several processes need the same
program at the same time, one process compiles it while the other processes wait for the entry."""

import fcntl
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import jax

# JAX has no public API to replace the cache. Versions 0.10 to 0.12 have these private names, and
# tests fail for a JAX without them.
from jax._src import cache_key
from jax._src import compilation_cache as jax_cache
from jax._src.compilation_cache_interface import CacheInterface

from jdisagg.settings.folders import made_folder

LONGEST_WAIT_SECONDS = (
    600.0  # longest wait for a program that another process compiles; longer than any compilation
)
_POLL_SECONDS = 0.02
# Options of XLA that say where results of autotuning are. A program is found whatever they are.
_WHERE = {"xla_gpu_load_autotune_results_from", "xla_gpu_dump_autotune_results_to"}
_COMPILED = "/jax/core/compile/backend_compile_duration"


def use_compilation_cache(directory: str) -> None:
    """Makes JAX cache compiled programs in `directory`; "" disables the cache. An entry's key
    covers the program, the versions of the software and the devices. Raises ConfigError if the
    folder cannot be created."""
    if not directory:
        jax.config.update("jax_compilation_cache_dir", None)
        return
    path = made_folder(
        "compilation_cache",
        directory,
        "name a folder that can be written, or '' to keep no programs",
    )
    jax_cache.get_file_cache = _program_cache
    cache_key.env_override_flags_to_exclude_from_cache_key |= _WHERE
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def keep_apart(text: str) -> None:
    """Makes this process find only programs that were compiled with the same `text`."""
    cache_key.custom_hook = lambda: text


def _program_cache(path: str) -> tuple[CacheInterface, str]:
    cache = ProgramCache(Path(path))
    jax.monitoring.register_event_duration_secs_listener(cache.on_event)
    return cache, path


class ProgramCache(CacheInterface):
    """A compilation cache with one file per program, which several processes may share. JAX first
    reads an entry. If there is none, JAX compiles the program and writes the entry in the same
    thread. Until then, this thread holds a file lock on the entry, and other threads and processes
    that need the entry wait. The kernel releases the lock when a process ends. A thread holds at
    most one lock, and none while it waits, so that there is no deadlock."""

    def __init__(self, path: Path, longest_wait: float = LONGEST_WAIT_SECONDS) -> None:
        self._path = path
        self._longest_wait = longest_wait
        self._compiling = threading.local()  # `lock`: the file that a thread has locked for its key

    def get(self, key: str) -> bytes | None:
        self._unlock()  # the thread's earlier compilation failed or could not be written
        entry = self._read(key)
        if entry is not None or jax.process_count() > 1:
            # The processes of one instance compile in lockstep, so none of them may wait for
            # another instance.
            return entry
        self._lock(key)
        entry = self._read(key)
        if entry is not None:
            self._unlock()
        return entry

    def put(self, key: str, value: bytes) -> None:
        """Replaces an existing file, because JAX compiles only if the file could not be read."""
        try:
            self._write(key, value)
        finally:
            self._unlock()
            self._lock_file(key).unlink(missing_ok=True)

    def on_event(self, event: str, duration_secs: float, **_: object) -> None:
        """Releases the lock on an entry. JAX calls this in the thread that has compiled a program,
        even if no entry was written."""
        if event == _COMPILED:
            self._unlock()

    def _entry(self, key: str) -> Path:
        return self._path / f"{key}-cache"

    def _lock_file(self, key: str) -> Path:
        return self._path / f"{key}-lock"

    def _read(self, key: str) -> bytes | None:
        """Never waits for another process."""
        try:
            return self._entry(key).read_bytes()
        except FileNotFoundError:
            return None

    def _write(self, key: str, value: bytes) -> None:
        """Writes an entry in one step, so that no reader sees a part of it."""
        new = self._path / f"{key}-{os.getpid()}-{threading.get_ident()}.new"
        try:
            new.write_bytes(value)
            new.replace(self._entry(key))
        finally:
            new.unlink(missing_ok=True)

    def _lock(self, key: str) -> None:
        """If locking fails, the program is compiled without a lock."""
        with suppress(OSError):
            lock = os.open(self._lock_file(key), os.O_RDWR | os.O_CREAT, 0o600)
            self._compiling.lock = lock
            until = time.monotonic() + self._longest_wait
            while time.monotonic() < until:
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                time.sleep(_POLL_SECONDS)

    def _unlock(self) -> None:
        lock = getattr(self._compiling, "lock", None)
        if lock is not None:
            self._compiling.lock = None
            os.close(lock)

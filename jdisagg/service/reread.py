"""Values that are read from files, and read again when a file changes.

Certificates and tokens can thus be renewed without a restart. If a file becomes unreadable or
invalid, the old value stays in use and a warning is logged."""

import logging
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from jdisagg.errors import ConfigError

Value = TypeVar("Value")

LOOK_SECONDS = 1.0

log = logging.getLogger(__name__)


class Reread(Generic[Value]):
    """A value that is computed from files, and computed again when a file has changed.

    Args:
        paths: Files to check for changes. Empty paths are ignored.
        read: Function that reads the files and returns the value. The constructor passes on its
            errors.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], Value]) -> None:
        self._paths = [pathlib.Path(path).expanduser() for path in paths if path]
        self._read = read
        self._changed = self._changes()
        self._looked = time.monotonic()
        self._value = read()

    def __call__(self) -> Value:
        """Returns the latest value. Checks the files for changes at most once in `LOOK_SECONDS`."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            changed = self._changes()
            if changed != self._changed:
                self._changed = changed
                self._refresh()
        return self._value

    def _refresh(self) -> None:
        names = ", ".join(map(str, self._paths))
        try:
            self._value = self._read()
            log.info("reread %s", names)
        except ConfigError as error:
            log.warning("%s changed but cannot be used; the old value stays: %s", names, error)

    def _changes(self) -> list[tuple[int, ...]]:
        return [_identity(path) for path in self._paths]


def _identity(path: pathlib.Path) -> tuple[int, ...]:
    """The time of change alone is not enough: some tools give all their files the same one."""
    try:
        found = path.stat()
    except OSError:  # such as a file that is being replaced
        return ()
    return found.st_mtime_ns, found.st_ino, found.st_size

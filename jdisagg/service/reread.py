"""What files hold, read again when one of them changes: certificates and tokens are renewed without
a restart. Files that cannot be read, or hold nonsense, change nothing, and the log says so."""

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
    """The value that `read` makes of the files. Making one raises what `read` raises."""

    def __init__(self, paths: Sequence[str], read: Callable[[], Value]) -> None:
        self._paths = [pathlib.Path(path).expanduser() for path in paths if path]
        self._read = read
        self._changed = self._changes()
        self._looked = time.monotonic()
        self._value = read()

    def __call__(self) -> Value:
        """The latest; the files are looked at once in `LOOK_SECONDS`."""
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
            log.info("read again: %s", names)
        except ConfigError as error:
            log.warning(
                "%s changed and cannot be used, what was read before stays: %s", names, error
            )

    def _changes(self) -> list[int]:
        """Modification times; 0 for a file that is away."""
        return [path.stat().st_mtime_ns if path.exists() else 0 for path in self._paths]

"""Whether a worker like this one was warm on this machine before: then its programs lie in the compilation cache. And how long loading
them will take.

A mark beside the cache, named by all that decides which programs there are: configuration, role, model and versions. It promises nothing:
where the cache was cleared, programs are compiled while requests wait, as they would be without a warm-up.
"""

import hashlib
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax

from jdisagg import __version__
from jdisagg.config import LimitsConfig, ServiceConfig
from jdisagg.dispatch.ports import WorkerRole
from jdisagg.engine.instance import WorkerConfig

FIRST_GUESS_SECONDS = 5.0  # before the first program says how long one takes


class WarmedBefore:
    def __init__(self, config: WorkerConfig, role: WorkerRole, fingerprint: str) -> None:
        self._mark: Path | None = None
        if config.compilation_cache:
            programs = replace(config, service=ServiceConfig(), limits=LimitsConfig(), compilation_cache="")
            devices = [(device.platform, device.device_kind) for device in jax.local_devices()]
            words = repr((programs, role, fingerprint, devices, jax.__version__, __version__, platform.python_version()))
            name = hashlib.sha256(words.encode()).hexdigest()[:32]
            self._mark = Path(config.compilation_cache).expanduser() / f"warmed-{name}"

    def found(self) -> bool:
        return self._mark is not None and self._mark.exists()

    def note(self) -> None:
        """All programs have been compiled."""
        if self._mark is not None and self._mark.parent.is_dir():
            self._mark.touch()


class Loading:
    """Seconds until all programs are loaded, as the pace so far foretells it."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._began = now()
        self._done = self._left = 0
        self._over = False

    def progress(self, done: int, total: int) -> None:
        self._done, self._left = done, total - done

    def end(self) -> None:
        """No more are loaded, for whatever reason."""
        self._over = True

    def seconds(self) -> float:
        if self._over:
            return 0.0
        if not self._done:
            return FIRST_GUESS_SECONDS
        return (self._now() - self._began) / self._done * self._left

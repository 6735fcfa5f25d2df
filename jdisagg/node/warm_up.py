"""Helpers for warm-up, which compiles a worker's programs before requests need them.

The helpers are a progress bar, an estimate of the loading time, the loading of programs while a
worker serves, and a mark. The mark is a file that records that this machine has compiled all
programs of a configuration before. It is in the folder of the compilation cache. Its name contains
a hash of everything that determines the programs: configuration, role, model and versions. Its
content is the measured times of the programs. If the cache was cleared and the mark was not,
requests wait until their programs are compiled."""

import contextlib
import hashlib
import logging
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import jax
import msgspec
from tqdm import tqdm

from jdisagg import __version__
from jdisagg.config import EngineConfig, LimitsConfig, ServiceConfig, WorkerConfig
from jdisagg.costs.measured import StepTimes
from jdisagg.engine.replica import Replica, load_rest, warm_up
from jdisagg.messages.worker_status import WorkerRole

_logger = logging.getLogger(__name__)

LOG_SECONDS = 2.0
MESH = "mesh"  # name of a worker's mesh in its mark
FIRST_GUESS_SECONDS = 5.0  # estimate before the first program has been timed


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Context manager that shows the progress of warm-up. On a terminal, shows a bar on stderr if
    warm-up takes long. Without a terminal, logs a line every `LOG_SECONDS`. Yields a function with
    the arguments (done, total), which the caller calls after each program."""
    logged_at = time.monotonic()
    with tqdm(
        desc=what, unit="program", delay=2, file=sys.stderr, leave=False, disable=None
    ) as bar:

        def progress(done: int, total: int) -> None:
            nonlocal logged_at
            bar.total = total
            bar.update(done - bar.n)
            if bar.disable and time.monotonic() - logged_at >= LOG_SECONDS:
                logged_at = time.monotonic()
                # cluster.py parses this line for its table.
                _logger.info("compiled %d of %d programs", done, total)

        yield progress


class WarmedBefore:
    """The mark that this machine has compiled all programs for a configuration and role before.

    Args:
        role: Role of the worker. None for all meshes of an embedded cluster.
        fingerprint: Hash that identifies the model.
    """

    def __init__(
        self, config: WorkerConfig | EngineConfig, role: WorkerRole | None, fingerprint: str
    ) -> None:
        self._mark: Path | None = None
        if config.compilation_cache:
            programs = replace(
                config,
                service=ServiceConfig(),
                limits=LimitsConfig(),
                # Programs depend on whether there is a host tier, and not on its size.
                prefix=replace(config.prefix, host_gib=config.prefix.host_gib and 1.0),
                compilation_cache="",
            )
            devices = [(device.platform, device.device_kind) for device in jax.local_devices()]
            words = repr(
                (
                    programs,
                    role,
                    fingerprint,
                    devices,
                    jax.__version__,
                    __version__,
                    platform.python_version(),
                )
            )
            name = hashlib.sha256(words.encode()).hexdigest()[:32]
            self._mark = Path(config.compilation_cache).expanduser() / f"warmed-{name}"

    def found(self) -> bool:
        return self._mark is not None and self._mark.exists()

    def times(self, mesh: str) -> StepTimes | None:
        """Returns the times of a mesh's programs, which were measured when the mark was written.
        Returns None if there is no mark, or if it has no times for the mesh."""
        try:
            text = self._mark.read_bytes() if self._mark is not None else b""
            return msgspec.json.decode(text, type=dict[str, StepTimes]).get(mesh)
        except (OSError, msgspec.MsgspecError):
            return None

    def note(self, times: Mapping[str, StepTimes | None]) -> None:
        """Writes the mark. Called when all programs have been compiled.

        Args:
            times: Measured times of each mesh's programs, by name of the mesh.
        """
        if self._mark is not None and self._mark.parent.is_dir():
            known = {mesh: of_mesh for mesh, of_mesh in times.items() if of_mesh is not None}
            self._mark.write_bytes(msgspec.json.encode(known))


class Loading:
    """Estimates the time until all programs are loaded, from the mean loading time of the programs
    so far. `now` is the clock, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since = now()
        self._spent = 0.0
        self._done = self._left = 0
        self._over = False

    def resume(self) -> None:
        """Called when the loading continues after a wait for an idle mesh. Excludes the time since
        the last program from the estimate."""
        self._since = self._now()

    def progress(self, done: int, total: int) -> None:
        self._done, self._left = done, total - done
        now = self._now()
        self._spent += now - self._since
        self._since = now

    def end(self) -> None:
        """Records that all programs are loaded. The estimate is 0 from now on."""
        self._over = True

    def seconds(self) -> float:
        if self._over:
            return 0.0
        if not self._done:
            return FIRST_GUESS_SECONDS
        return self._spent / self._done * self._left


class LaterPrograms:
    """The programs that a worker loads while it serves.

    Args:
        name: Name of the worker.
        mark: Mark to write when all programs are compiled. None if the mark exists. In this case no
            program is loaded yet, and a request may wait for its program.
        now: Clock in seconds.
    """

    def __init__(
        self, name: str, replica: Replica, mark: WarmedBefore | None, now: Callable[[], float]
    ) -> None:
        self._name, self._replica, self._mark, self._now = name, replica, mark, now
        self.loading = Loading(now)
        if mark is not None:
            self.loading.end()

    async def load(self) -> None:
        """Loads the programs. A failure is only printed. If every request needs the program, the
        request raises the error again. If it belongs to an optional capability, the worker serves
        without it."""
        began, replicas, loading = self._now(), [self._replica], self.loading
        try:
            if self._mark is None:
                await warm_up(replicas, loading.progress, beside=True, turn=loading.resume)
                loading.end()
            await load_rest(replicas)
        except Exception as error:
            text = f"worker {self._name} could not load its programs beforehand: {error}"
            print(text, file=sys.stderr, flush=True)
            return
        finally:
            loading.end()
        if self._mark is not None:
            self._mark.note({MESH: self._replica.times})
        seconds = self._now() - began
        print(f"worker {self._name} is warm after {seconds:.1f} s of serving", flush=True)

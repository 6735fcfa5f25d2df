"""Lets all workers of a kind use the same results of XLA's autotuning.

On a GPU, XLA times several kernels for a matrix product and takes the fastest. Processes that tune
apart may take different kernels, whose sums differ in the last bits, and a stream that moves
between them may change. Therefore the first start of a kind of worker writes its results to a file
in the folder of compiled programs, and later starts load this file.

A kind is all that determines the programs: device, versions, model, role, layout and sizes. Workers
tell each other the kind and the file's digest when they meet (`worker/peers.py`)."""

import fcntl
import hashlib
import logging
import os
import re
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from jdisagg.clock import Clock
from jdisagg.errors import ConfigError
from jdisagg.executor.program_cache import LONGEST_WAIT_SECONDS, keep_apart
from jdisagg.layout.platforms import traits_of

log = logging.getLogger(__name__)

LOAD, DUMP = "xla_gpu_load_autotune_results_from", "xla_gpu_dump_autotune_results_to"
_POLL_SECONDS = 0.2


def kind_name(device_kind: str, *programs: object) -> str:
    """Names a kind of worker: its device, the version of XLA, and a digest of `programs`, which is
    everything else that determines its programs."""
    digest = hashlib.sha256(repr(programs).encode()).hexdigest()[:16]
    return re.sub(r"[^\w.]+", "-", f"{device_kind} {version('jaxlib')} {digest}").lower()


class Autotuning:
    """The autotune results of one worker.

    Args:
        kind: See `kind_name`.
        folder: Folder of compiled programs. Empty if there is none; then each start tunes anew.
        given: File to load instead of that of the folder. Empty for none.
        waits: Whether a start may wait for another one of its kind that is tuning. The processes of
            one instance may not, because they compile in lockstep.
    """

    def __init__(
        self, kind: str, platform: str, folder: str, given: str = "", *, waits: bool = True
    ) -> None:
        self.options: dict[str, str] = {}
        self._kind, self._given, self._waits = kind, given, waits
        self._tunes = traits_of(platform).autotunes
        self._folder = Path(folder).expanduser() if folder else None
        self._digest = ""
        self._lock = -1

    @property
    def identity(self) -> str:
        """Kind and digest of the results in use, "KIND:DIGEST". Empty if the programs are not
        autotuned, or were found compiled without their results."""
        return f"{self._kind}:{self._digest}" if self._digest else ""

    async def begin(self, clock: Clock) -> None:
        """Decides which results the programs use. `options` are then XLA's options. Waits while
        another process tunes programs of this kind. Raises ConfigError if the given file cannot be
        read."""
        if self._given:
            self._load(Path(self._given).expanduser())
            keep_apart(self._digest)
            return
        if not self._tunes or self._folder is None:
            return
        if self._waits and not self._results.exists():
            await self._wait(clock)
        if self._results.exists():
            self._unlock()
            return self._load(self._results)
        # Results of a start that did not end belong to programs that are found compiled.
        with suppress(FileNotFoundError):
            self._part.replace(self._earlier)
        self.options[DUMP] = str(self._part)
        if self._earlier.exists():
            self.options[LOAD] = str(self._earlier)

    def finish(self) -> None:
        """Publishes the results of a first start, after all programs are compiled."""
        if DUMP not in self.options:
            return
        # XLA writes nothing if all programs were found compiled.
        written = self._part if self._part.exists() else self._earlier
        with suppress(FileNotFoundError):
            self._digest = _digest_of(written)
            with suppress(FileExistsError):
                os.link(written, self._results)
        self._part.unlink(missing_ok=True)
        self._earlier.unlink(missing_ok=True)
        self._unlock()
        if not self._digest:
            log.warning(
                "programs were found compiled and their autotune results were not; empty the folder"
                " of compiled programs to tune anew"
            )

    def _load(self, path: Path) -> None:
        try:
            self._digest = _digest_of(path)
        except OSError as error:
            raise ConfigError(
                f"autotune_results={path} cannot be read ({error.strerror}); give a file that a"
                " worker of this kind wrote, or '' for that of the folder of compiled programs"
            ) from error
        if self._tunes:
            self.options[LOAD] = str(path)
        log.info("autotune results %s of %s", self._digest, path)

    @property
    def _results(self) -> Path:
        return self._file("")

    @property
    def _part(self) -> Path:
        return self._file(".part" if self._waits else f".{os.getpid()}.part")

    @property
    def _earlier(self) -> Path:
        return self._file(".earlier")

    def _file(self, stage: str) -> Path:
        assert self._folder is not None
        return self._folder / f"autotune-{self._kind}{stage}.textproto"

    async def _wait(self, clock: Clock) -> None:
        """If the folder cannot be locked, the worker tunes apart."""
        with suppress(OSError):
            self._lock = os.open(self._file(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
            until = clock.now() + LONGEST_WAIT_SECONDS
            while clock.now() < until and not self._results.exists():
                with suppress(BlockingIOError):
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                await clock.sleep(_POLL_SECONDS)

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]

"""The folder of compiled programs that all processes of a test run and the next run share:
`JDISAGG_TEST_PROGRAMS`, or ~/.cache/jdisagg/tests. JAX finds programs by content, flags and
version, so results never depend on it."""

import contextlib
import os
import tempfile
import time
from pathlib import Path

from jdisagg.errors import ConfigError
from jdisagg.settings.folders import made_folder

VARIABLE = "JDISAGG_TEST_PROGRAMS"
KEPT_DAYS = 14


def _folder() -> Path:
    try:
        return made_folder(VARIABLE, os.environ.get(VARIABLE, "~/.cache/jdisagg/tests"))
    except ConfigError:
        if VARIABLE in os.environ:
            raise
        return Path(tempfile.mkdtemp(prefix="jdisagg-programs-"))  # no home to write to


PROGRAMS = _folder()
os.environ[VARIABLE] = str(PROGRAMS)  # for the workers of pytest-xdist
CACHE_FLAG = f"--compilation_cache={PROGRAMS}"


def forget_unused() -> None:
    """Removes programs that no run has read for two weeks."""
    oldest = time.time() - KEPT_DAYS * 86400
    for path in PROGRAMS.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another run removes it, too
            found = path.stat()
            if max(found.st_atime, found.st_mtime) < oldest:
                path.unlink()

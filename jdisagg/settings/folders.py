"""Creates output folders before the work starts, so that an unwritable folder is reported at
once."""

import os
from pathlib import Path

from jdisagg.errors import ConfigError


def made_folder(subject: str, path: str | Path, remedy: str = "give a writable folder") -> Path:
    """Creates a folder if it does not exist, and returns its path with `~` expanded.

    Raises:
        ConfigError: The folder cannot be created, or is not writable.
    """
    try:
        folder = Path(path).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("it is not writable")
    except (OSError, RuntimeError, ValueError) as error:  # no such home, or a zero byte
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f"{subject}: folder {str(path)!r} cannot be used: {reason}; {remedy}"
        ) from error
    return folder

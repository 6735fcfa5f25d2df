"""Folders that somebody will write to, made before the work whose result they are to hold."""

import os
from pathlib import Path

from jdisagg.errors import ConfigError


def made_folder(
    subject: str, path: str | Path, remedy: str = "name a folder that can be written"
) -> Path:
    """The folder, `~` resolved, made where it is not there. Raises ConfigError beginning with
    `subject` where it cannot be written to."""
    try:
        folder = Path(path).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("it may not be written to")
    except (OSError, RuntimeError, ValueError) as error:  # no such home; a zero byte in it
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f"{subject}: folder {str(path)!r} cannot be used: {reason}; {remedy}"
        ) from error
    return folder

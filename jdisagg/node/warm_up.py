"""The progress bar of warm-up, which compiles a worker's programs before it serves."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

_logger = logging.getLogger(__name__)

LOG_SECONDS = 2.0


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

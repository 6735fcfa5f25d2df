"""How a launch script ends when whoever read its output has gone, or the user wants no more: at once and without a traceback."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
READER_GONE = 1


@contextmanager
def quiet_end() -> Iterator[None]:
    """Around all that a script does."""
    try:
        yield
    except BrokenPipeError:
        # Else the interpreter flushes stdout once more at its end, and complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(READER_GONE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)

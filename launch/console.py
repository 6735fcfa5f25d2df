"""What launch scripts have in common at their beginning and at their end: they take flags alone, and when whoever read their output has
gone, or the user wants no more, they end at once and without a traceback.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jdisagg.errors import ConfigError

INTERRUPTED = 130
READER_GONE = 1


def refuse_words(arguments: Sequence[str]) -> None:
    """Raises ConfigError for what is no flag, of a main's arguments. Left alone they would be passed over: of --prompt=Once upon a time
    the prompt would be one word."""
    words = list(arguments[1:])
    if words:
        raise ConfigError(
            f"flags alone are taken, got {' '.join(map(repr, words[:8]))}{' ...' if len(words) > 8 else ''}; write --flag=value, "
            'and quote a value that has spaces: --flag="several words"'
        )


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

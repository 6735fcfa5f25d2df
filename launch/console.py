"""How a page begins and ends: it takes flags alone, shows them all with --help, and ends without a
traceback when the user, or whoever reads its output, wants no more.

    if __name__ == "__main__":
        run(main, flags)
"""

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from absl import flags as absl
from absl import logging as absl_logging

from jdisagg import __version__
from jdisagg.errors import ConfigError, JdisaggError
from launch.flags import Given

INTERRUPTED = 130
READER_GONE = 1
HELP = ("--help", "-help", "-h", "--helpfull", "--helpshort")


def run(
    main: Callable[[], int | None], given: Given, *, program: str = "", refused: int = 1
) -> NoReturn:
    """Parses the command line into `given`, runs `main` and ends with what it returns. `refused`:
    the exit status where a flag, or the configuration, cannot be."""
    _mind_signals()
    absl_logging.set_verbosity(absl_logging.WARNING)  # absl lets INFO of libraries through
    doc = sys.modules[main.__module__].__doc__ or ""
    page = program or f"python -m {_page_name(main)}"
    with quiet_end():
        if any(word in HELP for word in sys.argv[1:]):
            print(given.help_text(page, doc))
            sys.exit(0)
        if "--version" in sys.argv[1:]:
            print(f"jdisagg {__version__}")
            sys.exit(0)
        try:
            refuse_words(given.values(sys.argv))
            status = main()
        except absl.Error as error:
            text = str(error)
            if missing := [
                name for name in given.required if f"--{name}" in text and not given.present(name)
            ]:
                text = f"--{missing[0]} is not given"
            print(f"error: {text}; {page} --help shows all flags", file=sys.stderr)
            sys.exit(refused)
        except JdisaggError as error:
            print(f"error: {error.message}", file=sys.stderr, flush=True)
            sys.exit(refused)
        sys.exit(status or 0)


def refuse_words(arguments: Sequence[str]) -> None:
    """Raises ConfigError for what is no flag, of a main's arguments. Left alone they would be
    passed over: of --prompt=Once upon a time the prompt would be one word."""
    words = list(arguments[1:])
    if words:
        raise ConfigError(
            "flags alone are taken, got"
            f" {' '.join(map(repr, words[:8]))}{' ...' if len(words) > 8 else ''}; write"
            ' --flag=value, and quote a value that has spaces: --flag="several words"'
        )


@contextmanager
def quiet_end() -> Iterator[None]:
    """Around all that a page does."""
    try:
        yield
    except BrokenPipeError:
        # Else the interpreter flushes stdout once more at its end, and complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(READER_GONE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """Between the making of a coroutine and its first step Python would complain about it."""
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    raise KeyboardInterrupt


def _page_name(main: Callable[[], int | None]) -> str:
    """`launch.serve`, also where it runs as `__main__`."""
    module = sys.modules[main.__module__]
    return module.__spec__.name if module.__spec__ is not None else main.__module__


def _mind_signals() -> None:
    """Ctrl-C is a KeyboardInterrupt again once the imports are behind (launch/__init__.py), and
    SIGUSR1, which asks for timelines, ends nobody who keeps none."""
    signal.signal(signal.SIGINT, _interrupted)
    signal.signal(
        signal.SIGUSR1,
        lambda *_: logging.getLogger("launch").warning(
            "SIGUSR1 asks for a timeline, and none is kept; start with --timelines=DIR"
        ),
    )

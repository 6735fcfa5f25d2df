"""Runs a command: parses its flags, prints --help, and prints errors as one line. Ends the process
without a traceback on Ctrl-C, or if the reader of the output has closed the pipe.

    if __name__ == "__main__":
        run(main, flags)
"""

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

VARIABLE = "JDISAGG_"  # JDISAGG_NAME is the environment variable that sets the flag `name`
INTERRUPTED = 130
USAGE = 2
READER_GONE = 1
# Flags of other servers, and the flags of jdisagg that replace them.
ELSEWHERE = {
    "tensor-parallel-size": "--prefill=tp=N and --decode=tp=N",
    "tp-size": "--prefill=tp=N and --decode=tp=N",
    "max-model-len": "--context_tokens",
    "gpu-memory-utilization": "--memory_fraction",
    "max-num-seqs": "--slots_per_rank",
    "quantization": "--weights or --kv_dtype",
    "kv-cache-dtype": "--kv_dtype",
    "enable-prefix-caching": "--prefix_cache",
    "api-key": "--token_file",
}
HELP_ALL = ("--helpfull", "--help=all")
HELP = ("--help", "-help", "-h", "--helpshort", *HELP_ALL)


def run(
    main: Callable[[], int | None], given: Given, *, program: str = "", refused: int = 1
) -> NoReturn:
    """Parses the command line into `given`, runs `main`, and exits with the status of `main`.

    Args:
        main: Function that runs the command. Its module's docstring begins --help.
        refused: Exit status for a configuration that cannot work. If it is not 1, a supervisor
            depends on it, and wrong usage of flags exits with this status too. If it is 1, wrong
            usage exits with status 2.
    """
    _mind_signals()
    absl_logging.set_verbosity(absl_logging.WARNING)  # absl lets INFO of libraries through
    doc = sys.modules[main.__module__].__doc__ or ""
    page = program or _command(main)
    usage = USAGE if refused == 1 else refused
    with quiet_end():
        if any(word in HELP for word in sys.argv[1:]):
            from launch.settings import recipe_defaults  # gRPC and more, which only help needs

            every = any(word in HELP_ALL for word in sys.argv[1:])
            print(given.help_text(page, doc, recipe_defaults(given.names), every))
            sys.exit(0)
        if "--version" in sys.argv[1:]:
            print(f"jdisagg {__version__}")
            sys.exit(0)
        try:
            refuse_words(parsed(given, sys.argv), given)
        except (absl.Error, ConfigError) as error:
            text = _usage_error(error, given)
            for name, _ in from_environment(given, sys.argv[1:]):
                text += f" ({VARIABLE}{name.upper()} is set)" if f"--{name}" in text else ""
            print(f"error: {text}; see {page} --help", file=sys.stderr)
            sys.exit(usage)
        try:
            given.check()
            status = main()
        except JdisaggError as error:
            print(f"error: {error.message}", file=sys.stderr, flush=True)
            sys.exit(refused)
        sys.exit(status or 0)


def refuse_words(arguments: Sequence[str], given: Given) -> None:
    """Raises ConfigError if there are arguments that are not flags. absl would ignore such
    arguments: for example, --prompt=Once upon a time would be a prompt of one word."""
    words = list(arguments[1:])
    if not words:
        return
    shown = f"{' '.join(map(repr, words[:8]))}{' ...' if len(words) > 8 else ''}"
    remedy = "write --flag=value, with quotes around a value that has spaces"
    if len(words) == 1 and "model" in given.names:
        remedy = "a model comes first, or as --model="
    raise ConfigError(f"unexpected argument{'s' * (len(words) > 1)} {shown}; {remedy}")


def parsed(given: Given, arguments: Sequence[str]) -> list[str]:
    """Parses the flags of a command line into `given`, and returns the arguments that are not
    flags.

    The first argument may be the model instead of a flag. Dashes in the name of a flag are accepted
    in place of underscores (`--http-port`), because other servers use dashes. An environment
    variable JDISAGG_NAME sets the flag `name` if the command line does not."""
    rest = list(arguments[1:])
    if rest and not rest[0].startswith("-") and "model" in given.names:
        rest[0] = f"--model={rest[0]}"
    child = any(text.startswith("--config_file=") for text in rest)  # of `jdisagg cluster`
    found = () if child else from_environment(given, rest)
    texts = [f"--{name}={value}" for name, value in found]
    return given.values([arguments[0], *texts, *_underscored(given, rest)])


def from_environment(given: Given, arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    words = {text.partition("=")[0] for text in _underscored(given, arguments)}
    for name in given.names:
        value = os.environ.get(VARIABLE + name.upper())
        if name.endswith("port") and "://" in (value or ""):
            continue  # JDISAGG_PORT=tcp://... is what Kubernetes sets for a Service named jdisagg
        if value is not None and words.isdisjoint((f"--{name}", f"--no{name}")):
            yield name, value


def _underscored(given: Given, arguments: Sequence[str]) -> Iterator[str]:
    for text in arguments:
        name, equals, value = text.partition("=")
        plain = name.lstrip("-").replace("-", "_")
        known = plain in given.names or plain.removeprefix("no") in given.names
        dashed = name.startswith("--") and "-" in name[2:] and known
        yield f"--{plain}{equals}{value}" if dashed else text


def _usage_error(error: Exception, given: Given) -> str:
    text = str(error)
    for name in given.required:
        if f"--{name}" in text and not given.present(name):
            return f"--{name} is required"
    for other, ours in ELSEWHERE.items():
        if f"'{other}'" in text:
            return f"--{other} is not a flag of jdisagg; use {ours}"
    return text.rstrip(".")


@contextmanager
def quiet_end() -> Iterator[None]:
    """Ends the process without a traceback on Ctrl-C, or if the reader of its output has closed the
    pipe."""
    try:
        yield
    except BrokenPipeError:
        # Otherwise the interpreter flushes stdout again at its end and prints an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(READER_GONE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    raise KeyboardInterrupt


def _command(main: Callable[[], int | None]) -> str:
    module = sys.modules[main.__module__]
    name = module.__spec__.name if module.__spec__ is not None else main.__module__
    folder, _, last = name.rpartition(".")
    return f"jdisagg {last}" if folder == "launch" else f"python -m {name}"


def _mind_signals() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again, which launch/__init__.py prevents during
    imports."""
    signal.signal(signal.SIGINT, _interrupted)

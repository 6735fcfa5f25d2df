"""Frees the weights and KV pages of workers, which accept no requests until `jdisagg wake`.

    jdisagg sleep --target=localhost:8000 --sleep_level=2

Level 1 copies the weights to host memory. Level 2 drops them, and the worker reads them again from
their folder when it wakes (docs/weights.md)."""

from collections.abc import Mapping

from jdisagg.messages.weights import SLEEP_SECONDS
from launch.console import run
from launch.flags import CLIENT, HTTP_TARGET, Given, define
from launch.settings import administration

flags = define(
    *(*CLIENT, "worker", "sleep_level", "deadline_seconds", "token_file"),
    target=HTTP_TARGET,
    worker=(None, "Name of the only worker. Default: all workers."),
    deadline_seconds=SLEEP_SECONDS,
    token_file="",
)


def main() -> None:
    level, seconds = flags.sleep_level, flags.deadline_seconds
    report(administration(flags).sleep(level, workers_of(flags), deadline_seconds=seconds))


def workers_of(chosen: Given) -> tuple[str, ...]:
    """Returns the names of the workers that --worker selects. () means all workers."""
    return () if chosen.worker is None else (chosen.worker,)


def report(asleep: Mapping[str, bool]) -> None:
    for name, sleeps in asleep.items():
        print(f"worker {name} {'sleeps' if sleeps else 'is awake'}")


if __name__ == "__main__":
    run(main, flags)

"""Frees the weights and KV pages of workers, which accept no requests until `jdisagg wake`.

    jdisagg sleep --target=localhost:8700 --sleep_level=2

Level 1 copies the weights to host memory. Level 2 drops them, and the worker reads them again from
their folder when it wakes (docs/weights.md)."""

from collections.abc import Sequence

from jdisagg.client import Client
from jdisagg.messages.weights import SLEEP_SECONDS
from jdisagg.messages.worker_status import WorkerStatus
from launch.console import run
from launch.flags import CLIENT, Given, define
from launch.settings import credentials

flags = define(
    *(*CLIENT, "worker", "sleep_level", "deadline_seconds", "token_file"),
    worker=(None, "Name of the only worker. Default: all workers."),
    deadline_seconds=SLEEP_SECONDS,
    token_file="",
)


def main() -> None:
    level, seconds = flags.sleep_level, flags.deadline_seconds
    with Client(flags.target, credentials=credentials(flags, flags.token_file)) as client:
        report(client.sleep(level, workers_of(flags), deadline_seconds=seconds))


def workers_of(chosen: Given) -> tuple[str, ...]:
    """Returns the names of the workers that --worker selects. () means all workers."""
    return () if chosen.worker is None else (chosen.worker,)


def report(statuses: Sequence[WorkerStatus]) -> None:
    for status in statuses:
        print(f"worker {status.name} {'sleeps' if status.asleep else 'is awake'}")


if __name__ == "__main__":
    run(main, flags)

"""Frees the weights and KV pages of workers, which take no requests until `jdisagg wake`.

    jdisagg sleep --target=localhost:8700 --sleep_level=2

Level 1 keeps the weights in host memory, level 2 reads them again at the end of the sleep
(docs/weights.md)."""

from jdisagg.client import Client
from jdisagg.messages.weights import SLEEP_SECONDS
from launch.console import run
from launch.flags import CLIENT, define
from launch.settings import credentials

flags = define(
    "target",
    "worker",
    "sleep_level",
    "deadline_seconds",
    "token_file",
    *CLIENT[1:],
    worker=(None, "Name of the only worker. Default: all workers."),
    deadline_seconds=SLEEP_SECONDS,
    token_file="",
)


def main() -> None:
    workers = () if flags.worker is None else (flags.worker,)
    with Client(flags.target, credentials=credentials(flags, flags.token_file)) as client:
        for status in client.sleep(
            flags.sleep_level, workers, deadline_seconds=flags.deadline_seconds
        ):
            print(f"worker {status.name} {'sleeps' if status.asleep else 'is awake'}")


if __name__ == "__main__":
    run(main, flags)

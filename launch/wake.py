"""Ends the sleep of workers that `jdisagg sleep` began.

jdisagg wake --target=localhost:8700"""

from jdisagg.client import Client
from jdisagg.messages.weights import UPDATE_SECONDS
from launch.console import run
from launch.flags import CLIENT, define
from launch.settings import credentials

flags = define(
    "target",
    "worker",
    "deadline_seconds",
    "token_file",
    *CLIENT[1:],
    worker=(None, "Name of the only worker. Default: all workers."),
    deadline_seconds=UPDATE_SECONDS,
    token_file="",
)


def main() -> None:
    workers = () if flags.worker is None else (flags.worker,)
    with Client(flags.target, credentials=credentials(flags, flags.token_file)) as client:
        for status in client.wake(workers, deadline_seconds=flags.deadline_seconds):
            print(f"worker {status.name} {'sleeps' if status.asleep else 'is awake'}")


if __name__ == "__main__":
    run(main, flags)

"""Ends the sleep of workers that `jdisagg sleep` began.

jdisagg wake --target=localhost:8700"""

from jdisagg.client import Client
from jdisagg.messages.weights import UPDATE_SECONDS
from launch.console import run
from launch.flags import CLIENT, define
from launch.settings import credentials
from launch.sleep import report, workers_of

flags = define(
    *(*CLIENT, "worker", "deadline_seconds", "token_file"),
    worker=(None, "Name of the only worker. Default: all workers."),
    deadline_seconds=UPDATE_SECONDS,
    token_file="",
)


def main() -> None:
    with Client(flags.target, credentials=credentials(flags, flags.token_file)) as client:
        report(client.wake(workers_of(flags), deadline_seconds=flags.deadline_seconds))


if __name__ == "__main__":
    run(main, flags)

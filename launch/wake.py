"""Ends the sleep of workers that `jdisagg sleep` began.

jdisagg wake --target=localhost:8000"""

from jdisagg.messages.weights import UPDATE_SECONDS
from launch.console import run
from launch.flags import CLIENT, HTTP_TARGET, define
from launch.settings import administration
from launch.sleep import report, workers_of

flags = define(
    *(*CLIENT, "worker", "deadline_seconds", "token_file"),
    target=HTTP_TARGET,
    worker=(None, "Name of the only worker. Default: all workers."),
    deadline_seconds=UPDATE_SECONDS,
    token_file="",
)


def main() -> None:
    admin, seconds = administration(flags), flags.deadline_seconds
    report(admin.wake(workers_of(flags), deadline_seconds=seconds))


if __name__ == "__main__":
    run(main, flags)

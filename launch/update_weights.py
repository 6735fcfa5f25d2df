"""Replaces the weights of a running server or cluster, without a restart.

    jdisagg update_weights --target=localhost:8000 --model=/checkpoints/100 --weights_version=100

All workers read the checkpoint while they serve the old weights, and then switch to the new weights
at the same time (docs/weights.md). --update_mode sets what happens to running requests. With
recompute, their KV is recomputed with the new weights. With drain, the update waits until they
finish. With keep, they continue with their old KV. Exit status 1: the update failed and all workers
serve the old weights, or some workers could not switch."""

import sys

from jdisagg.messages.weights import UPDATE_SECONDS
from launch.console import run
from launch.flags import CLIENT, HTTP_TARGET, define
from launch.settings import administration

flags = define(
    *(*CLIENT, "model", "weights_version", "update_mode", "deadline_seconds", "token_file"),
    required=("model",),
    target=HTTP_TARGET,
    model=(None, "Checkpoint folder, on the hosts of all workers, or name of an offer."),
    deadline_seconds=UPDATE_SECONDS,
    token_file="",
)


def main() -> int:
    report = administration(flags).update_weights(
        flags.model,
        version=flags.weights_version,
        mode=flags.update_mode,
        deadline_seconds=flags.deadline_seconds,
    )
    print(
        f"{', '.join(report.workers)} serve {report.weights}: {report.bytes / 1e6:.1f} MB read in"
        f" {report.stage_seconds:.2f} s, placement paused for {report.pause_seconds:.3f} s"
    )
    for failure in report.failed:
        print(f"error: worker {failure}", file=sys.stderr)
    return 1 if report.failed else 0


if __name__ == "__main__":
    run(main, flags)

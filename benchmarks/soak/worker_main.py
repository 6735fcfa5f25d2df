"""Runs `jdisagg worker` with orders from the chaos tests, and optionally with random faults in its
channel.

    python -m benchmarks.soak.worker_main --chaos_socket=PATH [--chaos_rate=0.05 --chaos_seed=1]
    ...flags of launch.worker

The first arguments belong to this file. The others are passed to launch.worker, whose classes are
wrapped."""

import sys
import threading
from pathlib import Path
from typing import Any

from benchmarks.soak.faults import FaultPlan, FaultyChannel, everything
from benchmarks.soak.moments import watch_workers
from benchmarks.soak.orders import OrderTaker
from jdisagg.clock import MonotonicClock
from jdisagg.supervisor.supervisor import EXIT_CONFIG
from jdisagg.transfer import negotiated_channel
from jdisagg.transfer.channel import Channel

COUNT_SECONDS = 1.0


def main(arguments: list[str]) -> None:
    own = {
        name: value
        for name, _, value in (
            argument.partition("=") for argument in arguments if argument.startswith("--chaos_")
        )
    }
    theirs = [argument for argument in arguments if not argument.startswith("--chaos_")]
    files = [text for text in theirs if text.startswith("--config_file=")]
    name = Path(files[0].partition("=")[2]).stem  # as its process is called: decode-0, decode-0.1
    taker = OrderTaker(own["--chaos_socket"], name)
    plan = FaultPlan(
        seed=int(own.get("--chaos_seed", "0")),
        rates=everything(float(own.get("--chaos_rate", "0"))),
    )
    watch_workers(taker.moments)
    _watch_channels(taker, plan)
    from launch import worker
    from launch.console import run

    sys.argv = ["launch.worker", *theirs[1:]]
    run(worker.main, worker.flags, refused=EXIT_CONFIG)


def _watch_channels(taker: OrderTaker, plan: FaultPlan) -> None:
    """Wraps the channel's class before launch.worker imports it."""
    inner = negotiated_channel.NegotiatedChannel

    def watched(*arguments: Any, **named: Any) -> Channel:
        return FaultyChannel(
            inner(*arguments, **named), plan, MonotonicClock(), taker.moments.watch_pull
        )

    negotiated_channel.NegotiatedChannel = watched  # type: ignore[misc,assignment]
    threading.Thread(
        target=_tell_counts, args=(taker, plan), name="fault-counts", daemon=True
    ).start()


def _tell_counts(taker: OrderTaker, plan: FaultPlan) -> None:
    told = 0
    pause = threading.Event()
    while not pause.wait(COUNT_SECONDS):
        if plan.total > told:
            told = plan.total
            taker.count(
                {
                    f"{operation} {fault.value}": count
                    for (operation, fault), count in plan.took_effect.items()
                }
            )


if __name__ == "__main__":
    main(sys.argv)

"""Changes the role of a worker in a running cluster.

    jdisagg switch_role --target=localhost:8700 --worker=prefill-1 --role=decode

The worker drains, reshards its weights on the same devices if its layout changes, and serves in the
new role. Running streams continue. Without --layout, the worker gets the most common layout of
workers in the new role that fits its devices. When the worker serves again, one line reports the
seconds that the change took. Exit status 1: the change was refused or failed, and the worker keeps
its old role."""

import asyncio
import sys
import time

from jdisagg.errors import UnavailableError
from jdisagg.layout.axes import Layout
from jdisagg.messages.roles import SwitchReport, SwitchState
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.service.internal.connection import Credentials
from jdisagg.service.internal.role_services import cluster_roles
from launch.console import run
from launch.flags import CLIENT, define
from launch.settings import credentials

flags = define(
    *(*CLIENT, "worker", "role", "layout", "deadline_seconds", "cluster_token_file"),
    required=("worker", "role"),
    deadline_seconds=300.0,
    cluster_token_file="",
    role=(None, "What it is to be, prefill or decode."),
)


def main() -> int:
    layout = Layout.parse(flags.layout) if flags.layout is not None else None
    began = time.monotonic()
    report = asyncio.run(
        _switch(WorkerRole(flags.role), layout, credentials(flags, flags.cluster_token_file))
    )
    parts = (
        f"drain {report.drain_seconds:.2f} s, weights and mesh {report.build_seconds:.2f} s,"
        f" programs {report.warm_up_seconds:.2f} s"
    )
    if report.state is not SwitchState.DONE:
        print(
            f"error: worker {report.worker} is {report.role.value} as before: {report.reason}"
            f" ({parts})",
            file=sys.stderr,
        )
        return 1
    print(
        f"worker {report.worker} is {report.role.value} ({report.layout}) after"
        f" {time.monotonic() - began:.2f} s: {parts}"
    )
    return 0


async def _switch(
    role: WorkerRole, layout: Layout | None, credentials_given: Credentials
) -> SwitchReport:
    async with cluster_roles(flags.target, credentials_given) as roles:
        try:
            return await roles.switch(flags.worker, role, layout, flags.deadline_seconds)
        except UnavailableError as error:
            if "connect" not in error.message:
                raise
            raise UnavailableError(
                f"no router answered at {flags.target}; start one with jdisagg cluster or jdisagg"
                " router, or pass --authority=FILE if it uses TLS"
            ) from error


if __name__ == "__main__":
    run(main, flags)

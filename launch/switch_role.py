"""Lets a worker of a running cluster change its role.

    python -m launch.switch_role --target=localhost:8700 --worker=prefill-1 --role=decode

The worker drains (what it offered is fetched, running sequences move to other decode workers or end), lays the same weights out anew on
the same devices, and serves under its other role; streams go on. --layout is the layout to take; by default the one that most workers of
that role have, where the worker's devices are enough for it. Prints one line with the seconds when the worker serves; ends with 1 when it
may not change, or came back in its old role.
"""

import asyncio
import sys
import time

from absl import app, flags

from jdisagg.dispatch.ports import WorkerRole
from jdisagg.dispatch.roles import SwitchReport, SwitchState
from jdisagg.errors import JdisaggError
from jdisagg.layout.axes import Layout
from jdisagg.service.connection import Credentials
from jdisagg.service.role_services import ClusterRoles
from launch.console import refuse_words
from launch.papers import credentials

_TARGET = flags.DEFINE_string("target", "localhost:8700", "Address of a router, host:port.")
_WORKER = flags.DEFINE_string("worker", None, "Name of the worker.", required=True)
_ROLE = flags.DEFINE_enum("role", None, [WorkerRole.PREFILL.value, WorkerRole.DECODE.value], "What it is to be.", required=True)
_LAYOUT = flags.DEFINE_string("layout", None, "Layout to take, such as dp=2,tp=1.")
_DEADLINE = flags.DEFINE_float("deadline_seconds", 300.0, "How long it may take, draining included.", lower_bound=0)
_TOKEN_FILE = flags.DEFINE_string("cluster_token_file", "", "The token that router and workers show each other.")


def main(argv: list[str]) -> int:
    try:
        refuse_words(argv)
        layout = Layout.parse(_LAYOUT.value) if _LAYOUT.value is not None else None
        began = time.monotonic()
        report = asyncio.run(_switch(WorkerRole(_ROLE.value), layout, credentials(_TOKEN_FILE.value)))
    except JdisaggError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    parts = f"drain {report.drain_seconds:.2f} s, weights and mesh {report.build_seconds:.2f} s, programs {report.warm_up_seconds:.2f} s"
    if report.state is not SwitchState.DONE:
        print(f"error: worker {report.worker} is {report.role.value} as before: {report.reason} ({parts})", file=sys.stderr)
        return 1
    print(f"worker {report.worker} is {report.role.value} ({report.layout}) after {time.monotonic() - began:.2f} s: {parts}")
    return 0


async def _switch(role: WorkerRole, layout: Layout | None, papers: Credentials) -> SwitchReport:
    async with ClusterRoles(_TARGET.value, papers) as roles:
        return await roles.switch(_WORKER.value, role, layout, _DEADLINE.value)


if __name__ == "__main__":
    app.run(main)

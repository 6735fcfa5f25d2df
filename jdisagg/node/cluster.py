"""Runs a cluster on one host, with routers and workers as child processes.

The output of all processes is written to one log, below which a live table shows their state. A
worker that crashes is restarted under the same name and address. If a worker exits because its
configuration is invalid, the cluster stops. On the first SIGTERM or SIGINT, the routers refuse new
requests and wait for running requests. Then the workers stop. On the second signal, all processes
stop at once. If this process dies, its child processes are killed."""

import asyncio
import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace

from jdisagg.client import AsyncClient
from jdisagg.clock import MonotonicClock
from jdisagg.errors import JdisaggError
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.node.cluster_log import ClusterLog, Shown
from jdisagg.node.cluster_plan import ClusterPlan
from jdisagg.node.serving import curl, where
from jdisagg.node.signals import StopSignals
from jdisagg.observe.logs import say
from jdisagg.service.server import cluster_credentials, read_tokens
from jdisagg.supervisor.supervisor import (
    GroupSpec,
    GroupState,
    StartMember,
    SupervisedGroup,
    start_here,
)

_POLL_SECONDS = 0.5
_STATUS_SECONDS = 2.0
_TRIES = 4  # restarts of one process before the cluster has ever served
_COMPILED = re.compile(r"compiled (\d+) of (\d+) programs")


class Cluster:
    """Starts the processes of a plan, monitors them through the router's status, and stops them in
    order. The constructor must run on the event loop. Raises ConfigError if a configured token file
    or certificate is invalid."""

    def __init__(
        self, plan: ClusterPlan, log: ClusterLog, start_child: StartMember = start_here
    ) -> None:
        self._start_child = start_child
        service = plan.config.engine.service
        tokens = read_tokens(service.token_file)
        self._plan = plan
        self._timeouts = plan.config.engine.limits.timeouts
        self._stop_seconds = service.drain_seconds + self._timeouts.process.kill_seconds
        # This process calls the router as a client and needs a client's credentials.
        self._credentials = replace(cluster_credentials(service), token=tokens[0] if tokens else "")
        self._log = log
        self._failed: str | None = None
        self._force = asyncio.Event()
        self._signals = StopSignals(self._force.set)
        # Startup phase that each process last reported, or "" once the process serves.
        self._phases: dict[str, str] = {}
        self._routers = [self._group(spec) for spec in plan.routers()]
        self._workers = [self._group(spec) for spec in plan.workers()]

    async def run(self) -> int:
        """Runs the cluster until it is stopped. Returns the exit status: 0 after a signal, 1 if a
        process cannot run with its configuration."""
        watching = asyncio.create_task(self._watch())
        try:
            for group in (*self._routers, *self._workers):
                group.start()
            await self._signals.first()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self._stop_all()
            self._log.close()
        if self._failed is not None:
            say(
                f"error: {self._failed} cannot work as it is configured; its own words are above",
                error=True,
            )
        return 0 if self._failed is None else 1

    def _group(self, spec: GroupSpec) -> SupervisedGroup:
        return SupervisedGroup(
            spec,
            MonotonicClock(),
            self._take_line,
            self._log.write,
            self._cannot_work,
            self._timeouts.process,
            self._start_child,
        )

    def _take_line(self, name: str, line: str) -> None:
        owner = name if name in self._phases else name.rpartition(".")[0]
        if found := _COMPILED.search(line):
            self._phases[owner or name] = f"compiling {found[1]}/{found[2]}"
        elif " serves on " in line or " listens on " in line:
            self._phases[owner or name] = ""
        self._log.write(name, line)

    def _cannot_work(self, name: str) -> None:
        self._failed = self._failed or name
        self._force.set()
        self._signals.raise_first()

    async def _watch(self) -> None:
        served = False
        client = AsyncClient(
            self._plan.address,
            connect_seconds=_STATUS_SECONDS,
            timeout_seconds=_STATUS_SECONDS,
            credentials=self._credentials,
        )
        groups = (*self._routers, *self._workers)
        async with client:
            while True:
                statuses: dict[str, WorkerStatus] = {}
                with contextlib.suppress(JdisaggError):
                    statuses = {status.name: status for status in await client.status()}
                if not served and statuses.keys() >= {group.name for group in self._workers}:
                    served = True
                    say(
                        f"jdisagg cluster serves on {','.join(map(where, self._plan.services))}:"
                        f" {', '.join(sorted(statuses))}\n{curl(self._plan.services[0])}".rstrip()
                    )
                if not served:
                    for group in groups:
                        if group.restarts >= _TRIES:
                            self._cannot_work(group.name)
                self._log.show([self._shown(group, statuses) for group in groups])
                await asyncio.sleep(_POLL_SECONDS)

    def _shown(self, group: SupervisedGroup, statuses: dict[str, WorkerStatus]) -> Shown:
        """Returns the table row of a router or worker. Figures are shown only while it serves,
        because after a restart the router may still report the earlier figures."""
        if group.state is not GroupState.RUNNING:
            self._phases.pop(group.name, None)
            return Shown(group.name, group.state.value, group.restarts, None)
        phase = self._phases.setdefault(group.name, "starting")
        status = statuses.get(group.name) if not phase else None
        return Shown(group.name, phase or "running", group.restarts, status)

    async def _stop_all(self) -> None:
        """Stops the routers before the workers, because requests that still run at the routers need
        the workers."""
        await self._stop_groups(self._routers, self._stop_seconds)
        await self._stop_groups(self._workers, self._stop_seconds)

    async def _stop_groups(self, groups: Sequence[SupervisedGroup], seconds: float) -> None:
        stopping = asyncio.gather(*(group.stop(seconds) for group in groups))
        forced = asyncio.create_task(self._force.wait())
        await asyncio.wait({stopping, forced}, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        if not stopping.done():
            await asyncio.gather(*(group.stop(0) for group in groups))
        await stopping

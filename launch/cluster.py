"""A whole cluster on one host: a router and workers as child processes, one log, a live table, a clean end.

    python -m launch.cluster --prefill=2 --decode=2
    python -m launch.cluster --prefill=1 --decode=1 --prefill_layout=tp=4,ep=4 --decode_layout=dp=4,ep=4 --model=models/tiny/qwen3_moe
    python -m launch.ask --target=localhost:8700 --prompt="Once upon a time"

Prints one line on stdout when all instances serve. A worker that dies is started again under its name and address; one that cannot work
as it was told to ends the cluster. SIGTERM or SIGINT: the router takes no new requests and running ones end, then the workers are
stopped; a second signal stops all now. Children die with this process, whatever kills it.
--metrics_port=9100 gives the router's metrics there and the instances' on the ports that follow; see docs/observability.md.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence

from absl import app, flags

from jdisagg.client import AsyncClient
from jdisagg.clock import MonotonicClock
from jdisagg.config import ServiceConfig
from jdisagg.dispatch.ports import WorkerStatus
from jdisagg.errors import ConfigError, JdisaggError
from jdisagg.service.server import check_address
from jdisagg.supervisor.supervisor import Group, GroupSpec
from launch.cluster_log import ClusterLog, Shown
from launch.cluster_plan import ClusterPlan, free_ports, plan_instances
from launch.observing import observe_config, observe_flags

_POLL_SECONDS = 0.5
_STATUS_SECONDS = 2.0
_FAREWELL_SECONDS = 10.0
_TRIES = 4  # of a process, before the cluster has ever served

_PREFILL = flags.DEFINE_integer("prefill", 1, "Prefill instances.")
_DECODE = flags.DEFINE_integer("decode", 1, "Decode instances.")
_MIXED = flags.DEFINE_integer("mixed", 0, "Instances that do both on one mesh; instead of the two others.")
_PROCESSES = flags.DEFINE_integer("processes_per_instance", 1, "Processes that one instance's mesh is spread over.")
_PREFILL_LAYOUT = flags.DEFINE_string("prefill_layout", "dp=1,tp=2", "Layout of each prefill mesh.")
_DECODE_LAYOUT = flags.DEFINE_string("decode_layout", "dp=2,tp=1", "Layout of each decode mesh.")
_MIXED_LAYOUT = flags.DEFINE_string("mixed_layout", "dp=1,tp=1", "Layout of each mixed mesh.")
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Interface that everything listens on.")
_PORT = flags.DEFINE_integer("port", 8700, "The router's port, and that of the first of several; 0 lets the system choose.")
_ROUTERS = flags.DEFINE_integer("routers", 1, "Routers over the same workers, on ports that follow each other.", lower_bound=1)
_LOG_DIR = flags.DEFINE_string("cluster_log_dir", None, "Folder for a log file of each process.")
_TABLE = flags.DEFINE_bool("table", None, "Show the live table; by default where stdout is a terminal.")
_DRAIN = flags.DEFINE_float("drain_seconds", 30.0, "How long running requests may take at the end.")
_MODEL = flags.DEFINE_string("model", None, "Checkpoint directory, Hugging Face or Orbax form. Default: the shipped tiny model.")
_DTYPE = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "Type of weights and KV.")
_PAGE_SIZE = flags.DEFINE_integer("page_size", None, "Tokens of a KV page.")
_SLOTS = flags.DEFINE_integer("slots", None, "Sequences that decode at once, per dp rank.")
_CHUNK = flags.DEFINE_integer("prefill_chunk", None, "Tokens of a prefill chunk, a multiple of 16.")
_CODEC = flags.DEFINE_string("codec", None, "How KV travels: none, int8, int4 or fp8.")
_CACHE = flags.DEFINE_string("compilation_cache", None, "Folder for compiled programs; '' switches it off.")
_RECORD = flags.DEFINE_string("record", None, "Folder for recordings of every mesh's commands, for launch.replay; they hold the prompts.")
_CANARY = flags.DEFINE_float("canary_seconds", None, "How often the router proves that KV moves; 0: never.")
_SET = flags.DEFINE_multi_string("set", [], "path.to.field=value of the workers' settings (limits.*: the router's, too); may be repeated.")


def main(_: list[str]) -> int:
    try:
        plan = _plan()
        return asyncio.run(Cluster(plan).run())
    except JdisaggError as error:
        sys.exit(f"error: {error.message}")


def _plan() -> ClusterPlan:
    counts = {"prefill": _PREFILL.value, "decode": _DECODE.value, "mixed": _MIXED.value}
    if _MIXED.value and not (flags.FLAGS["prefill"].present or flags.FLAGS["decode"].present):
        counts |= {"prefill": 0, "decode": 0}
    if not counts["mixed"] and not (counts["prefill"] and counts["decode"]):
        raise ConfigError(f"--prefill={counts['prefill']} --decode={counts['decode']}: one of each at least, or some --mixed")
    ports = [_PORT.value + index for index in range(_ROUTERS.value)] if _PORT.value else free_ports(_HOST.value, _ROUTERS.value)
    for port in ports:
        check_address(ServiceConfig(_HOST.value, port))
    observe = observe_config()
    layouts = {"prefill": _PREFILL_LAYOUT.value, "decode": _DECODE_LAYOUT.value, "mixed": _MIXED_LAYOUT.value}
    instances = [
        instance for role, count in counts.items() for instance in plan_instances(role, count, layouts[role], _PROCESSES.value, _HOST.value)
    ]
    both = {"model": _MODEL.value, "drain_seconds": _DRAIN.value}
    workers = {
        "dtype": _DTYPE.value,
        "page_size": _PAGE_SIZE.value,
        "slots": _SLOTS.value,
        "prefill_chunk": _CHUNK.value,
        "codec": _CODEC.value,
        "compilation_cache": _CACHE.value,
    }
    return ClusterPlan(
        _HOST.value,
        ports[0],
        tuple(instances),
        (*_given({**both, **workers, "record": _RECORD.value}), *observe_flags(), *(f"--set={text}" for text in _SET.value)),
        (
            *_given({**both, "canary_seconds": _CANARY.value}),
            *observe_flags(),
            *(f"--set={text}" for text in _SET.value if text.startswith("limits.")),
        ),
        observe.metrics_port,
        tuple(ports[1:]),
    )


def _given(values: dict[str, object]) -> tuple[str, ...]:
    return tuple(f"--{name}={value}" for name, value in values.items() if value is not None)


class Cluster:
    """Starts the plan's groups, watches them through the router's own status, and stops them in order."""

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan
        live = sys.stdout.isatty() if _TABLE.value is None else _TABLE.value
        self._log = ClusterLog(live, _LOG_DIR.value, f"jdisagg on {plan.address}")
        self._failed: str | None = None
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._routers = [self._group(spec) for spec in plan.routers()]
        self._workers = [self._group(spec) for spec in plan.workers()]

    async def run(self) -> int:
        """The exit status: 0 after a stop that was asked for, 1 when a process cannot work."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        watching = asyncio.create_task(self._watch())
        try:
            for group in (*self._routers, *self._workers):
                group.start()
            await self._stop.wait()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self._stop_all()
            self._log.close()
        if self._failed is not None:
            print(f"error: {self._failed} cannot work as it was told to; what it said is above", file=sys.stderr)
        return 0 if self._failed is None else 1

    def _group(self, spec: GroupSpec) -> Group:
        return Group(spec, MonotonicClock(), self._log.write, self._log.write, self._cannot_work)

    def _signalled(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def _cannot_work(self, name: str) -> None:
        self._failed = self._failed or name
        self._hurry.set()
        self._stop.set()

    async def _watch(self) -> None:
        """Says once when all serve; keeps the table."""
        said = False
        async with AsyncClient(self._plan.address, connect_seconds=_STATUS_SECONDS, timeout_seconds=_STATUS_SECONDS) as client:
            while True:
                statuses: dict[str, WorkerStatus] = {}
                with contextlib.suppress(JdisaggError):
                    statuses = {status.name: status for status in await client.status()}
                if not said and statuses.keys() >= {group.name for group in self._workers}:
                    said = True
                    print(f"jdisagg cluster serves on {','.join(self._plan.addresses)}: {', '.join(sorted(statuses))}", flush=True)
                if not said:
                    for group in (*self._routers, *self._workers):
                        if group.restarts >= _TRIES:
                            self._cannot_work(group.name)
                self._log.show([_shown(group, statuses.get(group.name)) for group in (*self._routers, *self._workers)])
                await asyncio.sleep(_POLL_SECONDS)

    async def _stop_all(self) -> None:
        """The routers first: their running requests need the workers."""
        seconds = _DRAIN.value + _FAREWELL_SECONDS
        await self._stop_groups(self._routers, seconds)
        await self._stop_groups(self._workers, seconds)

    async def _stop_groups(self, groups: Sequence[Group], seconds: float) -> None:
        stopping = asyncio.gather(*(group.stop(seconds) for group in groups))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not stopping.done():
            await asyncio.gather(*(group.stop(0) for group in groups))
        await stopping


def _shown(group: Group, status: WorkerStatus | None) -> Shown:
    return Shown(group.name, group.state.value, group.restarts, status)


if __name__ == "__main__":
    app.run(main)

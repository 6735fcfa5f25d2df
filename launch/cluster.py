"""A whole cluster on one host: a router and workers as child processes, one log, a live table, a clean end.

    python -m launch.cluster --prefill=2 --decode=2
    python -m launch.cluster --prefill=1 --decode=1 --prefill_layout=tp=4,ep=4 --decode_layout=dp=4,ep=4 --model=models/tiny/qwen3_moe
    python -m launch.cluster --config=configs/tiny_moe_cpu.py
    python -m launch.ask --target=localhost:8700 --prompt="Once upon a time"

--config takes layouts, sizes, limits, counts and where to listen from a recipe (launch/recipes.py; launch.plan writes some); flags win.
Prints one line on stdout when all instances serve. A worker that dies is started again under its name and address; one that cannot work
as it was told to ends the cluster. SIGTERM or SIGINT: the router takes no new requests and running ones end, then the workers are
stopped; a second signal stops all now. Children die with this process, whatever kills it.
--elastic lets prefill and decode workers change places as the load asks for it; launch.switch_role does it by hand.
--metrics_port=9100 gives the router's metrics there and the instances' on the ports that follow; see docs/observability.md.
--tls_certificate and --tls_key (one pair for all processes, made for --host) and the token files are for every process; KV itself travels
unencrypted, see BUILD.md.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from absl import app, flags

from jdisagg.client import AsyncClient
from jdisagg.clock import MonotonicClock
from jdisagg.config import EngineConfig, ServiceConfig
from jdisagg.dispatch.ports import WorkerStatus
from jdisagg.errors import ConfigError, JdisaggError
from jdisagg.service.connection import Credentials
from jdisagg.service.server import check_address, cluster_credentials, read_tokens
from jdisagg.supervisor.supervisor import Group, GroupSpec
from launch.cluster_log import ClusterLog, Shown
from launch.cluster_plan import ClusterPlan, free_ports, plan_instances
from launch.console import refuse_words
from launch.observing import observe_config, observe_flags
from launch.recipes import ClusterShape, changed, load_recipe, load_shape, router_flags, worker_flags

_POLL_SECONDS = 0.5
_STATUS_SECONDS = 2.0
_FAREWELL_SECONDS = 10.0
_TRIES = 4  # of a process, before the cluster has ever served

_CONFIG = flags.DEFINE_string("config", None, "A recipe: a Python file with get_config() and, for the counts, get_cluster().")
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
_HARDWARE = flags.DEFINE_string("hardware", None, "What the devices are: h100, ... or a file of launch.measure_costs; for predictions.")
_CODEC = flags.DEFINE_string("codec", None, "How KV travels: none, int8, int4 or fp8.")
_CACHE = flags.DEFINE_string("compilation_cache", None, "Folder for compiled programs; '' switches it off.")
_RECORD = flags.DEFINE_string("record", None, "Folder for recordings of every mesh's commands, for launch.replay; they hold the prompts.")
_DECISIONS = flags.DEFINE_string("decision_log", None, "File for every decision of the router; see launch.replay_decisions.")
_CANARY = flags.DEFINE_float("canary_seconds", None, "How often the router proves that KV moves; 0: never.", lower_bound=0)
_TLS_CERTIFICATE = flags.DEFINE_string("tls_certificate", "", "PEM file, of all processes; with it every gRPC port speaks TLS alone.")
_TLS_KEY = flags.DEFINE_string("tls_key", "", "PEM file of the certificate's key.")
_TLS_CLIENT_CA = flags.DEFINE_string("tls_client_ca", "", "PEM file; clients and workers must show a certificate that it signed.")
_TOKEN_FILE = flags.DEFINE_string("token_file", "", "Bearer tokens of clients, one a line.")
_CLUSTER_TOKEN_FILE = flags.DEFINE_string("cluster_token_file", "", "The token that router and workers show each other.")
_ELASTIC = flags.DEFINE_bool("elastic", False, "Let workers change their roles as the load asks for it; see launch.router.")
_SET = flags.DEFINE_multi_string(
    "set", [], "path.to.field=value of the workers' settings (limits.*: the router's, too; routing.*, elastic.*: its alone)."
)
_SECRETS = (_TLS_CERTIFICATE, _TLS_KEY, _TLS_CLIENT_CA, _TOKEN_FILE, _CLUSTER_TOKEN_FILE)


def main(argv: list[str]) -> int:
    try:
        refuse_words(argv)
        recipe, shape = (load_recipe(_CONFIG.value), load_shape(_CONFIG.value)) if _CONFIG.value else (None, None)
        service = _service(recipe or EngineConfig())
        plan = _plan(service, recipe, shape)
        return asyncio.run(Cluster(plan, _status_credentials(service), service.drain_seconds).run())
    except JdisaggError as error:
        sys.exit(f"error: {error.message}")


def _service(recipe: EngineConfig) -> ServiceConfig:
    """What all processes' gRPC ports have in common: the recipe's, and the flags that were given."""
    service = replace(recipe.service, **{flag.name: flag.value for flag in (_HOST, _PORT, _DRAIN, *_SECRETS) if flag.present})
    return replace(service, **{name: str(Path(path).expanduser().resolve()) for name, path in _secrets(service).items()})


def _secrets(service: ServiceConfig) -> dict[str, str]:
    """The files that are named, by field."""
    return {flag.name: path for flag in _SECRETS if (path := getattr(service, flag.name))}


def _status_credentials(service: ServiceConfig) -> Credentials:
    """Ours, for we ask as a client. Raises ConfigError for files that do not serve."""
    tokens = read_tokens(service.token_file)
    return replace(cluster_credentials(service), token=tokens[0] if tokens else "")


def _plan(service: ServiceConfig, recipe: EngineConfig | None, shape: ClusterShape | None) -> ClusterPlan:
    counts, layouts = _instances(recipe, shape)
    host, routers = service.host, _ROUTERS.value
    ports = [service.port + index for index in range(routers)] if service.port else free_ports(host, routers)
    for port in ports:
        check_address(replace(service, port=port))
    observe = observe_config()
    instances = [
        instance for role, count in counts.items() for instance in plan_instances(role, count, layouts[role], _PROCESSES.value, host)
    ]
    if _ELASTIC.value and _PROCESSES.value > 1:
        raise ConfigError(
            f"--elastic: workers of --processes_per_instance={_PROCESSES.value} processes cannot change their roles; "
            "give each instance one process, or leave --elastic away: the router's advice stays"
        )
    secrets = _secrets(service)
    sizes = changed("service", ServiceConfig(max_message_bytes=service.max_message_bytes), ServiceConfig())
    both = {"model": _MODEL.value, "drain_seconds": service.drain_seconds}
    workers = {
        "dtype": _DTYPE.value,
        "page_size": _PAGE_SIZE.value,
        "slots": _SLOTS.value,
        "prefill_chunk": _CHUNK.value,
        "codec": _CODEC.value,
        "hardware": _HARDWARE.value,
        "compilation_cache": _CACHE.value,
    }
    return ClusterPlan(
        host,
        ports[0],
        tuple(instances),
        (
            *_given({**both, **workers, "record": _RECORD.value}),
            *observe_flags(),
            *(f"--set=service.{name}={path}" for name, path in secrets.items()),
            *sizes,
            *(f"--set={text}" for text in _SET.value if not text.startswith(("routing.", "elastic."))),
        ),
        (
            *(router_flags(recipe) if recipe else ()),
            *_given({**both, **secrets, "canary_seconds": _CANARY.value, "decision_log": _DECISIONS.value}),
            *observe_flags(),
            *sizes,
            *(f"--set={text}" for text in _SET.value if text.startswith(("limits.", "routing.", "elastic.", "service.max_message_bytes="))),
        ),
        observe.metrics_port,
        tuple(ports[1:]),
        {role: worker_flags(recipe, role) for role in counts} if recipe else {},
        _ELASTIC.value,
    )


def _instances(recipe: EngineConfig | None, shape: ClusterShape | None) -> tuple[dict[str, int], dict[str, str]]:
    """(how many, layout) by role: the flags that were given, then the recipe, then the flags' defaults."""
    counts = {"prefill": _PREFILL, "decode": _DECODE, "mixed": _MIXED}
    layouts = {"prefill": _PREFILL_LAYOUT, "decode": _DECODE_LAYOUT, "mixed": _MIXED_LAYOUT}
    many = {role: holder.value for role, holder in counts.items()}
    lie = {role: holder.value for role, holder in layouts.items()}
    if recipe is not None and shape is not None:
        many |= {role: getattr(shape, role) for role, holder in counts.items() if not holder.present}
        known = {"prefill": recipe.prefill.layout, "decode": recipe.decode.layout, "mixed": recipe.decode.layout}
        lie |= {role: str(known[role]) for role, holder in layouts.items() if not holder.present}
    if _MIXED.present and _MIXED.value:
        others = [f"--{holder.name}={holder.value}" for holder in (_PREFILL, _DECODE) if holder.present and holder.value]
        if others:
            raise ConfigError(
                f"--mixed={_MIXED.value} and {' '.join(others)}: mixed instances come instead of the two other kinds; give the one or the "
                "others, or all three in a recipe's get_cluster()"
            )
        many |= {"prefill": 0, "decode": 0}
    if not many["mixed"] and not (many["prefill"] and many["decode"]):
        raise ConfigError(f"--prefill={many['prefill']} --decode={many['decode']}: one of each at least, or some --mixed")
    return many, lie


def _given(values: dict[str, object]) -> tuple[str, ...]:
    return tuple(f"--{name}={value}" for name, value in values.items() if value is not None)


class Cluster:
    """Starts the plan's groups, watches them through the router's own status, and stops them in order."""

    def __init__(self, plan: ClusterPlan, credentials: Credentials, drain_seconds: float) -> None:
        self._plan = plan
        self._drain_seconds = drain_seconds
        self._credentials = credentials
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
        seconds = _STATUS_SECONDS
        client = AsyncClient(self._plan.address, connect_seconds=seconds, timeout_seconds=seconds, credentials=self._credentials)
        async with client:
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
        seconds = self._drain_seconds + _FAREWELL_SECONDS
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

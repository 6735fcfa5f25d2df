"""A whole cluster on one host: a router and workers as child processes, one log, a live table, a
clean end.

    python -m launch.cluster --prefill_workers=2 --decode_workers=2
    python -m launch.cluster --prefill=tp=4,ep=4 --decode=dp=4,ep=4 --model=models/tiny/qwen3_moe
    python -m launch.cluster --config=configs/tiny_moe_cpu.py
    python -m launch.ask --target=localhost:8700 --prompt="Once upon a time"

--config takes layouts, sizes, limits, counts and where to listen from a recipe (launch.plan writes
some); flags win. Prints one line on stdout when all workers serve. A worker that dies is started
again under its name and address; one that cannot work as it is configured ends the cluster. SIGTERM
or SIGINT: the router takes no new requests and running ones end, then the workers are stopped; a
second signal stops all now. Children die with this process, whatever kills it.

--elastic lets prefill and decode workers change places as the load asks for it; launch.switch_role
does it by hand. --http_port=8000 opens the router's HTTP door, for OpenAI's clients (docs/http.md).
--metrics_port=9100 gives the router's metrics there and the workers' on the ports that follow.
--tls_certificate and --tls_key (one pair for all processes, made for --host) and the token files
are for every process; KV itself travels unencrypted."""

import asyncio
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from jdisagg.config import EngineConfig
from jdisagg.errors import ConfigError
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.node.cluster import Cluster
from jdisagg.node.cluster_log import ClusterLog
from jdisagg.node.cluster_plan import ClusterConfig, ClusterPlan, plan_cluster
from jdisagg.node.gpus import gpus_of_host, parse_gpus
from jdisagg.node.recipes import ClusterShape, load_shape, worker_config
from jdisagg.service.server import check_address
from launch.console import run
from launch.flags import ENGINE, HTTP, OBSERVE, SERVICE, define
from launch.settings import elastic_config, engine_config, observe_config
from launch.shipped import SHIPPED_MODEL
from models.catalog import read_config
from models.hf_config import HfConfig

flags = define(
    *("prefill_workers", "decode_workers", "mixed_workers", "processes_per_instance", "routers"),
    *("gpus", "gpus_per_worker"),
    *ENGINE,
    *SERVICE,
    *HTTP,
    *("kv_channel", "canary_seconds", "elastic", "decision_log", "record", "cluster_log_dir"),
    "table",
    *OBSERVE,
)


def main() -> int:
    config = cluster_config()
    with tempfile.TemporaryDirectory(prefix="jdisagg-") as folder:
        return asyncio.run(_run(plan(config, Path(folder))))


async def _run(planned: ClusterPlan) -> int:
    live = sys.stderr.isatty() if flags.table is None else flags.table
    title = f"jdisagg on {planned.address}"
    log = ClusterLog(live, flags.cluster_log_dir, title, flags.log_format)
    return await Cluster(planned, log).run()


def cluster_config() -> ClusterConfig:
    """As the flags say. Raises ConfigError for a model, layouts, sizes or addresses that no process
    could work with, before any is started."""
    engine = engine_config(flags)
    shape = _shape(engine)
    directory = engine.model.directory or SHIPPED_MODEL
    geometry = read_config(HfConfig.from_directory(Path(directory))).geometry
    for role in WorkerRole:
        if getattr(shape, role.value):
            worker_config(engine, role).instance.layout.check(geometry)
    return ClusterConfig(
        engine,
        shape,
        str(Path(directory).resolve()),
        elastic_config(flags),
        flags.elastic,
        flags.canary_seconds,
        flags.routers,
        flags.processes_per_instance,
        observe_config(flags),
        flags.record,
        flags.decision_log,
        gpus_of_host(os.environ) if flags.gpus is None else parse_gpus("gpus", flags.gpus),
        flags.gpus_per_worker,
    )


def plan(config: ClusterConfig, folder: Path) -> ClusterPlan:
    planned = plan_cluster(config, folder)
    for service in planned.services:
        check_address(service)
    return planned


def _shape(engine: EngineConfig) -> ClusterShape:
    """The counts that were given, then the recipe's."""
    given = {role.value: getattr(flags, f"{role.value}_workers") for role in WorkerRole}
    mixed, others = given["mixed"], [given["prefill"], given["decode"]]
    if mixed and any(others):
        raise ConfigError(
            f"--mixed_workers={mixed} and --prefill_workers or --decode_workers: mixed workers come"
            " instead of the two other kinds; give the one or the others, or all three in a"
            " recipe's get_cluster()"
        )
    shape = ClusterShape(mixed=1) if mixed else load_shape(flags.config, engine.mode)
    counts = {role: count for role, count in given.items() if count is not None}
    return replace(shape, **counts)


if __name__ == "__main__":
    run(main, flags)

"""A worker: one instance of a role on this process's devices, serving gRPC, registered with its routers.

    python -m launch.worker --role=prefill --layout=dp=1,tp=2 --router=localhost:8700 --name=prefill-0 --port=8701
    python -m launch.worker --role=decode --layout=dp=2,tp=1 --router=localhost:8700 --name=decode-0 --port=8702
    python -m launch.worker --role=mixed --layout=dp=1,tp=1 --router=localhost:8700 --set mode=unified

Compiles its programs, then registers, and says each quarter of a second how it is. On SIGTERM it takes no new requests and drains,
within --drain_seconds: a prefill worker until what it offered is fetched, a decode worker until its sequences have ended; then it takes
its leave and ends with 0. A second signal ends it now. It ends with 3 when its mesh broke, so that whoever supervises it starts it
again, and with 78 when it cannot work as it was told to.

An instance of several processes: the same command for each, with --num_processes, --process_id, --coordinator (host:port where they
meet) and a port of its own. They start and end as one.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import app, flags

from jdisagg.config import InstanceConfig, ModelConfig, ServiceConfig, override
from jdisagg.dispatch.ports import WorkerRole
from jdisagg.engine.host_threads import hand_over_quickly
from jdisagg.engine.instance import Loaded, LoadModel, WorkerConfig
from jdisagg.errors import ConfigError, JdisaggError, UnavailableError
from jdisagg.instance.processes import ProcessGroup, join_instance
from jdisagg.layout.axes import Layout
from jdisagg.model_api import Device
from jdisagg.observe.logs import configure_logging
from jdisagg.observe.process import ObserveConfig, observing
from jdisagg.service.server import check_address
from jdisagg.supervisor.supervisor import EXIT_BROKEN, EXIT_CONFIG
from launch.assembly import prepare_runtime
from launch.console import refuse_words
from launch.cost_inputs import find_accelerator, find_geometry
from launch.fingerprint import model_fingerprint
from launch.observing import observe_config
from launch.shipped import SHIPPED_MODEL
from launch.worker_life import WorkerSpec
from launch.worker_process import WorkerProcess
from models.checkpoint import LoadedModel, load_config, load_model
from models.relayout import relayout

_ROLE = flags.DEFINE_enum("role", None, [role.value for role in WorkerRole], "What it does.", required=True)
_LAYOUT = flags.DEFINE_string("layout", "dp=1,tp=1", "Layout of its mesh.")
_ROUTER = flags.DEFINE_list("router", [], "Routers to register with, one at least: host:port, separated by commas.")
_NAME = flags.DEFINE_string("name", None, "Its name, unique among the routers' workers. Default: role, host and port.")
_HOST = flags.DEFINE_string("host", "127.0.0.1", "The one interface that it listens on, KV included; also how others reach it.")
_PORT = flags.DEFINE_integer("port", 0, "Port of its gRPC services; 0 lets the system choose.")
_MODEL = flags.DEFINE_string("model", SHIPPED_MODEL, "Checkpoint directory, Hugging Face or Orbax form.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of weights and KV.")
_PAGE_SIZE = flags.DEFINE_integer("page_size", 128, "Tokens of a KV page.")
_SLOTS = flags.DEFINE_integer("slots", 8, "Sequences that decode at once, per dp rank.")
_CHUNK = flags.DEFINE_integer("prefill_chunk", 128, "Tokens of a prefill chunk, and of the longest block that is warm; a multiple of 16.")
_HARDWARE = flags.DEFINE_string("hardware", "", "What its devices are: h100, ... or a file of launch.measure_costs. '': not known.")
_PLACE = flags.DEFINE_string("place", None, "Where it stands: rack/host/domain/process, as far as is known. Default: /HOSTNAME.")
_CODEC = flags.DEFINE_string("codec", "none", "How KV travels to this worker: none, int8, int4 or fp8.")
_DEVICES = flags.DEFINE_integer("devices", None, "Virtual devices on CPU. Default: as many as the layout needs of this process.")
_DRAIN = flags.DEFINE_float("drain_seconds", 30.0, "How long it may drain.")
_CACHE = flags.DEFINE_string("compilation_cache", WorkerConfig.compilation_cache, "Folder for compiled programs; '' switches it off.")
_RECORD = flags.DEFINE_string("record", "", "Folder for recordings of every mesh's commands, for launch.replay; they hold the prompts.")
_SET = flags.DEFINE_multi_string("set", [], "path.to.field=value of WorkerConfig: instance.growth_tokens=64, limits.pull_seconds=2.")
_PROCESSES = flags.DEFINE_integer("num_processes", 1, "Processes of this instance; 0: as Slurm, Kubernetes or Open MPI say.")
_PROCESS = flags.DEFINE_integer("process_id", 0, "Which of them this is; 0 leads.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port where the instance's processes meet (jax.distributed).")


def main(argv: list[str]) -> int:
    try:
        refuse_words(argv)
        config, spec = _configuration()
        check_address(config.service)
        layout, processes = config.instance.layout, _PROCESSES.value
        prepare_runtime(_DEVICES.value or max(1, layout.devices // max(1, processes)), config.compilation_cache)
        hand_over_quickly()
        group = ProcessGroup(0, 1) if processes == 1 else _join()
        observe = observe_config()
        configure_logging(observe.log_format, spec.name)
        status = asyncio.run(_run(spec, config, observe, group))
        if status == 0:
            group.leave()
    except JdisaggError as error:
        print(f"error: {error.message}", file=sys.stderr, flush=True)
        status = EXIT_BROKEN if isinstance(error, UnavailableError) else EXIT_CONFIG
    sys.stdout.flush()
    sys.stderr.flush()
    # JAX's own farewell waits for programs and transfers that no one needs any more.
    os._exit(status)


async def _run(spec: WorkerSpec, config: WorkerConfig, observe: ObserveConfig, group: ProcessGroup) -> int:
    async with observing(spec.name, observe if group.leads else ObserveConfig()) as observer:
        return await WorkerProcess(spec, config, observer).run(group, _load(config), jax.devices(), _relayout)


def _join() -> ProcessGroup:
    if not _PROCESSES.value:
        return join_instance()
    return join_instance(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)


def _configuration() -> tuple[WorkerConfig, WorkerSpec]:
    instance = InstanceConfig(
        layout=Layout.parse(_LAYOUT.value),
        page_size=_PAGE_SIZE.value,
        slots_per_rank=_SLOTS.value,
        chunk_tokens=_CHUNK.value,
        min_chunk_tokens=min(128, _CHUNK.value),
        codec=_CODEC.value,
        hardware=_HARDWARE.value,
    )
    config = WorkerConfig(
        model=ModelConfig(_MODEL.value, _DTYPE.value),
        instance=instance,
        service=ServiceConfig(_HOST.value, _PORT.value, drain_seconds=_DRAIN.value),
        compilation_cache=_CACHE.value,
    )
    config = override(config, _SET.value)
    role, routers = WorkerRole(_ROLE.value), tuple(address for address in _ROUTER.value if address.strip())
    if not routers:
        raise ConfigError(f"--router is not given: nobody would find this {role.value} worker; name its routers, --router=host:port")
    spec = WorkerSpec(
        name=_NAME.value or f"{role.value}-{_HOST.value}-{_PORT.value or os.getpid()}",
        role=role,
        routers=routers,
        family=load_config(config.model.directory).family,
        model_name=Path(config.model.directory).resolve().name,
        fingerprint=model_fingerprint(config.model.directory, config.model.dtype),
        record_to=_RECORD.value,
        place=f"/{socket.gethostname()}" if _PLACE.value is None else _PLACE.value,
        geometry=find_geometry(config.model.directory),
        hardware=find_accelerator(config.instance.hardware) if config.instance.hardware else None,
    )
    return config, spec


def _load(config: WorkerConfig) -> LoadModel:
    def load(layout: Layout, devices: Sequence[Device]) -> Loaded:
        return load_model(config.model.directory, layout, devices, dtype=config.model.dtype)

    return load


def _relayout(loaded: Loaded, layout: Layout, devices: Sequence[Device]) -> Loaded:
    assert isinstance(loaded, LoadedModel), "it came from `_load`"
    return relayout(loaded, layout, devices)


if __name__ == "__main__":
    app.run(main)

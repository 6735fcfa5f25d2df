"""Builds and warms up one model replica of this process: a model on a mesh and its executor.

Used by worker processes and embedded clusters. The caller passes the loader of weights
(`LoadModel`) and the channel for KV (`Channel`). Imports neither gRPC nor a model family."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import jax

from jdisagg.config import InstanceConfig, Mode, ModelConfig, PrefixConfig, WorkerConfig
from jdisagg.engine.limits import check_reuse, hands_windows_apart, mesh_limits
from jdisagg.errors import ConfigError, LayoutError
from jdisagg.executor.mesh_executor import MeshExecutor, MeshRole
from jdisagg.executor.programs import Programs
from jdisagg.executor.warm_up import warm_up_steps
from jdisagg.layout.axes import Layout
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.model_api import Device, Model
from jdisagg.transfer.channel import Channel


class Loaded(Protocol):
    """A model whose arrays are on `mesh`, with axes ("dp", "kv", "rep")."""

    @property
    def model(self) -> Model: ...
    @property
    def mesh(self) -> jax.sharding.Mesh: ...


LoadModel = Callable[[Layout, Sequence[Device]], Loaded]
Progress = Callable[[int, int], None]


@dataclass
class Replica:
    """One model replica on one mesh."""

    config: InstanceConfig
    executor: MeshExecutor
    loaded: Loaded


@dataclass(frozen=True, slots=True)
class KvPlane:
    """Addresses for KV transfers from a replica: `ends` of the mesh's processes by index, and
    `transports`, the connections per transfer."""

    ends: tuple[KvEnd, ...]
    transports: int


def build_replica(
    name: str,
    config: InstanceConfig,
    mode: Mode,
    loaded: Loaded,
    role: MeshRole,
    channel: Channel,
    context_tokens: int,
    layer_groups: int | None,
    windows_apart: bool = False,
    append_tokens: int = 0,
) -> Replica:
    """Builds the executor of a loaded model.

    Args:
        context_tokens: Longest sequence.
        layer_groups: Number of layer groups, equal on both sides of a hand-off.
        windows_apart: Field of `MeshLimits`.
        append_tokens: Configured longest prompt, in tokens, that a decode mesh prefills itself.
    """
    platform = str(loaded.mesh.devices.flat[0].platform)
    limits = mesh_limits(
        config,
        mode,
        loaded.model.kv_spec,
        context_tokens,
        layer_groups,
        platform,
        windows_apart=windows_apart,
        rings=windows_apart and role.decode,
        append_tokens=append_tokens if role.decode and not role.prefill else 0,
    )
    executor = MeshExecutor(
        name, loaded.model, Programs(loaded.mesh), config.layout, limits, role, channel
    )
    return Replica(config, executor, loaded)


def build_worker_replica(
    name: str,
    role: WorkerRole,
    config: WorkerConfig,
    load: LoadModel,
    devices: Sequence[Device],
    channel: Channel,
    plane: KvPlane,
) -> Replica:
    """Builds the replica of one worker on the first of `devices`; `plane` becomes part of the
    executor's card. Blocks while weights are loaded. Raises LayoutError if devices are too few."""
    layout = config.instance.layout
    if layout.devices > len(devices):
        raise LayoutError(
            f"layout {layout} needs {layout.devices} devices, and there are {len(devices)}; choose"
            " a smaller one, or give more"
        )
    loaded = load(layout, devices[: layout.devices])
    check_reuse(loaded.model.kv_spec, config.prefix)
    mode = worker_mode(role, config.mode)
    instance = build_replica(
        name,
        config.instance,
        mode,
        loaded,
        mesh_role(role, config.instance, config.prefix),
        channel,
        context_tokens(config.model, loaded.model),
        layer_groups(role, config),
        hands_windows_apart(loaded.model.kv_spec.can_part, mode, config.prefix),
        config.prefix.append_tokens,
    )
    executor = instance.executor
    executor.card = replace(executor.card, ends=plane.ends, transports=plane.transports)
    return instance


def worker_mode(role: WorkerRole, asked: Mode) -> Mode:
    if role is not WorkerRole.MIXED:
        return Mode.DISAGGREGATED
    if asked is Mode.DISAGGREGATED:
        raise ConfigError(
            "mode=disaggregated: a mixed worker has one mesh; set mode to chunked or unified"
        )
    return asked


def mesh_role(role: WorkerRole, config: InstanceConfig, prefix: PrefixConfig) -> MeshRole:
    """Returns the capabilities that the executor of a worker of this role needs."""
    if role is WorkerRole.PREFILL:
        return MeshRole(
            prefill=True,
            decode=False,
            emit=True,
            extracts=prefix.reuse,
            host_tokens=prefix.host_tokens(config.page_size),
            disk=prefix.disk_dir,
            peer_tokens=prefix.peer_tokens(config.page_size),
        )
    return MeshRole(
        prefill=role is WorkerRole.MIXED,
        decode=True,
        codec=config.codec,
        extracts=True,
        spills=prefix.host_bytes > 0,
    )


def layer_groups(role: WorkerRole, config: WorkerConfig) -> int | None:
    return 1 if role is WorkerRole.MIXED else config.instance.layer_groups


async def warm_up(
    instance: Replica,
    progress: Progress | None = None,
    turn: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Compiles and runs every program of the replica.

    Args:
        turn: Awaited before each program, to wait for an idle mesh if the worker serves meanwhile.
    """
    executor = instance.executor
    await run_steps([(executor, step) for step in warm_up_steps(executor)], progress, turn)


async def run_steps(
    steps: Sequence[tuple[MeshExecutor, Callable[[], None]]],
    progress: Progress | None,
    turn: Callable[[], Awaitable[None]] | None,
) -> None:
    """Runs each step, after awaiting `turn`, on its executor's dispatch thread between commands."""
    for done, (executor, step) in enumerate(steps):
        if turn:
            await turn()
        await executor.on_dispatch_thread(step)
        if progress:
            progress(done + 1, len(steps))


def context_tokens(config: ModelConfig, model: Model) -> int:
    asked = config.context_tokens
    if asked is not None and asked > model.context_tokens:
        raise ConfigError(
            f"model.context_tokens={asked} exceeds the model's {model.context_tokens}; lower it"
        )
    return asked or model.context_tokens

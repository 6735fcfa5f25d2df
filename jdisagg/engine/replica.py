"""Builds and warms up a replica: a model on one mesh of this process, with the mesh's executor.

The caller passes the function that loads weights (`LoadModel`) and the channel that transfers KV
(`Channel`). This module must import neither gRPC nor a model family."""

import asyncio
import gc
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import jax

from jdisagg.assembly import WorkerHost
from jdisagg.clock import to_the_end
from jdisagg.config import NO_PREFIX, InstanceConfig, Mode, ModelConfig, PrefixConfig, WorkerConfig
from jdisagg.costs.measured import StepTimes
from jdisagg.engine.limits import asked_groups, hands_windows_apart, mesh_limits, stage_cut
from jdisagg.engine.stages import check_stages
from jdisagg.errors import ConfigError, LayoutError
from jdisagg.executor.mesh_executor import MeshExecutor, MeshRole
from jdisagg.executor.programs import Programs
from jdisagg.executor.step_times import measure_step_times, measured_tokens
from jdisagg.executor.warm_up import WarmUpStep, warm_up_steps
from jdisagg.layout.axes import Layout
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.layout.platforms import traits_of
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.model_api import Device, Model
from jdisagg.transfer.channel import Channel


class Loaded(Protocol):
    """A loaded model. Its arrays are on `meshes`, one mesh for each pipeline stage, with axes
    ("dp", "kv", "rep"). `mesh` is the first of them."""

    @property
    def model(self) -> Model: ...
    @property
    def mesh(self) -> jax.sharding.Mesh: ...
    @property
    def meshes(self) -> tuple[jax.sharding.Mesh, ...]: ...


# Loads a model. Called with a layout, devices, and for several pipeline stages a `StageCut`.
LoadModel = Callable[..., Loaded]
Progress = Callable[[int, int], None]


@dataclass
class Replica:
    """A model on one mesh, with its host and executor.

    Attributes:
        times: Measured times of the replica's programs, or None before `measure` is called.
    """

    host: WorkerHost
    executor: MeshExecutor
    loaded: Loaded
    times: StepTimes | None = None
    _of_roles: dict[WorkerRole, StepTimes] = field(default_factory=dict)

    async def measure(self, pages: Sequence[Sequence[int]] | None = None) -> None:
        """Must be called after warm-up, and before the mesh serves or while none of its commands
        run.

        Args:
            pages: Pages of each dp rank that may be overwritten. None: all.
        """
        role = self.host.role
        if role not in self._of_roles:
            measuring = mesh_role(self.host)

            def measure() -> None:
                self._of_roles[role] = measure_step_times(self.executor, measuring, pages)

            await self.executor.on_dispatch_thread(measure)
        self.times = self._of_roles[role]

    def steps(self, *further: WorkerRole) -> list[WarmUpStep]:
        """Returns the warm-up of the worker's role; or what `further` roles need besides."""
        own, *others = [
            mesh_role(replace(self.host, role=role)) for role in (self.host.role, *further)
        ]
        of_own = warm_up_steps(self.executor, own)
        return warm_up_steps(self.executor, own, *others)[len(of_own) :] if others else of_own

    async def take_role(
        self, role: WorkerRole, pages: Sequence[Sequence[int]] | None = None, measures: bool = True
    ) -> None:
        """Lets the mesh serve in another role, and measures its times if it has not had the role
        before. As for `measure`, none of its commands may run. If this raises an error, or is
        cancelled, the role stays."""
        before = self.host.role
        try:
            await self._choose(role)
            if measures:
                await self.measure(pages)
        except BaseException:
            await to_the_end(self._choose(before))
            raise

    async def _choose(self, role: WorkerRole) -> None:
        self.host = replace(self.host, role=role)
        await self.executor.on_dispatch_thread(lambda: self.executor.choose_chunks(role.computes))
        self.times = self._of_roles.get(role)

    def scratch_tokens(self, role: WorkerRole) -> int:
        """Returns for how many positions `take_role` needs pages."""
        return 0 if role in self._of_roles else measured_tokens(self.executor.limits)


@dataclass(frozen=True, slots=True)
class KvPlane:
    """Addresses at which other meshes reach a replica for KV transfers. `ends` are the endpoints of
    the mesh's processes, in the order of process indices."""

    ends: tuple[KvEnd, ...]
    transports: int


def build_executor(
    name: str,
    config: InstanceConfig,
    mode: Mode,
    loaded: Loaded,
    role: MeshRole,
    channel: Channel,
    context_tokens: int,
    layer_groups: int | None,
    windows_apart: bool = False,
    prefix: PrefixConfig = NO_PREFIX,
) -> MeshExecutor:
    """Builds the executor of a loaded model.

    Args:
        layer_groups: Number of layer groups, or None to derive it from the model. Both sides of a
            hand-off must use the same number.
        windows_apart: Whether the KV of sliding-window layers is transferred separately
            (`MeshLimits`).
    """
    processes = len({one.process_index for one in loaded.mesh.devices.flat})
    check_stages(
        config,
        state=loaded.model.kv_spec.has_state,
        windows_apart=windows_apart,
        drafts=loaded.model.next_token is not None,
        reads_tokens=loaded.model.reads_tokens,
    )
    vision = loaded.model.vision if processes == 1 and config.layout.pp == 1 else None
    programs = Programs(*loaded.meshes)
    limits = mesh_limits(
        config,
        mode,
        loaded.model.kv_spec,
        context_tokens,
        layer_groups,
        programs.platform,
        windows_apart=windows_apart,
        rings=windows_apart and role.decode,
        append_tokens=prefix.appends if role.decode and (role.emit or not role.prefill) else 0,
        prefix=prefix if role.prefill or prefix.appends else NO_PREFIX,
    )
    limits = replace(
        limits,
        draft_layer=loaded.model.next_token.source if loaded.model.next_token else "",
        images=None if vision is None else vision.format,
        image_rows=0 if vision is None else vision.kept_rows,
    )
    return MeshExecutor(name, loaded.model, programs, config.layout, limits, role, channel)


def build_replica(
    host: WorkerHost,
    load: LoadModel,
    devices: Sequence[Device],
    channel: Channel,
    plane: KvPlane | None = None,
) -> Replica:
    """Builds the replica of one worker on as many of the first `devices` as its layout needs.
    Blocks while weights are loaded.

    Args:
        plane: Addresses for peers of other processes, which become a part of the mesh's card.

    Raises:
        LayoutError: There are too few devices.
    """
    config = host.config
    layout = config.instance.layout
    if layout.devices > len(devices):
        raise LayoutError(
            f"layout {layout} needs {layout.devices} devices, and there are {len(devices)}; choose"
            " a smaller one, or give more"
        )
    groups = layer_groups(host.role, config)
    loaded = load_stages(load, layout, devices[: layout.devices], groups)
    executor = build_executor(
        host.name,
        config.instance,
        host.mode,
        loaded,
        mesh_capabilities(host),
        channel,
        context_tokens(config.model, loaded.model),
        groups,
        hands_windows_apart(loaded.model.kv_spec.can_part, host.mode),
        config.prefix,
    )
    executor.choose_chunks(host.role.computes)
    if plane is not None:
        executor.card = replace(executor.card, ends=plane.ends, transports=plane.transports)
    return Replica(host, executor, loaded)


def mesh_capabilities(host: WorkerHost) -> MeshRole:
    """Returns what the mesh must be able to do in each role that the worker may have."""
    one = mesh_role(host)
    if not host.changes:
        return one
    other = mesh_role(replace(host, role=host.role.other))
    return replace(
        max(one, other, key=lambda role: role.decode),  # its blocks may have a codec
        prefill=True,
        emit=True,
        extracts=one.extracts or other.extracts,
        peer_tokens=max(one.peer_tokens, other.peer_tokens),
    )


def mesh_role(host: WorkerHost) -> MeshRole:
    role, prefix, instance = host.role, host.config.prefix, host.config.instance
    prefills, decodes = role is not WorkerRole.DECODE, role is not WorkerRole.PREFILL
    return MeshRole(
        prefill=prefills,
        decode=decodes,
        emit=not decodes,
        codec=instance.codec if decodes and (host.migrates or not prefills) else "none",
        extracts=host.migrates if decodes else bool(prefix.reuse),
        host_tokens=prefix.host_tokens(instance.page_size),
        tails=decodes and prefix.grid_tokens is None,
        disk=prefix.disk_dir,
        peer_tokens=host.fetched_tokens,
    )


def layer_groups(role: WorkerRole, config: WorkerConfig) -> int | None:
    """Returns the configured number of layer groups, or None to derive it from the model. A mesh
    that prefills and decodes has one group for each pipeline stage."""
    pp = config.instance.layout.pp
    return pp if role is WorkerRole.MIXED else asked_groups(config.instance.layer_groups, pp)


def load_stages(
    load: LoadModel, layout: Layout, devices: Sequence[Device], groups: int | None
) -> Loaded:
    if layout.pp == 1:
        return load(layout, devices)
    return load(layout, devices, stage_cut(layout.pp, groups))


async def warm_up(
    replicas: Sequence[Replica],
    progress: Progress | None = None,
    more: Sequence[tuple[MeshExecutor, WarmUpStep]] = (),
    beside: bool = False,
) -> None:
    """Compiles and runs all programs of replicas, and measures their times. Programs are traced in
    turn, and as many are compiled at a time as there are processor cores. If an instance spans
    processes, one is compiled at a time, because all processes must run programs in the same order.

    On a GPU each program runs several times, because XLA builds the CUDA graph of a command buffer
    only in the second run.

    Args:
        more: Further warm-up steps, which run after those of the replicas.
        beside: Whether the meshes serve, so that one program is compiled at a time.
    """
    steps = [(one.executor, step) for one in replicas for step in one.steps()]
    steps += more
    in_order = any(executor.programs.spans_processes for executor, _ in steps)
    places = asyncio.Semaphore(1 if in_order or beside else len(os.sched_getaffinity(0)))
    done = itertools.count(1)

    async def run(executor: MeshExecutor, step: WarmUpStep) -> None:
        async with places:
            await (executor.on_dispatch_thread if in_order else executor.on_compiled)(step)
        if progress:
            progress(next(done), len(steps))

    tasks = [asyncio.create_task(run(*one)) for one in steps]
    collecting = gc.isenabled()
    gc.disable()  # tracing makes millions of objects that stay: a tenth of a start went to it
    try:
        await asyncio.gather(*tasks)
    finally:
        if collecting:
            gc.enable()
        for task in tasks:
            task.cancel()
    for executor, step in steps:
        for _ in range(1, traits_of(executor.platform).warm_runs):
            await executor.on_dispatch_thread(step)
    for replica in replicas:
        await replica.measure()


def context_tokens(config: ModelConfig, model: Model) -> int:
    asked = config.context_tokens
    if asked is not None and asked > model.context_tokens:
        raise ConfigError(
            f"model.context_tokens={asked} exceeds the model's {model.context_tokens}; lower it"
        )
    return asked or model.context_tokens

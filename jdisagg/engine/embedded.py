"""An embedded cluster: prefill and decode meshes on this process's devices, behind one request
path.

The caller passes a function (`LoadModel`) that loads weights onto a mesh, so that this package
imports no model family."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from jdisagg.assembly import LocalAffinity, LocalCluster, Worker, WorkerHost, tier_room
from jdisagg.clock import MonotonicClock
from jdisagg.config import EngineConfig, InstanceConfig, Mode
from jdisagg.dispatch.ids import random_id
from jdisagg.dispatch.placer import PlacerSettings
from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.dispatch.request_path import RequestPath
from jdisagg.dispatch.token_stream import Detokenizer, TokenStream
from jdisagg.dispatch.weights_control import WeightsControl
from jdisagg.engine.fingerprint import model_fingerprint
from jdisagg.engine.kernel_check import failed_kernels
from jdisagg.engine.limits import worker_config
from jdisagg.engine.replica import (
    LoadModel,
    Progress,
    Replica,
    build_replica,
    context_tokens,
    warm_up,
)
from jdisagg.errors import ConfigError, LayoutError, UnavailableError
from jdisagg.executor.weight_swaps import WeightsSource
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.layout.kv_spec import KVSpec
from jdisagg.messages.step_commands import KvKind, PullBlock
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.model_api import Device
from jdisagg.observe import wrap
from jdisagg.observe.observer import Observer
from jdisagg.request import Request, StreamEvent
from jdisagg.router.cluster_state import Description
from jdisagg.router.decision import NO_ROUTER_EVENTS, RouterEvents, RouterEventsList
from jdisagg.scheduler.executor import Executor
from jdisagg.scheduler.residency import BlockNames
from jdisagg.transfer.disk_store import directory_secret
from jdisagg.transfer.in_process import InProcessChannel
from jdisagg.worker.cached_kv import KeptBlock
from jdisagg.worker.mesh_worker import WorkerContext
from jdisagg.worker.weights_updates import ServedWeights

PREFILL, DECODE = "prefill-0", "decode-0"
LOOK_SECONDS = 0.25


def devices_of(config: EngineConfig) -> int:
    two = config.mode is Mode.DISAGGREGATED
    return config.decode.layout.devices + (config.prefill.layout.devices if two else 0)


def carve_devices(
    config: EngineConfig, devices: Sequence[Device]
) -> tuple[Sequence[Device], Sequence[Device]]:
    """Divides `devices` between the meshes. Returns the devices of the prefill mesh and of the
    decode mesh, which are disjoint. The prefill mesh gets the first devices. Raises LayoutError if
    there are too few devices."""
    one_mesh = config.mode is not Mode.DISAGGREGATED
    wanted = devices_of(config)
    if wanted > len(devices):
        layouts = (
            f"decode ({config.decode.layout})"
            if one_mesh
            else f"prefill ({config.prefill.layout}) and decode ({config.decode.layout})"
        )
        raise LayoutError(
            f"{layouts} need {wanted} devices, and there are {len(devices)}; choose smaller"
            " layouts, or give more devices"
        )
    first = wanted - config.decode.layout.devices
    return devices[:first], devices[first:wanted]


class EmbeddedCluster:
    """Serves requests on prefill and decode meshes of this process. Call `start` first, then stream
    requests, then call `stop`. The constructor blocks while weights are loaded. Requests must be
    streamed on the event loop that called `start`.

    Args:
        load: Function that loads the model onto the devices of a layout.
        detokenizer: Converter of the model's tokens to text.
        devices: Devices for the meshes. The prefill mesh gets the first ones.
        observer: Observer of the workers, the meshes and the request path (`observed_path`), or
            None.
        events: Listener that receives the router's decisions, or None.
    """

    def __init__(
        self,
        config: EngineConfig,
        load: LoadModel,
        detokenizer: Detokenizer,
        devices: Sequence[Device],
        observer: Observer | None = None,
        events: RouterEvents = NO_ROUTER_EVENTS,
    ) -> None:
        self.config = config
        self.clock = MonotonicClock()
        self.channel = InProcessChannel(self.clock)
        self._observer = observer
        self._meshes: list[Executor] = []
        prefill_devices, decode_devices = carve_devices(config, devices)
        two = config.mode is Mode.DISAGGREGATED
        role = WorkerRole.DECODE if two else WorkerRole.MIXED
        self.decode = self.build(DECODE, role, load, decode_devices)
        self.prefill: Replica | None = None
        if two:
            self.prefill = self.build(PREFILL, WorkerRole.PREFILL, load, prefill_devices)
        self.model = self.decode.loaded.model
        self.context_tokens = context_tokens(config.model, self.model)
        self._names = self._block_names()
        self.local = LocalCluster(self.clock, random_id, self._between)
        ports = self._make_ports()
        appends = self._names is not None and config.prefix.appends > 0
        self.path = RequestPath(
            ports,
            lambda request: TokenStream.of(detokenizer, request),
            config.limits,
            self.clock,
            PlacerSettings(
                config.routing,
                affinity=self._affinity() if appends else None,
                events=RouterEventsList(events, observer.metrics) if observer else events,
            ),
        )
        self.weights = WeightsControl(self.path, self.clock, self.path.counters)
        self.observed_path = wrap.path(self.path, observer)
        if observer:
            self._watch(observer)

    def _between(self, worker: Worker, caller: Worker | None) -> Sequence[object]:
        return wrap.calls(worker, caller, self._observer)

    def _affinity(self) -> LocalAffinity:
        """The router uses the index only if a cache hit can make a request skip the prefill
        mesh."""
        assert self._names is not None
        return LocalAffinity(list(self.local.workers.values()), self._names.secret)

    def _make_ports(self) -> ClusterPorts:
        if self.prefill:
            self.add(self.prefill)
            self.decode.executor.expect(self.prefill.executor.card)
        self.add(self.decode)
        return self.local.cluster_ports()

    def build(
        self,
        name: str,
        role: WorkerRole,
        load: LoadModel,
        devices: Sequence[Device],
        instance: InstanceConfig | None = None,
    ) -> Replica:
        """Builds the replica of a worker. `instance` replaces the configured one of its role."""
        config = worker_config(self.config, role)
        prefix = replace(config.prefix, peer_fetch=False)  # one worker of a role has no peers
        config = replace(config, prefix=prefix, instance=instance or config.instance)
        context = WorkerContext(name, self.clock, random_id, tiers=tier_room(prefix))
        host = WorkerHost(context, role, config, migrates=False)
        return build_replica(host, load, devices, self.channel)

    def add(self, replica: Replica) -> Worker:
        """Adds the worker of a replica. Must be called before `start`."""
        host = replica.host.knowing(
            names=self._names,
            times=lambda: replica.times,
            kernels=failed_kernels(),
            weights=ServedWeights(start_folder=self.config.model.directory),
        )
        self._meshes.append(wrap.mesh(host.name, replica.executor, self._observer))
        return self.local.add(host, self._meshes[-1])

    def _block_names(self) -> BlockNames | None:
        """If blocks are cached on disk, the secret is stored in the cache directory instead, and
        names include the model's fingerprint, so that a restarted process finds its blocks."""
        config = self.config
        if not config.prefix.disk_dir:
            return BlockNames.of(config.prefix, secrets.token_bytes(32), config.model.dtype)
        model = config.model
        if not model.directory:
            raise ConfigError(
                "prefix.disk_dir keeps KV for later processes, which know the model by its files,"
                " and model.directory is empty; set model.directory"
            )
        fingerprint = model_fingerprint(
            model.directory, model.dtype, model.weights, model.kv_dtype, model.draft
        )
        secret = directory_secret(config.prefix.disk_dir)
        return BlockNames.of(config.prefix, secret, f"{fingerprint} {self.kv_spec}")

    def _watch(self, observer: Observer) -> None:
        observer.metrics.watch_counters("path", self.path.counters)
        for worker, replica in zip(self._workers, self.replicas, strict=True):
            programs = replica.executor.programs
            observer.metrics.watch_worker(
                worker.name,
                worker.status,
                worker.counters,
                lambda programs=programs: programs.compilations,
            )

    def constrain(self, grammars: GrammarCompiler | None) -> None:
        """Sets the compiler of requests' grammars. Must be called before `start`. With None,
        requests with a grammar are refused."""
        for replica in self.replicas:
            replica.executor.constrain(grammars)
        for worker in self._workers:
            worker.constrain(grammars)

    def read_weights_with(self, source: WeightsSource | None) -> None:
        """Sets the reader of new weights, for updates. Must be called before `start`. With None,
        updates are refused."""
        for replica in self.replicas:
            replica.executor.swaps.source = source

    def describe(self, descriptions: Mapping[str, Description]) -> None:
        """Sets the descriptions of workers by which the router predicts the seconds of a request.
        Must be called before `start`."""
        for name, description in descriptions.items():
            self.path.placer.accounts.state.describe(name, description)

    @property
    def kv_spec(self) -> KVSpec:
        return self.model.kv_spec

    @property
    def replicas(self) -> list[Replica]:
        return [replica for replica in (self.prefill, self.decode) if replica]

    @property
    def _workers(self) -> list[Worker]:
        return list(self.local.workers.values())

    @property
    def compilations(self) -> int:
        """Number of programs compiled so far. It stays constant after warm-up."""
        return sum(replica.executor.programs.compilations for replica in self.replicas)

    async def start(self, progress: Progress | None = None) -> None:
        if self.config.warm_up:
            await self.warm_up(progress)
        await self.start_workers()

    async def warm_up(self, progress: Progress | None = None) -> None:
        """Prepares every program, so that no request waits for a compilation. Each program is
        compiled, or loaded from the compilation cache."""
        more = [(self.decode.executor, step) for step in self._channel_steps()]
        await warm_up(self.replicas, progress, more)

    async def start_workers(self) -> None:
        await self.local.start()

    def _channel_steps(self) -> list[Callable[[], None]]:
        if not self.prefill:
            return []
        source, executor = self.prefill.executor, self.decode.executor
        codec, limits = self.config.decode.codec, source.limits
        blocks = [
            (spec.row_heads, kind, groups, tokens)
            for spec, kind, shapes in (
                (limits.sent, KvKind.POSITIONS, limits.block_shapes()),
                (limits.kv_spec.windowed, KvKind.WINDOW, limits.window_shapes()),
            )
            for groups, tokens in shapes
        ]

        def warm(heads: int, kind: KvKind, groups: range, tokens: int) -> None:
            block = PullBlock(
                -1, 0, 0, groups.start, tokens, 0.0, codec=codec, groups=len(groups), kind=kind
            )
            mesh = source.blocks.mesh(kind, groups.start)
            self.channel.warm_up(mesh, executor.pull_target(block), heads)

        return [partial(warm, *block) for block in blocks]

    def stream(self, request: Request) -> AsyncIterator[StreamEvent]:
        return self.observed_path.stream(request)

    async def suspend(self, request_id: str, tenant: str = "") -> None:
        """Suspends a streaming request (`RequestPath.suspend`). It holds no slots and no pages, and
        its stream pauses.

        Raises:
            InvalidRequestError: The tenant has no request with this ID in progress.
        """
        await self.path.suspend(tenant, request_id)

    def resume(self, request_id: str, tenant: str = "") -> None:
        """Continues a suspended request. Raises the same error as `suspend`."""
        self.path.resume(tenant, request_id)

    async def status(self) -> tuple[WorkerStatus, ...]:
        return await self.path.status()

    def kept_blocks(self) -> tuple[KeptBlock, ...]:
        """Lists the contents of the prefix cache without changing it. Must be called on the
        cluster's event loop.

        Returns:
            One entry for each cached copy of a block. Sorted by worker, then by tier (device pages,
                host memory, disk), then by last use (least recently used first). Empty if
                `prefix.reuse` is off.
        """
        return tuple(block for worker in self._workers for block in worker.kept_blocks())

    async def broken(self) -> UnavailableError:
        """Waits until the worker of a mesh has failed. Returns the error, which has the reason."""
        while True:
            for worker in self._workers:
                try:
                    worker.status_now()
                except UnavailableError as error:
                    return error
            await self.clock.sleep(LOOK_SECONDS)

    async def drain(self) -> None:
        await self.path.drain()
        await self.local.drain()

    async def stop(self) -> None:
        await self.local.stop()
        for mesh in self._meshes:
            await asyncio.to_thread(mesh.close)

"""An embedded cluster: prefill and decode meshes carved from this process's devices, one request
path over both.

This is assembly and nothing else: executors on meshes, workers on executors, the path over the
workers. How weights get onto a mesh is the caller's affair (`LoadModel`), so that this package
knows no model family."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from jdisagg.clock import MonotonicClock
from jdisagg.config import EngineConfig, InstanceConfig, Mode
from jdisagg.dispatch.placer import PlacerSettings
from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.dispatch.request_path import RequestPath
from jdisagg.dispatch.router_events import NO_ROUTER_EVENTS, RouterEvents, RouterEventsList
from jdisagg.dispatch.token_stream import Detokenizer, TokenStream
from jdisagg.engine.fingerprint import model_fingerprint
from jdisagg.engine.instance import (
    Instance,
    Loaded,
    LoadModel,
    Progress,
    build_instance,
    context_tokens,
    run_steps,
)
from jdisagg.engine.kept_here import KeptHere
from jdisagg.engine.limits import check_reuse, hands_windows_apart
from jdisagg.engine.memory_plan import tier_room
from jdisagg.errors import ConfigError, LayoutError, UnavailableError
from jdisagg.executor.mesh_executor import MeshRole
from jdisagg.executor.warm_up import warm_up_steps
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.ids import random_id
from jdisagg.layout.kv_spec import KVSpec
from jdisagg.messages.ports import PeerPort, PrefillPort
from jdisagg.messages.step_commands import PullBlock
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.model_api import Device
from jdisagg.observe import wrap
from jdisagg.observe.observer import Observer
from jdisagg.request import Request, StreamEvent
from jdisagg.router.cluster_state import Description
from jdisagg.scheduler.executor import Executor
from jdisagg.scheduler.kept_view import KeptBlock
from jdisagg.scheduler.residency import BlockNames
from jdisagg.transfer.disk_store import directory_secret
from jdisagg.transfer.in_process import InProcessChannel
from jdisagg.worker.decode_worker import DecodeWorker
from jdisagg.worker.mesh_worker import WorkerContext
from jdisagg.worker.prefill_worker import PrefillWorker

PREFILL, DECODE = "prefill-0", "decode-0"
LOOK_SECONDS = 0.25
Record = Callable[[str, Instance], Executor]


def devices_of(config: EngineConfig) -> int:
    """As many as the layouts need."""
    two = config.mode is Mode.DISAGGREGATED
    return config.decode.layout.devices + (config.prefill.layout.devices if two else 0)


def carve_devices(
    config: EngineConfig, devices: Sequence[Device]
) -> tuple[Sequence[Device], Sequence[Device]]:
    """Devices of the prefill and the decode mesh: disjoint, in order; none for prefill in the
    one-mesh modes."""
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
    """Build, `start`, stream, `stop`. Building blocks while weights are loaded; `stream` is called
    on the event loop that started it. `observer`: who measures workers and meshes, if anybody does;
    `observed_path` is then measured too. `record` may put something between a worker and its mesh.
    `events` gets the router's decisions."""

    def __init__(
        self,
        config: EngineConfig,
        load: LoadModel,
        detokenizer: Detokenizer,
        devices: Sequence[Device],
        observer: Observer | None = None,
        record: Record | None = None,
        events: RouterEvents = NO_ROUTER_EVENTS,
    ) -> None:
        self.config = config
        self.clock = MonotonicClock()
        self.channel = InProcessChannel(self.clock)
        self._observer, self._record = observer, record
        self._meshes: list[Executor] = []
        self._workers: list[PrefillWorker | DecodeWorker] = []
        prefill_devices, decode_devices = carve_devices(config, devices)
        disaggregated = config.mode is Mode.DISAGGREGATED
        decode_loaded = load(config.decode.layout, decode_devices)
        self.model = decode_loaded.model
        check_reuse(self.model.kv_spec, config.prefix)
        self.context_tokens = context_tokens(config.model, self.model)
        self.prefill: Instance | None = None
        spills = config.prefix.host_bytes > 0
        if disaggregated:
            prefill_loaded = load(config.prefill.layout, prefill_devices)
            role = MeshRole(
                prefill=True,
                decode=False,
                emit=True,
                extracts=config.prefix.reuse,
                host_tokens=config.prefix.host_tokens(config.prefill.page_size),
                disk=config.prefix.disk_dir,
            )
            self.prefill = self._instance("prefill", config.prefill, prefill_loaded, role)
            role = MeshRole(False, decode=True, codec=config.decode.codec, spills=spills)
        else:
            role = MeshRole(prefill=True, decode=True, spills=spills)
        self.decode = self._instance("decode", config.decode, decode_loaded, role)
        if self.prefill:
            self.decode.executor.expect(self.prefill.executor.card)
        told = RouterEventsList(events, observer.metrics) if observer else events
        names = self._names = self._block_names()
        ports = self._make_ports()
        # with a worker of each kind there is nothing to choose, unless one may do without the other
        appends = config.prefix.append_tokens > 0
        affinity = KeptHere(self._workers, names.secret) if names and appends else None
        self.path = RequestPath(
            ports,
            lambda request: TokenStream.of(detokenizer, request),
            config.limits,
            self.clock,
            PlacerSettings(config.routing, affinity=affinity, events=told),
        )
        self.observed_path = wrap.path(self.path, observer)
        if observer:
            self._watch(observer)

    def _make_ports(self) -> ClusterPorts:
        """Makes the workers; the ports by which the path reaches them."""
        config, observer, names = self.config, self._observer, self._names
        prefill_ports: dict[str, PrefillPort] = {}
        peers: dict[str, PeerPort] = {}
        if self.prefill:
            prefill_worker = PrefillWorker(
                WorkerContext(
                    PREFILL, self.clock, random_id, names=names, tiers=tier_room(config.prefix)
                ),
                self._mesh(PREFILL, self.prefill),
                config.prefill,
                config.limits,
            )
            prefill_ports[PREFILL] = wrap.prefill(PREFILL, prefill_worker, observer)
            peers[PREFILL] = wrap.peer(DECODE, prefill_worker, observer)
            self._workers.append(prefill_worker)
        decode_worker = DecodeWorker(
            WorkerContext(
                DECODE, self.clock, random_id, names=names, tiers=tier_room(config.prefix)
            ),
            self._mesh(DECODE, self.decode),
            config.decode,
            config.limits,
            peers,
            config.mode,
        )
        self._workers.append(decode_worker)
        return ClusterPorts(prefill_ports, {DECODE: wrap.decode(DECODE, decode_worker, observer)})

    def _block_names(self) -> BlockNames | None:
        """Under a secret of this process; where blocks outlive it, under one that lies beside them,
        and told apart from those of other models."""
        config = self.config
        if not config.prefix.disk_dir:
            return BlockNames.of(config.prefix, secrets.token_bytes(32), config.model.dtype)
        model = config.model
        if not model.directory:
            raise ConfigError(
                "prefix.disk_dir keeps KV of a model that later processes must know again, and"
                " model.directory is empty; name the folder of its files"
            )
        fingerprint = model_fingerprint(model.directory, model.dtype, model.weights, model.kv_dtype)
        secret = directory_secret(config.prefix.disk_dir)
        return BlockNames.of(config.prefix, secret, f"{fingerprint} {self.kv_spec}")

    def _mesh(self, name: str, instance: Instance) -> Executor:
        """The instance's executor with what records and measures it around."""
        bare = self._record(name, instance) if self._record else instance.executor
        self._meshes.append(wrap.mesh(name, bare, self._observer))
        return self._meshes[-1]

    def _watch(self, observer: Observer) -> None:
        observer.metrics.watch_counters("path", self.path.counters)
        for worker, instance in zip(self._workers, self.instances, strict=True):
            programs = instance.executor.programs
            observer.metrics.watch_worker(
                worker.name,
                worker.status,
                worker.counters,
                lambda programs=programs: programs.compilations,
            )

    def constrain(self, grammars: GrammarCompiler | None) -> None:
        """Grammars of requests are compiled by this; None: such requests are refused. Before the
        start."""
        for instance in self.instances:
            instance.executor.constrain(grammars)
        for worker in self._workers:
            worker.constrain(grammars)

    def describe(self, descriptions: Mapping[str, Description]) -> None:
        """Says what the workers of these names are, before the start, so that the router can
        predict seconds."""
        for name, description in descriptions.items():
            self.path.placer.accounts.state.describe(name, description)

    @property
    def kv_spec(self) -> KVSpec:
        return self.model.kv_spec

    @property
    def instances(self) -> list[Instance]:
        return [instance for instance in (self.prefill, self.decode) if instance]

    @property
    def compilations(self) -> int:
        """Programs compiled so far; stands still in steady state."""
        return sum(instance.executor.programs.compilations for instance in self.instances)

    async def start(self, progress: Progress | None = None) -> None:
        """Compiles every program where the configuration says so, then starts the workers."""
        if self.config.warm_up:
            await self.warm_up(progress)
        await self.start_workers()

    async def warm_up(self, progress: Progress | None = None, *, beside: bool = False) -> None:
        """Compiles every program, or loads it, one after the other. `beside`: workers were started,
        and a program is loaded only when their meshes have nothing to do; whoever needs one before
        loads it."""
        steps = [
            (instance.executor, step)
            for instance in self.instances
            for step in warm_up_steps(instance.executor)
        ]
        steps += [(self.decode.executor, step) for step in self._channel_steps()]
        await run_steps(steps, progress, self._quiet if beside else None)

    async def _quiet(self) -> None:
        for instance in self.instances:
            await instance.executor.quiet()

    async def start_workers(self) -> None:
        for worker in self._workers:
            await worker.start()

    def _channel_steps(self) -> list[Callable[[], None]]:
        """What the channel compiles for each shape of block."""
        if not self.prefill:
            return []
        source, executor, codec = (
            self.prefill.loaded.mesh,
            self.decode.executor,
            self.config.decode.codec,
        )
        limits = self.prefill.executor.limits
        blocks = [
            (spec.row_heads, window, band, tokens)
            for spec, window, shapes in (
                (limits.sent, False, limits.block_shapes()),
                (limits.kv_spec.windowed, True, limits.window_shapes()),
            )
            for band, tokens in shapes
        ]

        def warm(heads: int, window: bool, band: range, tokens: int) -> None:
            block = PullBlock(
                -1, 0, 0, band.start, tokens, 0.0, codec=codec, groups=len(band), window=window
            )
            self.channel.warm_up(source, executor.pull_target(block), heads)

        return [partial(warm, *block) for block in blocks]

    def stream(self, request: Request) -> AsyncIterator[StreamEvent]:
        return self.observed_path.stream(request)

    async def suspend(self, request_id: str, keep_seconds: float | None, tenant: str = "") -> None:
        """Lets a request that is being streamed rest, or go on: its slots and pages are free for
        others, and its stream says nothing meanwhile.

        Args:
            request_id: the request's.
            keep_seconds: for how long its KV stays in host memory, as far as `prefix.host_gib` has
                room; what is not kept is computed anew when it goes on. None: it goes on.
            tenant: the request's.

        Raises:
            InvalidRequestError: no such request is being streamed.
        """
        await self.path.suspend(tenant, request_id, keep_seconds)

    async def status(self) -> tuple[WorkerStatus, ...]:
        return await self.path.status()

    def kept_blocks(self) -> tuple[KeptBlock, ...]:
        """A look at the KV that stays for later requests. Changes nothing; on the event loop that
        started the cluster.

        Returns:
          One entry for each block and place where it lies: worker by worker, in each the device's
          pages, host memory and disk, in each by last use: what was used longest ago, and goes
          first, comes first. Empty without `prefix.reuse`.
        """
        return tuple(block for worker in self._workers for block in worker.kept_blocks())

    async def broken(self) -> UnavailableError:
        """Returns, with the reason, when a mesh is broken: what runs on it was ended, and nothing
        more will be served."""
        while True:
            for worker in self._workers:
                try:
                    worker.status_now()
                except UnavailableError as error:
                    return error
            await self.clock.sleep(LOOK_SECONDS)

    async def drain(self) -> None:
        """Returns when running requests have ended; new ones are refused."""
        await self.path.drain()
        for worker in reversed(self._workers):
            await worker.drain()

    async def stop(self) -> None:
        """Ends what runs and frees the meshes."""
        for worker in reversed(self._workers):
            await worker.stop()
        for mesh in self._meshes:
            await asyncio.to_thread(mesh.close)

    def _instance(
        self, name: str, config: InstanceConfig, loaded: Loaded, role: MeshRole
    ) -> Instance:
        groups = self.config.prefill.layer_groups if self.config.mode is Mode.DISAGGREGATED else 1
        # both sides of a hand-off cut alike
        config = replace(config, block_bytes=self.config.prefill.block_bytes)
        return build_instance(
            name,
            config,
            self.config.mode,
            loaded,
            role,
            self.channel,
            self.context_tokens,
            groups,
            hands_windows_apart(self.kv_spec.can_part, self.config.mode, self.config.prefix),
            self.config.prefix.append_tokens,
        )

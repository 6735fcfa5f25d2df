"""Runs a worker in one role, from building its executor to deregistration.

A worker process may have several runs, one after the other, on different layouts.
`WorkerProcessState` contains what later runs reuse, such as weights and compiled programs. Within a
run the worker may change between prefill and decode: its mesh can do both, with the same pages and
the same cached KV. Only models whose KV is stored in other ways in the two roles need another run.

Invariants: the worker registers only after its programs are compiled and its port answers, and
deregisters before its port closes. A run that fails frees all its resources, so that another run
can begin in the same process on the same devices."""

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax

from jdisagg.assembly import Worker, WorkerHost, tier_room
from jdisagg.clock import Clock
from jdisagg.config import WorkerConfig
from jdisagg.costs.hardware import Accelerator
from jdisagg.dispatch.ids import random_id
from jdisagg.engine.kernel_check import failed_kernels
from jdisagg.engine.memory_plan import (
    check_disk_cache,
    check_host_cache,
    describe_cache,
    device_memory,
    fit_roles,
    fit_worker,
    host_room,
)
from jdisagg.engine.prefix_defaults import fit_with_defaults, worker_defaults
from jdisagg.engine.replica import KvPlane, Loaded, LoadModel, Replica, build_replica, warm_up
from jdisagg.errors import ConfigError, JdisaggError, UnavailableError
from jdisagg.executor.autotuning import Autotuning, kind_name
from jdisagg.executor.programs import Programs
from jdisagg.instance.followers import Followers
from jdisagg.instance.processes import ProcessGroup
from jdisagg.layout.axes import Layout
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.messages.ports import DecodePort, PeerPort, PrefillPort
from jdisagg.messages.registry import ModelCard, WorkerCard
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.model_api import Device
from jdisagg.node.deployment import ModelSource
from jdisagg.node.instance_group import follow, lead
from jdisagg.node.kv_endpoint import TRANSPORTS, called_address, kv_interface
from jdisagg.node.kv_events import KvEventPublisher
from jdisagg.node.peer_ports import PeerPorts
from jdisagg.node.role_state import Role, RoleState
from jdisagg.node.run_files import WorkerProcessConfig
from jdisagg.node.signals import StopSignals
from jdisagg.node.warm_up import progress_bar
from jdisagg.node.weights_offer import serve_offer
from jdisagg.observe import wrap
from jdisagg.observe.logs import say
from jdisagg.observe.observer import Observer
from jdisagg.scheduler.executor import Executor
from jdisagg.scheduler.residency import BlockNames
from jdisagg.service.guard import Service
from jdisagg.service.internal.kv_link import GrpcKvLink
from jdisagg.service.internal.registry import RegistryClient
from jdisagg.service.internal.role_services import worker_roles_service
from jdisagg.service.internal.worker_service import (
    ANY_ID,
    decode_service,
    peer_service,
    prefill_service,
    weights_service,
)
from jdisagg.service.server import GrpcServer, block_secret, cluster_credentials, read_tokens
from jdisagg.supervisor.supervisor import EXIT_BROKEN, EXIT_CONFIG
from jdisagg.transfer.negotiated_channel import Memories, NegotiatedChannel
from jdisagg.transfer.offered_weights import OfferedWeights
from jdisagg.worker.mesh_worker import WorkerContext
from jdisagg.worker.weights_updates import ServedWeights

LOOK_SECONDS = 0.25


@dataclass(slots=True)
class WorkerProcessState:
    """State of a worker process that all its runs share.

    Attributes:
        process: Configuration in the current role. The port of its service is not 0.
        fingerprint: Hash that identifies the model, its data types and its quantization.
    """

    process: WorkerProcessConfig
    source: ModelSource
    fingerprint: str
    hardware: Accelerator | None
    observer: Observer | None
    clock: Clock
    signals: StopSignals
    forced: asyncio.Event
    group: ProcessGroup
    devices: Sequence[Device]
    roles: RoleState
    loaded: Loaded | None = None
    programs: dict[tuple[Layout, WorkerRole | None], Programs] = field(default_factory=dict)
    weights: ServedWeights = field(default_factory=ServedWeights)

    @property
    def config(self) -> WorkerConfig:
        return self.process.worker

    def become(self, what: Role) -> None:
        self.roles.now = what
        worker = replace(self.config, instance=replace(self.config.instance, layout=what.layout))
        self.process = replace(self.process, role=what.role, worker=worker)

    @property
    def stores_alike(self) -> bool:
        """Whether prefill and decode workers of the model store KV in the same way, in pages."""
        geometry = self.source.geometry
        return not geometry.windowed_part and geometry.linear is None


class WorkerRuntime:
    """One run of a worker in one role. The constructor must run on the event loop. `live` may be
    called once."""

    def __init__(self, state: WorkerProcessState) -> None:
        self._state, process, config = state, state.process, state.config.instance
        room = host_room(state.devices[0], config.memory_fraction)
        self._config = worker_defaults(
            state.config, process.role, process.sharers, state.group.processes, room
        )
        self._service = state.config.service
        self._address = called_address(self._service)
        self._interface = kv_interface(self._service)
        credentials = cluster_credentials(self._service)
        self._memories = Memories.of_worker(self._service.kv_channel, self._interface)
        end = self._memories.end(self._address, random_id())
        self._times = state.config.limits.timeouts
        self._link = GrpcKvLink(end, credentials, timeouts=self._times.transfer)
        self._peers = PeerPorts(credentials, state.clock, self._times.call)
        self._followers: Followers | None = None
        self._tuning = ""
        # whether the mesh serves both roles, and those whose programs are compiled
        can_change = not state.roles.fixed and process.role is not WorkerRole.MIXED
        self._changes = can_change and config.layout.pp == 1 and state.stores_alike
        self._warm = {process.role}

    async def live(self, load: LoadModel) -> int:
        """Returns the exit status, which is 0 after a signal or a requested role change. Raises an
        error if the worker cannot start."""
        state, end = self._state, self._link.end
        channel = NegotiatedChannel(
            state.clock,
            end,
            self._link,
            host=self._interface,
            transports=TRANSPORTS,
            memories=self._memories,
            timeouts=self._times.transfer,
        )
        self._link.deliver_to(channel)
        try:
            return (
                await self._led(load, channel, end)
                if state.group.leads
                else await self._following(self._build(load, channel, end), end)
            )
        finally:
            channel.close()
            await self._link.close()
            await self._peers.close()

    def _build(self, load: LoadModel, channel: NegotiatedChannel, end: KvEnd) -> Replica:
        state, config = self._state, self._fitted()
        apart = state.group.processes > 1 and config.instance.layout.dp > 1
        context = WorkerContext(
            state.process.name,
            state.clock,
            random_id,
            state.fingerprint,
            self._address,
            tiers=tier_room(config.prefix, rank_bound=apart),
            kv_channels=channel.channels,
            kernels=failed_kernels(),
            weights=state.weights,
        )
        host = WorkerHost(context, state.process.role, config, changes=self._changes)
        plane = KvPlane((end,), TRANSPORTS)
        instance = build_replica(host, load, state.devices, channel, plane)
        if config.instance.layout.pp > 1:
            channel.name_devices_by(instance.loaded.mesh)
        instance.executor.constrain(state.source.grammars)
        instance.executor.swaps.source = state.source.weights
        instance.executor.swaps.make_offer = self._offer
        state.loaded = instance.loaded
        if self._kind in state.programs:
            instance.executor.programs.adopt(state.programs[self._kind])
        state.roles.built()
        return instance

    @property
    def _kind(self) -> tuple[Layout, WorkerRole | None]:
        """What the programs depend on."""
        role = None if self._changes else self._state.process.role
        return self._state.config.instance.layout, role

    def _offer(
        self, parameters: Mapping[str, jax.Array], seconds: float, content: str
    ) -> OfferedWeights:
        service = replace(self._service, port=0, http_port=None)
        return serve_offer(OfferedWeights("", parameters, seconds, content), service)

    def _fitted(self) -> WorkerConfig:
        process, config = self._state.process, self._config
        fraction = config.instance.memory_fraction
        if config.prefix.host_bytes:
            check_disk_cache(config.prefix, config.instance.layout, self._state.group.processes)
            check_host_cache(config.prefix, self._state.devices[0], fraction, process.sharers)
        devices = self._state.devices[: config.instance.layout.devices]
        memory = device_memory(devices, fraction, process.sharers)
        shape, given = self._state.source.geometry, self._state.config.prefix
        fits = [fit_roles] * self._changes + [fit_worker]
        for fit in fits:
            try:
                self._config, plan = fit_with_defaults(
                    config, given, lambda whole: fit(whole, process.role, shape, memory)
                )
                break
            except ConfigError:
                if fit is fit_worker:
                    raise
                self._changes = False
        if self._state.group.leads:
            for text in (plan.summary, describe_cache(self._config.prefix)):
                say(f"worker {process.name}: {text}")
        return self._config

    async def _following(self, instance: Replica, end: KvEnd) -> int:
        group, service = self._state.group, self._service
        tokens = read_tokens(service.cluster_token_file)
        server = GrpcServer((self._link.service(tokens),), service, timeouts=self._times.call)
        await server.start()
        following = follow(
            group,
            instance.executor,
            lambda: self._warm_up(instance),
            self._state.clock,
            end,
            service,
            self._times.instance,
            EXIT_BROKEN,
        )
        # A follower ignores the first signal, because the leader drains and then stops its
        # followers.
        await self._unless(self._state.forced.wait(), following)
        return 0

    async def _led(self, load: LoadModel, channel: NegotiatedChannel, end: KvEnd) -> int:
        state, alone = self._state, self._state.group.processes == 1
        leading = (
            None
            if alone
            else await lead(
                state.group, state.clock, self._service, self._times.instance, EXIT_BROKEN
            )
        )
        self._followers = leading.followers if leading else None
        instance = self._build(load, channel, end)
        try:
            if not await self._unless(state.signals.first(), self._warm_up(instance)):
                return 0
            state.roles.warm()
            executor = await leading.over(instance.executor, end) if leading else instance.executor
            executor = wrap.mesh(state.process.name, executor, state.observer)
            status = await self._serve_with(instance, executor)
        except Exception:
            # In an instance of several processes, the process exits instead. It must not wait for
            # its threads, because one of them may hang in a collective.
            if alone:
                await asyncio.to_thread(instance.executor.close)
            raise
        # With EXIT_CONFIG, followers must not exit with 0, because the supervisor reads the exit
        # statuses of all processes.
        if leading and status != EXIT_CONFIG:
            await leading.stop()
        if status == 0:
            await asyncio.to_thread(executor.close)
            state.programs[self._kind] = instance.executor.programs
        return status

    async def _serve_with(self, instance: Replica, executor: Executor) -> int:
        """Builds the worker with its executor, serves and registers it. Returns the exit status.

        Args:
            instance: Replica with the loaded model and this process's executor.
            executor: Executor for the worker's commands, over all processes of the instance.
        """
        state, process, prefix = self._state, self._state.process, self._config.prefix
        worker = self._worker(instance, executor)
        tokens = read_tokens(self._service.cluster_token_file)
        services = (
            *worker_services(worker, tokens, instance.loaded.model.vocabulary, state.observer),
            self._link.service(tokens),
            worker_roles_service(state.roles, tokens),
        )
        server = GrpcServer(services, self._service, worker.boot_id, timeouts=self._times.call)
        credentials = cluster_credentials(self._service)
        registration = RegistryClient(
            process.routers,
            self._card(instance, worker),
            worker.status,
            credentials,
            self._times.membership,
            worker.kept_news,
        )
        # Clean-up runs in reverse order, also after a failed start.
        async with contextlib.AsyncExitStack() as cleanup:
            self._observe(worker, instance, cleanup)
            if prefix.events:
                events = KvEventPublisher(prefix.events, prefix.events_replay, prefix.events_topic)
                cleanup.callback(events.close)
                events.watch(worker)
            await worker.start()
            cleanup.push_async_callback(worker.stop)
            await server.start()
            cleanup.push_async_callback(server.drain)
            cleanup.callback(server.force)
            registration.start()
            cleanup.push_async_callback(registration.leave)
            self._serves(worker, instance)
            status = await self._serve(worker, instance, registration)
            if status == 0:
                await state.clock.sleep(self._times.call.last_words_seconds)
        state.roles.drained()
        return status

    def _serves(self, worker: Worker, instance: Replica) -> None:
        process, layout = self._state.process, self._state.config.instance.layout
        self._state.roles.serves(worker.boot_id, instance.loaded.model.geometry)
        say(
            f"jdisagg {process.role.value} worker {process.name} ({layout}) serves on"
            f" {self._address}"
        )

    def _worker(self, instance: Replica, executor: Executor) -> Worker:
        state, config = self._state, self._config
        names = BlockNames.of(
            config.prefix,
            block_secret(self._service),
            f"{state.fingerprint} {instance.loaded.model.kv_spec}",
        )
        host = instance.host.knowing(names=names, times=lambda: instance.times, tuning=self._tuning)
        peers = wrap.peers(state.process.name, self._peers.find, state.observer)
        worker = host.worker(executor, peers)
        worker.constrain(state.source.grammars)
        return worker

    def _observe(
        self, worker: Worker, instance: Replica, cleanup: contextlib.AsyncExitStack
    ) -> None:
        if self._state.observer:
            metrics, programs = self._state.observer.metrics, instance.executor.programs
            metrics.model = self._state.source.name
            metrics.watch_worker(
                worker.name, worker.status, worker.counters, lambda: programs.compilations
            )
            cleanup.callback(metrics.unwatch, worker.name)
            metrics.watch_counters("kv_link", self._link.counters)
            cleanup.callback(metrics.unwatch, "kv_link")

    async def _warm_up(self, instance: Replica) -> None:
        config = self._state.config
        if not config.warm_up and not config.autotune_results:
            return
        tuning = self._autotuning(instance)
        await tuning.begin(self._state.clock)
        instance.executor.programs.add_options(tuning.options)
        if config.warm_up:
            await self._compile(instance)
        tuning.finish()
        self._tuning = tuning.identity

    async def _compile(self, instance: Replica) -> None:
        began, process = self._state.clock.now(), self._state.process
        name, role = process.name, process.role
        both = process.elastic and self._changes
        more = [(instance.executor, step) for step in (instance.steps(role.other) if both else ())]
        say(f"worker {name} compiles its programs")
        with progress_bar("compiling") as progress:
            await warm_up([instance], progress, more)
        if both:
            await instance.take_role(role.other)
            await instance.take_role(role)
            self._warm.add(role.other)
        seconds, count = self._state.clock.now() - began, instance.executor.programs.compilations
        say(f"worker {name} is warm after {seconds:.1f} s ({count} programs)")

    def _autotuning(self, instance: Replica) -> Autotuning:
        """The pages of a worker may depend on its free memory, and are not a part of its kind."""
        state, config, source = self._state, self._state.config, self._state.source
        model = config.model.dtype, config.model.weights, config.model.kv_dtype, source.geometry
        device, role = state.devices[0], state.process.role
        roles = {role, role.other} if state.process.elastic and self._changes else {role}
        names = sorted(one.value for one in roles)
        return Autotuning(
            kind_name(device.device_kind, *model, names, config.mode, config.instance),
            instance.executor.programs.platform,
            config.compilation_cache,
            config.autotune_results,
            waits=state.group.processes == 1,
        )

    async def _unless(
        self, end: Coroutine[None, None, object], work: Coroutine[None, None, None]
    ) -> bool:
        """Used before the worker is registered, when there are no requests to drain."""
        working, ending = asyncio.create_task(work), asyncio.create_task(end)
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        done = working.done()
        for task in (working, ending):
            task.cancel()
        if done:
            working.result()
        return done

    def _card(self, instance: Replica, worker: Worker) -> WorkerCard:
        limits, model, state = instance.executor.limits, instance.loaded.model, self._state
        card = ModelCard(
            name=state.source.name,
            family=state.source.family,
            vocabulary=model.vocabulary,
            context_tokens=limits.context_tokens,
            dtype=state.config.model.dtype,
            kv_bytes_per_token=model.kv_spec.bytes_per_token,
            fingerprint=state.fingerprint,
            geometry=state.source.geometry,
        )
        layout = state.config.instance.layout
        return WorkerCard(
            state.process.name,
            worker.boot_id,
            state.process.role,
            self._address,
            layout,
            card,
            state.process.place,
            state.hardware,
            layout.pp,
            kept=worker.kept_scheme,
        )

    async def _change_roles(
        self, worker: Worker, instance: Replica, registration: RegistryClient
    ) -> None:
        """Changes the worker's role whenever it is asked to. Returns when it is asked for a change
        that needs another mesh."""
        roles, name = self._state.roles, self._state.process.name
        while True:
            await roles.asked.wait()
            if not (self._changes and roles.on_this_layout):
                return
            wanted = roles.take()
            assert wanted is not None, "asked"
            try:
                await self._change_role(worker, instance, wanted)
                registration.change(self._card(instance, worker))
            except Exception as error:
                known = isinstance(error, JdisaggError)
                reason = error.message if known else f"{type(error).__name__}: {error}"
                roles.failed(reason)
                text = f"error: worker {name} could not become {wanted.role.value}: {reason}"
                say(text, error=True)
            self._serves(worker, instance)

    async def _change_role(self, worker: Worker, instance: Replica, wanted: Role) -> None:
        """Compiles what is missing while the worker serves in its old role. Raises an error if the
        role has not changed."""
        state, role = self._state, wanted.role
        warms = state.config.warm_up
        if warms and role not in self._warm:
            more = [(instance.executor, step) for step in instance.steps(role)]
            await warm_up([], more=more, beside=True)
            self._warm.add(role)
        state.roles.warm()

        async def prepare(pages: tuple[tuple[int, ...], ...]) -> None:
            state.roles.drained()
            await instance.take_role(role, pages, measures=warms)

        seconds = state.config.service.drain_seconds
        scratch = instance.scratch_tokens(role) if warms else 0
        await worker.change_role(role, seconds, prepare, scratch)
        state.roles.warm()
        state.become(wanted)

    async def _serve(self, worker: Worker, instance: Replica, registration: RegistryClient) -> int:
        breaking = asyncio.create_task(self._broken(worker, registration.failed))
        ending, changing = (
            asyncio.create_task(self._state.signals.first()),
            asyncio.create_task(self._change_roles(worker, instance, registration)),
        )
        await asyncio.wait({ending, changing, breaking}, return_when=asyncio.FIRST_COMPLETED)
        drains, tasks = ending.done() or changing.done(), [breaking]
        for task in (ending, changing):
            task.cancel()
        await asyncio.gather(ending, changing, return_exceptions=True)
        if drains:
            seconds = self._state.config.service.drain_seconds
            say(f"draining, for at most {seconds:g} s")
            tasks += [
                asyncio.create_task(worker.drain(seconds)),
                asyncio.create_task(self._state.forced.wait()),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        status = 0
        if breaking.done():
            say(f"error: {breaking.result().message}", error=True)
            status = EXIT_BROKEN if isinstance(breaking.result(), UnavailableError) else EXIT_CONFIG
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return status

    async def _broken(self, worker: Worker, unwanted: "asyncio.Future[None]") -> JdisaggError:
        while True:
            if unwanted.done() and isinstance(refusal := unwanted.exception(), JdisaggError):
                return refusal
            if self._followers and self._followers.failure:
                return self._followers.failure
            try:
                await worker.status()
            except UnavailableError as error:
                return error
            await self._state.clock.sleep(LOOK_SECONDS)


def worker_services(
    worker: Worker,
    tokens: tuple[str, ...] = (),
    vocabulary: int = ANY_ID,
    observer: Observer | None = None,
) -> tuple[Service, ...]:
    """Returns the gRPC services that a worker provides to routers and to other workers. They accept
    the bearer tokens `tokens`, and refuse calls with token ids of `vocabulary` or more. The worker
    refuses prompts that are not for its role."""
    peer = peer_service(wrap.served(PeerPort, worker.name, worker, observer), tokens)
    decode = wrap.served(DecodePort, worker.name, worker, observer)
    prefill = wrap.served(PrefillPort, worker.name, worker, observer)
    return (
        decode_service(decode, tokens, vocabulary),
        prefill_service(prefill, tokens, vocabulary),
        peer,
        weights_service(worker.weights, tokens),
    )

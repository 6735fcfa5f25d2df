"""One life of a worker in one role: build, warm up, serve, register, drain, leave. What outlives it is its `Home`.

Order matters: nobody learns of the worker before its programs are compiled and its port answers, and it leaves the rosters before its
port closes. A life that fails gives back all that it has: another may begin in the same process, on the same devices.
"""

import asyncio
import contextlib
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from jdisagg.address import host_port
from jdisagg.clock import Clock
from jdisagg.dispatch.ports import WorkerRole
from jdisagg.dispatch.roster import ModelCard, WorkerCard
from jdisagg.engine.instance import (
    Instance,
    KvPlane,
    Loaded,
    LoadModel,
    WorkerConfig,
    build_worker_instance,
    random_id,
    warm_up,
    worker_mode,
)
from jdisagg.errors import JdisaggError, UnavailableError
from jdisagg.executor.programs import Programs
from jdisagg.instance.followers import Followers
from jdisagg.instance.processes import ProcessGroup
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.model_api import Device
from jdisagg.observe import wrap
from jdisagg.observe.observer import Observer
from jdisagg.observe.roster import observe_peers
from jdisagg.router.hardware import Accelerator
from jdisagg.router.model_geometry import CostGeometry
from jdisagg.scheduler.commands import Executor
from jdisagg.service.guard import Service
from jdisagg.service.kv_link import GrpcKvLink
from jdisagg.service.registry import RegistryClient
from jdisagg.service.role_services import worker_roles_service
from jdisagg.service.server import GrpcServer, cluster_credentials, read_tokens
from jdisagg.service.worker_service import decode_service, peer_service, prefill_service
from jdisagg.supervisor.supervisor import EXIT_BROKEN, EXIT_CONFIG
from jdisagg.transfer.jax_transfer import JaxTransferChannel
from jdisagg.worker.decode_worker import DecodeWorker
from jdisagg.worker.peers import PeerResolver
from jdisagg.worker.prefill_worker import PrefillWorker
from launch.instance_processes import follow, lead
from launch.peer_ports import PeerPorts
from launch.recording import record
from launch.role_keeper import Role, RoleKeeper
from launch.signals import Signals
from launch.warmed import Loading, WarmedBefore

TRANSPORTS = 4
LOOK_SECONDS = 0.25
# The last words of the streams that a drain waited for are on their way when it ends; routers close their ports when the worker leaves.
LAST_WORDS_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Who the worker is; what it is made of is its `WorkerConfig`'s affair. `record_to`: a folder for its commands; empty: none. `place`,
    `geometry`, `hardware`: as in its card."""

    name: str
    role: WorkerRole
    routers: tuple[str, ...]
    family: str
    model_name: str
    fingerprint: str
    record_to: str = ""
    place: str = ""
    geometry: CostGeometry | None = None
    hardware: Accelerator | None = None


@dataclass(slots=True)
class Home:
    """What outlives the lives of a worker in its process. `spec` and `config`, whose service has a port, say what it is now; `hurry`: at
    the second signal. `loaded`: its weights as they lie; `programs`: those of roles that it has had."""

    spec: WorkerSpec
    config: WorkerConfig
    observer: Observer | None
    clock: Clock
    signals: Signals
    hurry: asyncio.Event
    group: ProcessGroup
    devices: Sequence[Device]
    roles: RoleKeeper
    loaded: Loaded | None = None
    programs: dict[Role, Programs] = field(default_factory=dict)


class Life:
    """Build it on the loop; `live` once."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._service = home.config.service
        self._address = host_port(self._service.host, self._service.port)
        credentials = cluster_credentials(self._service)
        self._link = GrpcKvLink(KvEnd(self._address, random_id()), credentials)
        self._peers = PeerPorts(credentials, home.clock)
        self._followers: Followers | None = None

    async def live(self, load: LoadModel) -> int:
        """From its programs to its farewell. 0: it ended as it was asked to. Raises when it could not begin."""
        home, end = self._home, self._link.end
        channel = JaxTransferChannel(home.clock, end, self._link, host=self._service.host, transports=TRANSPORTS)
        self._link.deliver_to(channel)
        try:
            return await self._led(load, channel, end) if home.group.leads else await self._following(self._build(load, channel, end), end)
        finally:
            channel.close()
            await self._link.close()
            await self._peers.close()

    def _build(self, load: LoadModel, channel: JaxTransferChannel, end: KvEnd) -> Instance:
        home, plane = self._home, KvPlane((end,), TRANSPORTS)
        instance = build_worker_instance(home.spec.name, home.spec.role, home.config, load, home.devices, channel, plane)
        home.loaded = instance.loaded
        if home.roles.now in home.programs:
            instance.executor.programs.adopt(home.programs[home.roles.now])
        home.roles.built()
        return instance

    async def _following(self, instance: Instance, end: KvEnd) -> int:
        group, service = self._home.group, self._service
        server = GrpcServer((self._link.service(read_tokens(service.cluster_token_file)),), service)
        await server.start()
        following = follow(
            group, instance.executor, lambda: self._warm_up(instance), self._home.clock, end, service, exit_status=EXIT_BROKEN
        )
        await self._unless(self._home.hurry.wait(), following)  # the first signal is the leader's affair, who lets us go
        return 0

    async def _led(self, load: LoadModel, channel: JaxTransferChannel, end: KvEnd) -> int:
        home, alone = self._home, self._home.group.processes == 1
        leading = None if alone else await lead(home.group, home.clock, self._service, exit_status=EXIT_BROKEN)
        self._followers = leading.followers if leading else None
        instance = self._build(load, channel, end)
        try:
            warmed = WarmedBefore(home.config, home.spec.role, home.spec.fingerprint)
            # Who changes its role leaves the load to others meanwhile, and holds up no stream when it is back.
            later = alone and home.config.warm_up and not home.roles.changing and warmed.found()
            if not later:
                if not await self._unless(home.signals.first(), self._warm_up(instance)):
                    return 0
                warmed.note()
            home.roles.warm()
            executor = self._watched(instance, await leading.over(instance.executor, end) if leading else instance.executor)
            status = await self._serve_with(instance, executor, later)
        except Exception:
            if alone:  # several processes end, and one that hangs with the others must not wait for its threads
                await asyncio.to_thread(instance.executor.close)
            raise
        if leading and status != EXIT_CONFIG:  # that is how the supervisor is to know all of the instance
            await leading.stop()
        if status == 0:
            await asyncio.to_thread(executor.close)
            home.programs[home.roles.now] = instance.executor.programs
        return status

    async def _serve_with(self, instance: Instance, executor: Executor, warm_up_later: bool) -> int:
        """`warm_up_later`: serve at once; programs are loaded between the commands of whoever comes first."""
        home, spec = self._home, self._home.spec
        worker = self._worker(executor, observe_peers(spec.name, self._peers.find, home.observer) if home.observer else self._peers.find)
        tokens = read_tokens(self._service.cluster_token_file)
        services = (
            *_services(worker, tokens, instance.loaded.model.vocabulary),
            self._link.service(tokens),
            worker_roles_service(home.roles, tokens),
        )
        server = GrpcServer(services, self._service, worker.boot_id)
        credentials = cluster_credentials(self._service)
        registration = RegistryClient(spec.routers, self._card(instance, worker), worker.status, credentials)
        loading = Loading(home.clock.now)
        if warm_up_later:
            worker.loading_seconds = loading.seconds
        async with contextlib.AsyncExitStack() as farewell:  # in this order backwards, also when something does not begin
            self._observe(worker, instance, farewell)
            await worker.start()
            farewell.push_async_callback(worker.stop)
            await server.start()
            farewell.push_async_callback(server.drain)
            farewell.callback(server.hurry)
            registration.start()
            farewell.push_async_callback(registration.leave)
            home.roles.serves(worker.boot_id, instance.loaded.model.geometry)
            layout = home.config.instance.layout
            print(f"jdisagg {spec.role.value} worker {spec.name} ({layout}) serves on {self._address}", flush=True)
            if warm_up_later:
                farewell.push_async_callback(_ended, asyncio.create_task(self._warm_up_beside(instance, loading)))
            status = await self._serve(worker, registration.failed)
            if status == 0:
                await home.clock.sleep(LAST_WORDS_SECONDS)
        home.roles.drained()
        return status

    def _observe(self, worker: PrefillWorker | DecodeWorker, instance: Instance, farewell: contextlib.AsyncExitStack) -> None:
        if self._home.observer:
            metrics, programs = self._home.observer.metrics, instance.executor.programs
            metrics.watch_worker(worker.name, worker.status, worker.counters, lambda: programs.compilations)
            farewell.callback(metrics.unwatch, worker.name)
            metrics.watch_counters("kv_link", self._link.counters)
            farewell.callback(metrics.unwatch, "kv_link")

    async def _warm_up(self, instance: Instance, loading: Loading | None = None) -> None:
        if not self._home.config.warm_up:
            return
        began = self._home.clock.now()
        print(f"worker {self._home.spec.name} compiles its programs", flush=True)
        terminal = sys.stderr.isatty()
        with tqdm(desc="compiling", unit="program", delay=2, file=sys.stderr, leave=False, disable=not terminal) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)
                if loading:
                    loading.progress(done, total)

            await warm_up(instance, progress)
        print(f"worker {self._home.spec.name} is warm after {self._home.clock.now() - began:.1f} s", flush=True)

    async def _warm_up_beside(self, instance: Instance, loading: Loading) -> None:
        """While it serves. What fails here fails for a request too, and is told there; here it is only said."""
        try:
            await self._warm_up(instance, loading)
        except Exception as error:
            print(f"worker {self._home.spec.name} could not load its programs beforehand: {error}", file=sys.stderr, flush=True)
        finally:
            loading.end()

    async def _unless(self, end: Coroutine[None, None, object], work: Coroutine[None, None, None]) -> bool:
        """Whether the work was done; False when the end came before, which is at once: nobody knows this worker yet."""
        working, ending = asyncio.create_task(work), asyncio.create_task(end)
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        done = working.done()
        for task in (working, ending):
            task.cancel()
        if done:
            working.result()
        return done

    def _watched(self, instance: Instance, executor: Executor) -> Executor:
        """Recorded and observed, where that is asked for."""
        spec, config = self._home.spec, self._home.config
        if spec.record_to:
            layout, model = config.instance.layout, config.model
            executor = record(Path(spec.record_to), spec.name, executor, instance.executor, layout, model.directory, model.dtype)
        return wrap.mesh(spec.name, executor, self._home.observer)

    def _worker(self, executor: Executor, find_peer: PeerResolver) -> PrefillWorker | DecodeWorker:
        spec, config = self._home.spec, self._home.config
        if spec.role is WorkerRole.PREFILL:
            return PrefillWorker(spec.name, executor, config.instance, config.limits, self._home.clock, random_id, spec.fingerprint)
        mode = worker_mode(spec.role, config.mode)
        return DecodeWorker(
            spec.name,
            executor,
            config.instance,
            mode,
            config.limits,
            find_peer,
            self._home.clock,
            random_id,
            spec.fingerprint,
            self._address,
        )

    def _card(self, instance: Instance, worker: PrefillWorker | DecodeWorker) -> WorkerCard:
        limits, model, spec = instance.executor.limits, instance.loaded.model, self._home.spec
        card = ModelCard(
            name=spec.model_name,
            family=spec.family,
            vocabulary=model.vocabulary,
            context_tokens=limits.context_tokens,
            dtype=self._home.config.model.dtype,
            kv_bytes_per_token=model.kv_spec.bytes_per_token,
            fingerprint=spec.fingerprint,
            geometry=spec.geometry,
        )
        layout = self._home.config.instance.layout
        return WorkerCard(spec.name, worker.boot_id, spec.role, self._address, layout, card, spec.place, spec.hardware)

    async def _serve(self, worker: PrefillWorker | DecodeWorker, unwanted: "asyncio.Future[None]") -> int:
        """Until it is asked to end or to change its role, and drained then, or its mesh broke, or no router will have it."""
        breaking = asyncio.create_task(self._broken(worker, unwanted))
        ending, changing = asyncio.create_task(self._home.signals.first()), asyncio.create_task(self._home.roles.asked.wait())
        await asyncio.wait({ending, changing, breaking}, return_when=asyncio.FIRST_COMPLETED)
        tasks = [ending, changing, breaking]
        if ending.done() or changing.done():
            seconds = self._home.config.service.drain_seconds
            print(f"draining, for at most {seconds:g} s", flush=True)
            tasks += [asyncio.create_task(worker.drain(seconds)), asyncio.create_task(self._home.hurry.wait())]
            await asyncio.wait(tasks[2:], return_when=asyncio.FIRST_COMPLETED)
        status = 0
        if breaking.done():
            print(f"error: {breaking.result().message}", file=sys.stderr, flush=True)
            status = EXIT_BROKEN if isinstance(breaking.result(), UnavailableError) else EXIT_CONFIG
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return status

    async def _broken(self, worker: PrefillWorker | DecodeWorker, unwanted: "asyncio.Future[None]") -> JdisaggError:
        """Returns when the worker's mesh is broken, or another process of its instance is gone, or all routers refused it."""
        while True:
            if unwanted.done() and isinstance(refusal := unwanted.exception(), JdisaggError):
                return refusal
            if self._followers and self._followers.failure:
                return self._followers.failure
            try:
                await worker.status()
            except UnavailableError as error:
                return error
            await self._home.clock.sleep(LOOK_SECONDS)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _services(worker: PrefillWorker | DecodeWorker, tokens: tuple[str, ...], vocabulary: int) -> tuple[Service, ...]:
    if isinstance(worker, PrefillWorker):
        return prefill_service(worker, tokens, vocabulary), peer_service(worker, tokens)
    return decode_service(worker, tokens, vocabulary), peer_service(worker, tokens)

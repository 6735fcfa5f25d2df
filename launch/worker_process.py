"""A worker process from its configuration to its end: build, warm up, serve, register, beat, drain, leave.

One event loop: gRPC, the worker's loop and the heartbeats; JAX runs on the executor's threads. Order matters: nobody learns of the
worker before its programs are compiled and its port answers, and it leaves the rosters before its port closes.
"""

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from jdisagg.clock import MonotonicClock
from jdisagg.config import ServiceConfig
from jdisagg.dispatch.ports import HandoffSource, PeerPort, WorkerRole
from jdisagg.dispatch.roster import ModelCard, WorkerCard
from jdisagg.engine.instance import (
    Instance,
    KvPlane,
    LoadModel,
    WorkerConfig,
    build_worker_instance,
    random_id,
    warm_up,
    worker_mode,
)
from jdisagg.errors import HandoffError, UnavailableError
from jdisagg.instance.followers import Followers
from jdisagg.instance.processes import ProcessGroup
from jdisagg.layout.mesh_card import KvEnd
from jdisagg.model_api import Device
from jdisagg.observe import wrap
from jdisagg.observe.observer import Observer
from jdisagg.observe.roster import observe_peers
from jdisagg.scheduler.commands import Executor
from jdisagg.service.connection import Credentials
from jdisagg.service.guard import Service
from jdisagg.service.kv_link import GrpcKvLink
from jdisagg.service.registry import RegistryClient
from jdisagg.service.remote_ports import RemoteWorker
from jdisagg.service.server import GrpcServer, cluster_credentials, read_tokens
from jdisagg.service.worker_service import decode_service, peer_service, prefill_service
from jdisagg.transfer.jax_transfer import JaxTransferChannel
from jdisagg.worker.decode_worker import DecodeWorker
from jdisagg.worker.peers import PeerResolver
from jdisagg.worker.prefill_worker import PrefillWorker
from launch.cluster_plan import free_ports
from launch.instance_processes import follow, lead
from launch.recording import record
from launch.signals import Signals
from launch.warmed import WarmedBefore

EXIT_BROKEN = 3
TRANSPORTS = 4
LOOK_SECONDS = 0.25
# The last words of the streams that a drain waited for are on their way when it ends; routers close their ports when the worker leaves.
LAST_WORDS_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Who the worker is; what it is made of is its `WorkerConfig`'s affair. `record_to`: a folder for its commands; empty: none."""

    name: str
    role: WorkerRole
    routers: tuple[str, ...]
    family: str
    model_name: str
    fingerprint: str
    record_to: str = ""


class WorkerProcess:
    """Build it anywhere; `run` on the loop, once."""

    def __init__(self, spec: WorkerSpec, config: WorkerConfig, observer: Observer | None = None) -> None:
        self._spec = spec
        self._config = config
        self._observer = observer
        self._clock = MonotonicClock()
        self._hurry = asyncio.Event()
        self._followers: Followers | None = None

    async def run(self, group: ProcessGroup, load: LoadModel, devices: Sequence[Device]) -> int:
        """The exit status. Raises what makes the configuration unworkable. `devices` are the instance's, of all its processes."""
        signals = Signals(self._hurry.set)
        service = self._config.service
        service = replace(service, port=service.port or free_ports(service.host, 1)[0])
        address = f"[{service.host}]:{service.port}" if ":" in service.host else f"{service.host}:{service.port}"
        end = KvEnd(address, random_id())
        credentials = cluster_credentials(service)
        link = GrpcKvLink(end, credentials)
        channel = JaxTransferChannel(self._clock, end, link, host=service.host, transports=TRANSPORTS)
        link.deliver_to(channel)
        peers = _PeerPorts(credentials)
        try:
            leading = await lead(group, self._clock, service, exit_status=EXIT_BROKEN) if group.leads and group.processes > 1 else None
            self._followers = leading.followers if leading else None
            plane = KvPlane((end,), TRANSPORTS)
            instance = build_worker_instance(self._spec.name, self._spec.role, self._config, load, devices, channel, plane)
            if not group.leads:
                server = GrpcServer((link.service(read_tokens(service.cluster_token_file)),), service)
                await server.start()
                following = follow(
                    group, instance.executor, lambda: self._warm_up(instance), self._clock, end, service, exit_status=EXIT_BROKEN
                )
                await self._unless(self._hurry.wait(), following)  # the first signal is the leader's affair, who lets us go
                return 0
            warmed = WarmedBefore(self._config, self._spec.role, self._spec.fingerprint)
            later = group.processes == 1 and self._config.warm_up and warmed.found()
            if not later:
                if not await self._unless(signals.first(), self._warm_up(instance)):
                    return 0
                warmed.note()
            executor = self._watched(instance, await leading.over(instance.executor, end) if leading else instance.executor)
            status = await self._lead_a_life(signals, service, address, instance, executor, link, peers, later)
            if leading:
                await leading.stop()
            if status == 0:
                await asyncio.to_thread(executor.close)
            return status
        finally:
            channel.close()
            await link.close()
            await peers.close()

    async def _lead_a_life(
        self,
        signals: Signals,
        service: ServiceConfig,
        address: str,
        instance: Instance,
        executor: Executor,
        link: GrpcKvLink,
        peers: "_PeerPorts",
        warm_up_later: bool,
    ) -> int:
        """`warm_up_later`: serve at once; programs are loaded between the commands of whoever comes first."""
        worker = self._worker(
            executor, address, observe_peers(self._spec.name, peers.find, self._observer) if self._observer else peers.find
        )
        if self._observer:
            programs = instance.executor.programs
            self._observer.metrics.watch_worker(worker.name, worker.status, worker.counters, lambda: programs.compilations)
            self._observer.metrics.watch_counters("kv_link", link.counters)
        tokens = read_tokens(service.cluster_token_file)
        server = GrpcServer((*_services(worker, tokens), link.service(tokens)), service, worker.boot_id)
        await worker.start()
        await server.start()
        registration = RegistryClient(
            self._spec.routers, self._card(instance, worker, address), worker.status, cluster_credentials(service)
        )
        registration.start()
        print(f"jdisagg {self._spec.role.value} worker {self._spec.name} ({self._config.instance.layout}) serves on {address}", flush=True)
        warming = asyncio.create_task(self._warm_up_beside(instance)) if warm_up_later else None
        status = await self._serve(signals, worker)
        if warming:
            warming.cancel()
            await asyncio.gather(warming, return_exceptions=True)
        if status == 0:
            await self._clock.sleep(LAST_WORDS_SECONDS)
        await registration.leave()
        server.hurry()
        await server.drain()
        await worker.stop()
        return status

    async def _warm_up(self, instance: Instance) -> None:
        if not self._config.warm_up:
            return
        began = self._clock.now()
        print(f"worker {self._spec.name} compiles its programs", flush=True)
        terminal = sys.stderr.isatty()
        with tqdm(desc="compiling", unit="program", delay=2, file=sys.stderr, leave=False, disable=not terminal) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            await warm_up(instance, progress)
        print(f"worker {self._spec.name} is warm after {self._clock.now() - began:.1f} s", flush=True)

    async def _warm_up_beside(self, instance: Instance) -> None:
        """While it serves. What fails here fails for a request too, and is told there; here it is only said."""
        try:
            await self._warm_up(instance)
        except Exception as error:
            print(f"worker {self._spec.name} could not load its programs beforehand: {error}", file=sys.stderr, flush=True)

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
        spec, config = self._spec, self._config
        if spec.record_to:
            layout, model = config.instance.layout, config.model
            executor = record(Path(spec.record_to), spec.name, executor, instance.executor, layout, model.directory, model.dtype)
        return wrap.mesh(spec.name, executor, self._observer)

    def _worker(self, executor: Executor, address: str, find_peer: PeerResolver) -> PrefillWorker | DecodeWorker:
        spec, config = self._spec, self._config
        if spec.role is WorkerRole.PREFILL:
            return PrefillWorker(spec.name, executor, config.instance, config.limits, self._clock, random_id, spec.fingerprint)
        mode = worker_mode(spec.role, config.mode)
        return DecodeWorker(
            spec.name, executor, config.instance, mode, config.limits, find_peer, self._clock, random_id, spec.fingerprint, address
        )

    def _card(self, instance: Instance, worker: PrefillWorker | DecodeWorker, address: str) -> WorkerCard:
        limits, model, spec = instance.executor.limits, instance.loaded.model, self._spec
        card = ModelCard(
            name=spec.model_name,
            family=spec.family,
            vocabulary=model.vocabulary,
            context_tokens=limits.context_tokens,
            dtype=self._config.model.dtype,
            kv_bytes_per_token=model.kv_spec.bytes_per_token,
            fingerprint=spec.fingerprint,
        )
        return WorkerCard(spec.name, worker.boot_id, spec.role, address, self._config.instance.layout, card)

    async def _serve(self, signals: Signals, worker: PrefillWorker | DecodeWorker) -> int:
        """Until it is asked to end, and drained then, or its mesh broke."""
        breaking = asyncio.create_task(self._broken(worker))
        ending = asyncio.create_task(signals.first())
        await asyncio.wait({ending, breaking}, return_when=asyncio.FIRST_COMPLETED)
        tasks = [ending, breaking]
        if ending.done():
            seconds = self._config.service.drain_seconds
            print(f"draining, for at most {seconds:g} s", flush=True)
            tasks += [asyncio.create_task(worker.drain(seconds)), asyncio.create_task(self._hurry.wait())]
            await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED)
        status = 0
        if breaking.done():
            print(f"error: {breaking.result().message}", file=sys.stderr, flush=True)
            status = EXIT_BROKEN
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return status

    async def _broken(self, worker: PrefillWorker | DecodeWorker) -> UnavailableError:
        """Returns when the worker's mesh is broken, or another process of its instance is gone."""
        while True:
            if self._followers and self._followers.failure:
                return self._followers.failure
            try:
                await worker.status()
            except UnavailableError as error:
                return error
            await self._clock.sleep(LOOK_SECONDS)


def _services(worker: PrefillWorker | DecodeWorker, tokens: tuple[str, ...]) -> tuple[Service, ...]:
    if isinstance(worker, PrefillWorker):
        return prefill_service(worker, tokens), peer_service(worker, tokens)
    return decode_service(worker, tokens), peer_service(worker, tokens)


class _PeerPorts:
    """Ports of the workers that KV comes from, one for each address; a restarted worker is greeted through the same."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._workers: dict[str, RemoteWorker] = {}

    def find(self, source: HandoffSource) -> PeerPort:
        if not source.address:
            raise HandoffError(f"worker {source.worker!r}: its address is not known; is the router of this version?")
        if source.address not in self._workers:
            self._workers[source.address] = RemoteWorker(source.address, self._credentials)
        return self._workers[source.address].peer

    async def close(self) -> None:
        await asyncio.gather(*(worker.aclose() for worker in self._workers.values()))

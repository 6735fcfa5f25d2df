"""Builds workers and connects their calls, in the same way for every kind of cluster.

`WorkerHost` builds one worker from its configuration. `LocalCluster` connects the workers of one
process. This module imports neither JAX nor gRPC."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

from jdisagg.clock import Clock
from jdisagg.config import Mode, PrefixConfig, WorkerConfig
from jdisagg.dispatch.membership import WorkerPorts
from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.errors import ConfigError, HandoffError, UnavailableError
from jdisagg.messages.kept_blocks import KeptMark
from jdisagg.messages.ports import DecodePort, HandoffSource, PeerPort, PrefillPort, close_stream
from jdisagg.messages.ports_middleware import through
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.request import Request
from jdisagg.router.decision import Known, PromptBlocks
from jdisagg.router.known_blocks import KnownBlocks
from jdisagg.scheduler.executor import Executor
from jdisagg.scheduler.host_blocks import TierRoom
from jdisagg.worker.mesh_worker import WorkerContext
from jdisagg.worker.peers import PeerResolver
from jdisagg.worker.worker import Worker

Between = Callable[[Worker, Worker | None], Sequence[object]]
"""Middleware for calls to a worker, innermost first. The second argument is the calling worker, or
None for the request path."""

Port = TypeVar("Port")
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerHost:
    """One worker, from its configuration to the worker on a mesh. Every kind of cluster has one for
    each of its workers. `engine.replica.build_replica` builds the mesh of a real model.

    Attributes:
        context: The worker's identity, and what it shares with its process.
        fetches: Whether the worker fetches cached KV from other workers. None: as configured.
        migrates: Whether sequences may move between this worker and others. Without it, the worker
            needs fewer programs.
        changes: Whether the worker may take the other role, of prefill and decode, on its mesh.
    """

    context: WorkerContext
    role: WorkerRole
    config: WorkerConfig
    fetches: bool | None = None
    migrates: bool = True
    changes: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError if a mixed worker has the mode of two meshes."""
        if self.role is WorkerRole.MIXED and self.config.mode is Mode.DISAGGREGATED:
            raise ConfigError(
                "mode=disaggregated: a mixed worker has one mesh; set mode to chunked or unified"
            )

    @property
    def name(self) -> str:
        return self.context.name

    @property
    def mode(self) -> Mode:
        """How the mesh shares its steps. A worker of one role does not."""
        return self.config.mode if self.role is WorkerRole.MIXED else Mode.DISAGGREGATED

    @property
    def fetched_tokens(self) -> int:
        return fetched_tokens(self.role, self.config.prefix, self.config.instance.page_size)

    def knowing(self, **facts: Any) -> "WorkerHost":
        """Returns a copy with other values of fields of the context."""
        return replace(self, context=replace(self.context, **facts))

    def worker(self, executor: Executor, peers: PeerResolver) -> Worker:
        """Builds the worker. Through `peers` it receives KV from other workers."""
        instance, limits = self.config.instance, self.config.limits
        fetches = self.fetched_tokens > 0 if self.fetches is None else self.fetches
        if self.changes and self.fetches is None:
            fetches |= replace(self, role=self.role.other).fetched_tokens > 0
        return Worker(self.context, self.role, executor, instance, limits, peers, fetches)


def fetched_tokens(role: WorkerRole, prefix: PrefixConfig, page_size: int) -> int:
    """Returns the number of tokens in each cached block that a worker fetches from other workers,
    or 0 if it fetches none. Decode workers that compute no prompts fetch none, because a prefill
    worker sends them the KV of the whole prompt anyway."""
    computes = role.computes or prefix.appends > 0
    return prefix.peer_tokens(page_size) if computes else 0


def tier_room(prefix: PrefixConfig, rank_bound: bool = False) -> TierRoom:
    return TierRoom(
        prefix.host_bytes,
        prefix.disk_bytes,
        prefix.restores == "always",
        3600.0 * prefix.disk_ttl_hours,
        rank_bound,
    )


class LocalCluster:
    """The workers of one process by name, and the interfaces (ports) through which they are called.

    Args:
        mortal: Whether `kill` may be used. If so, each call is slightly slower.
    """

    def __init__(
        self,
        clock: Clock,
        new_id: Callable[[], int],
        between: Between = lambda worker, caller: (),
        mortal: bool = False,
    ) -> None:
        self.clock = clock
        self.new_id = new_id
        self.workers: dict[str, Worker] = {}  # the latest worker of each name
        self._between = between
        self._mortal = mortal
        self._crashes: dict[Worker, Crash] = {}

    def add(self, host: WorkerHost, executor: Executor) -> Worker:
        """Builds a worker that can receive KV from the other workers of this cluster. Replaces an
        earlier worker of the same name."""

        def peers(source: HandoffSource) -> PeerPort:
            return self.peer(source, worker)

        worker = host.worker(executor, peers)
        self.workers[host.name] = worker
        if self._mortal:
            self._crashes[worker] = Crash()
        return worker

    def peer(self, source: HandoffSource, caller: Worker | None) -> PeerPort:
        """Returns the interface through which the worker `caller` pulls KV from the worker that
        `source` identifies. Raises HandoffError for an unknown worker."""
        worker = self.workers.get(source.worker)
        if worker is None:
            known = ", ".join(self.workers) or "none"
            raise HandoffError(f"worker {source.worker!r} is not known here; known: {known}")
        return self.called(PeerPort, worker, worker, caller)

    def ports(self, name: str) -> WorkerPorts:
        worker = self.workers[name]
        if worker.role.decodes:
            decode = self.called(DecodePort, worker, worker, None)
            return WorkerPorts(decode=decode, weights=worker.weights)
        prefill = self.called(PrefillPort, worker, worker, None)
        return WorkerPorts(prefill=prefill, weights=worker.weights)

    def cluster_ports(self) -> ClusterPorts:
        prefill: dict[str, PrefillPort] = {}
        decode: dict[str, DecodePort] = {}
        for name in self.workers:
            ports = self.ports(name)
            if ports.prefill:
                prefill[name] = ports.prefill
            if ports.decode:
                decode[name] = ports.decode
        weights = {name: worker.weights for name, worker in self.workers.items()}
        address = lambda name: self.workers[name].address  # noqa: E731
        return ClusterPorts(prefill, decode, address, weights=weights)

    async def start(self) -> None:
        for worker in self.workers.values():
            await worker.start()

    async def drain(self) -> None:
        for worker in reversed(self.workers.values()):
            await worker.drain()

    async def stop(self) -> None:
        """Stops all workers, but does not close their executors."""
        for worker in reversed(self.workers.values()):
            await worker.stop()

    async def kill(self, name: str, lost: Callable[[], None]) -> None:
        """Simulates the crash of a worker. From then on, all calls to and from the worker fail.

        Args:
            lost: Callback that removes the worker's KV from the transfer channel. It is called
                before any other task can run.
        """
        worker = self.workers[name]
        self._crashes[worker].dead.set()
        lost()
        await asyncio.sleep(0)
        await worker.stop()

    def is_dead(self, worker: Worker) -> bool:
        return worker in self._crashes and self._crashes[worker].dead.is_set()

    def called(
        self, protocol: type[Port], port: Port, worker: Worker, caller: Worker | None
    ) -> Port:
        """Wraps `port`, an interface of `worker`, with the middleware for calls from `caller`. If
        `caller` is None, the caller is the request path."""
        if self._mortal:
            ends = (worker, caller) if caller else (worker,)
            crashes = (self._crashes[end] for end in ends)
            port = through(protocol, port, Crashable(*crashes))
        for middleware in self._between(worker, caller):
            port = through(protocol, port, middleware)
        return port


class LocalAffinity:
    """Index of the KV blocks in the prefix caches of this process's workers, for routing by cached
    prefix. Implements `router.decision.Affinity`.

    The index is the one that a router in a separate process uses (`router/known_blocks.py`). This
    class updates the index before each placement, so that the index is never stale."""

    def __init__(self, workers: Sequence[Worker], secret: bytes) -> None:
        self._workers = workers
        self._known = KnownBlocks(secret)
        self._marks = {worker.name: KeptMark() for worker in workers}
        self._weights = {worker.name: "" for worker in workers}
        for worker in workers:
            self._known.joined(worker.name, worker.kept_scheme)

    def known(self, request: Request) -> Known:
        for worker in self._workers:
            scheme, weights = worker.kept_scheme, worker.weights.served.identity
            if scheme is not None and weights != self._weights[worker.name]:
                self._weights[worker.name] = weights
                self._known.joined(worker.name, scheme.with_weights(weights))
                self._marks[worker.name] = KeptMark()
            news = worker.kept_news(self._marks[worker.name])
            if news is not None:
                self._marks[worker.name] = self._known.told(news)
        return self._known.known(request)

    def prompt_blocks(self, request: Request) -> PromptBlocks:
        return self._known.prompt_blocks(request)


class Crash:
    """Flag of a simulated process. The flag is set when the process crashes."""

    def __init__(self) -> None:
        self.dead = asyncio.Event()


class Crashable:
    """Middleware that simulates crashes of processes. Calls to and from a crashed process fail,
    including calls in progress. Replies of a crashed process are dropped.

    Args:
        crashes: `Crash` flag of the called worker. If the caller is a worker too, also the
            caller's flag.
    """

    def __init__(self, *crashes: Crash) -> None:
        self._crashes = crashes

    def _check(self) -> None:
        for crash in self._crashes:
            if crash.dead.is_set():
                raise UnavailableError("connection refused")

    async def unary(self, proceed: Callable[P, Awaitable[T]], *args: P.args, **kw: P.kwargs) -> T:
        self._check()
        return await proceed(*args, **kw)

    async def _long(self, proceed: Callable[P, Awaitable[T]], *args: P.args, **kw: P.kwargs) -> T:
        self._check()
        return await self._during(proceed(*args, **kw))

    prefill = reserve = resume_source = fetch = _long

    async def stream(
        self, proceed: Callable[P, AsyncIterator[T]], *args: P.args, **kw: P.kwargs
    ) -> AsyncIterator[T]:
        self._check()
        items = proceed(*args, **kw)
        try:
            while True:
                try:
                    yield await self._during(anext(items))
                except StopAsyncIteration:
                    return
        finally:
            if not any(crash.dead.is_set() for crash in self._crashes):
                await close_stream(items)

    async def _during(self, call: Awaitable[T]) -> T:
        task = asyncio.ensure_future(call)
        deaths = [asyncio.ensure_future(crash.dead.wait()) for crash in self._crashes]
        try:
            await asyncio.wait({task, *deaths}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() or any(crash.dead.is_set() for crash in self._crashes):
                raise UnavailableError("connection reset")
            return task.result()
        finally:
            for one in (task, *deaths):
                one.cancel()
            await asyncio.gather(task, *deaths, return_exceptions=True)

"""What a worker consists of, and what it does besides prompts and sequences: the loop of its mesh,
cached KV, peers, leases, drain, status."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from jdisagg.clock import Clock
from jdisagg.config import InstanceConfig, LimitsConfig
from jdisagg.costs.measured import StepTimes
from jdisagg.errors import HandoffError, InvalidRequestError, UnavailableError
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.messages.kept_blocks import KeptMark, KeptNews, KeptScheme
from jdisagg.messages.packed import OLDEST, PROTOCOL
from jdisagg.messages.ports import (
    Child,
    FetchCall,
    FetchReply,
    PeerHello,
    PeerMessage,
    SessionCall,
    SessionReport,
)
from jdisagg.messages.step_commands import StepCommand, StepResult
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.request import Request
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.executor import Executor, InterruptibleExecutor
from jdisagg.scheduler.host_blocks import TierRoom
from jdisagg.scheduler.kept_log import KeptEvents
from jdisagg.scheduler.page_ledger import pages_for
from jdisagg.scheduler.prices import Prices
from jdisagg.scheduler.prompts import Attempts
from jdisagg.scheduler.residency import BlockNames
from jdisagg.scheduler.turn import Scheduler
from jdisagg.telemetry import Counters
from jdisagg.worker.adapter_loads import AdapterLoads
from jdisagg.worker.cached_kv import CachedKv, KeptBlock, kept_blocks
from jdisagg.worker.disk_tier import DiskTier
from jdisagg.worker.given_kv import GivenKv
from jdisagg.worker.host_tier import HostTier
from jdisagg.worker.incoming_kv import IncomingKv, KvEvents
from jdisagg.worker.kv_sources import KvSource, KvSources
from jdisagg.worker.outgoing_kv import OutgoingKv
from jdisagg.worker.peers import PeerResolver, Peers, SideCalls, words_of_layers
from jdisagg.worker.senders import MigrationSender, PromptSender
from jdisagg.worker.session_kv import SessionKv
from jdisagg.worker.step_loop import DEPTH, StepLoop
from jdisagg.worker.tasks import PromptTasks
from jdisagg.worker.weights_updates import ServedWeights, WeightsUpdates


@dataclass(frozen=True)
class WorkerContext:
    """The parameters of one run of a worker that depend neither on its mesh nor on its
    configuration.

    Attributes:
        ids: Generator of fresh random 64-bit numbers.
        address: Address for other workers; empty if they find this worker by name in the same
            process.
        names: Object that computes the hashes (names) of cached blocks; None disables the prefix
            cache.
        tiers: Capacity of the host-memory and disk tiers.
        kv_channels: Function that returns the data-plane connections that the worker's status
            reports.
        times: Function that returns the measured times of the mesh's programs, or None if they are
            not measured.
        kernels: Text "NAME: reason" for each kernel that failed its check at the start.
        weights: The weights that the worker serves.
        tuning: See `PeerHello`.
    """

    name: str
    clock: Clock
    ids: Callable[[], int]
    model_fingerprint: str = ""
    address: str = ""
    names: BlockNames | None = None
    tiers: TierRoom = TierRoom()  # plain data
    kv_channels: Callable[[], tuple[str, ...]] = tuple
    times: Callable[[], StepTimes | None] = lambda: None
    kernels: tuple[str, ...] = ()
    weights: ServedWeights = field(default_factory=ServedWeights)
    tuning: str = ""


class MeshWorker(KvEvents, ABC):
    """The base of `Worker`. Answers calls of other workers (`PeerPort`).

    Attributes:
        weights: Implements the calls that update the worker's weights or let it sleep.

    Args:
        peers: Function that returns the interface of another worker, from which KV is received.
        fetches: Whether cached KV may be fetched from other workers.
    """

    def __init__(
        self,
        context: WorkerContext,
        role: WorkerRole,
        executor: Executor,
        config: InstanceConfig,
        limits: LimitsConfig,
        peers: PeerResolver,
        fetches: bool = False,
    ) -> None:
        self.role = role
        self._decodes, self._computes = role.decodes, role.computes
        self.name = context.name
        self.address = context.address
        self.boot_id = context.ids()
        self.counters = counters = Counters()
        self._context, self._config, self._limits = context, config, limits
        self._clock, now, ids = context.clock, context.clock.now, context.ids
        self._layout = str(config.layout)
        self._mesh = mesh = executor.limits
        timeouts = limits.timeouts.handoff
        # of prefills alone, one chunk per stage, and one in the queue
        depth = DEPTH if role.decodes else mesh.stages + 1
        self._loop = loop = StepLoop(
            executor,
            self._turn,
            self._apply,
            self._break_down,
            now,
            depth,
            before=self._copy_evicted,
        )
        self._calls = SideCalls(counters, timeouts)
        self._hello = hello = PeerHello(
            protocol=PROTOCOL,
            worker=context.name,
            model_fingerprint=context.model_fingerprint,
            kv_layers=words_of_layers(mesh.kv_spec),
            kv_dtype=mesh.kv_spec.row_dtype,
            layer_groups=mesh.layer_groups,
            boot_id=self.boot_id,
            checksum_key=ids() if limits.verify else 0,
            mesh=executor.card,
            block_bytes=mesh.block_bytes,
            windows_apart=mesh.windows_apart,
            oldest_protocol=OLDEST,
            weights=context.weights.identity,
            tuning=context.tuning,
            tuned_apart=limits.tuned_apart,
        )
        self._outgoing = outgoing = OutgoingKv(
            hello, loop, mesh, self._clock, limits, counters, self._freed
        )
        self._adapters = AdapterLoads(
            context.name, mesh.adapters, loop, counters, self._requests_running
        )
        self.weights = WeightsUpdates(self, context.weights, loop, counters, now)
        self._attempts = Attempts()
        self._grammars: GrammarCompiler | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._draining = self._changing = False
        self._quiet = asyncio.Event()
        self._state = state = DecodeState(mesh, context.names, self._adapters.table)
        self._kept = state.residency
        interruptible = isinstance(executor, InterruptibleExecutor)
        self._interruptible = executor if interruptible else None
        self._scheduler = Scheduler(
            state, config, role, interruptible, ids, time.thread_time, counters
        )
        self._prompts, self._admission = self._scheduler.prompts, self._scheduler.admission
        self._peers = Peers(peers, hello, loop, config.codec, now, timeouts, self._calls)
        self._sources = sources = self._find_sources(fetches)
        self._sessions = SessionKv(self.name, sources, self._host, self._disk, role, now)
        self._given = GivenKv(sources, outgoing, loop, mesh, ids, counters, role)
        # a reset of all workers may take this long
        closed_seconds = limits.timeouts.request.status_seconds
        self._cache = CachedKv(sources, mesh, counters, now, closed_seconds)
        self._tasks = PromptTasks()
        self._migration = MigrationSender(state, outgoing, loop, ids, timeouts, counters)
        key = hello.checksum_key
        self._sender = PromptSender(state, self._admission, outgoing, loop, ids, key)

    def _find_sources(self, fetches: bool) -> KvSources:
        kept, loop, mesh, now = self._kept, self._loop, self._mesh, self._clock.now
        ids, room, decodes = self._context.ids, self._context.tiers, self._decodes
        if decodes and kept.snapshots:  # their blocks are of use only with a snapshot
            fetches, room = False, TierRoom()
        self._host = HostTier(kept, loop, mesh, room, ids, self.counters, self.role)
        self._disk = DiskTier(kept, loop, self._host, room, self.counters, now)
        sources: list[KvSource] = [tier for tier in (self._host, self._disk) if tier.on]
        # without these, windows or state that arrive with blocks could not be stored
        has_place = not mesh.ring_pages and (kept.snapshots or not mesh.kv_spec.has_state)
        prices = Prices(room.always) if fetches and kept.on and has_place else None
        self._incoming = IncomingKv(
            self._state, loop, self._peers, self._limits, self.counters, events=self, fetches=prices
        )
        sources.append(self._incoming)
        return KvSources(kept, mesh.page_size, self.counters, now, sources, self._admission.spares)

    def _copy_evicted(self) -> None:
        if self._kept.evicted or self._kept.snapshots:
            self._host.copy_evicted()

    # ---- from start to stop

    def constrain(self, grammars: GrammarCompiler | None) -> None:
        """Sets the grammar compiler. Without one, requests with a grammar are refused."""
        self._grammars = grammars

    async def start(self) -> None:
        self._kept.rename(self.weights.served.identity)
        self._loop.start()
        for source in self._sources:
            await source.start()
        self._sweeping = asyncio.get_running_loop().create_task(self._keep_sweeping())

    async def stop(self) -> None:
        """Ends all work with UnavailableError. Does not close the executor."""
        self._given.stop()
        self._end_everything(UnavailableError(f"worker {self.name!r} was stopped"))
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        self._sessions.stop()
        self._sources.stop()
        self._adapters.stop()
        await self._loop.stop()
        await self._calls.stop()

    async def drain(self, deadline_seconds: float | None = None) -> None:
        """Refuses new requests and returns when all work has finished or migrated. Work that is
        left at the deadline ends with UnavailableError, so that the router retries it on another
        worker."""
        self._draining = True
        try:
            async with asyncio.timeout(deadline_seconds):
                while self._busy():
                    if deadline_seconds is not None:
                        self._hand_on()
                    self._quiet.clear()
                    await self._quiet.wait()
        except TimeoutError:
            self.counters.add("drains_cut_short")
            self._end_everything(
                UnavailableError(f"worker {self.name!r} shuts down; its time to drain is over")
            )

    async def change_role(
        self,
        role: WorkerRole,
        drain_seconds: float,
        prepare: Callable[[tuple[tuple[int, ...], ...]], Awaitable[None]],
        scratch_tokens: int = 0,
    ) -> None:
        """Drains the worker, then goes on in another role on the same mesh, with the cached KV that
        it has. If `prepare` raises an error, or this call is cancelled, the role stays.

        Args:
            prepare: Function that is called when no work is left. It may overwrite the pages that
                it is given, which are some of each dp rank.
            scratch_tokens: Number of positions that these pages should hold.
        """
        # a transfer would hold pages, and run on the mesh as it is prepared
        self._changing = self._given.closed = True
        ledgers, owner = self._state.ledgers, self._state.new_key()
        try:
            await self.drain(drain_seconds)
            count = pages_for(scratch_tokens, self._mesh.page_size)
            for ledger in ledgers:
                ledger.reserve(owner, min(count, ledger.free_pages))
            self._host.copy_evicted()
            try:
                await prepare(tuple([ledger.pages(owner) for ledger in ledgers]))
            finally:
                for ledger in ledgers:
                    ledger.free(owner)
            self.role = role
            self._decodes, self._computes = role.decodes, role.computes
            for part in (self._scheduler, self._host, self._sessions, self._given):
                part.take_role(role)
        finally:
            self._changing = self._draining = self._given.closed = False
            self._loop.wake()

    def _break_down(self, error: UnavailableError) -> None:
        self.counters.add("mesh_failures")
        self._end_everything(error)

    def at_rest(self) -> bool:
        return self._sources.quiet and self._adapters.idle and not self._busy()

    async def _keep_sweeping(self) -> None:
        limits = self._limits
        while True:
            lease = limits.handoff_lease_seconds
            if self._decodes:
                lease = min(lease, limits.reservation_lease_seconds)
            await self._clock.sleep(min(lease / 4, limits.timeouts.handoff.sweep_seconds))
            try:
                self._sweep(self._clock.now())
            except Exception as error:
                self._loop.break_down(error)  # without sweeps no lease would expire
                return

    def _sweep(self, now: float) -> None:
        self._outgoing.sweep(now)
        for source in self._sources:
            source.expire(now)
        self._sessions.sweep(now)
        self.weights.expire(now)
        self._loop.break_if_stalled(self._limits.step_seconds)
        self._attempts.forget_before(now - 2 * self._limits.handoff_lease_seconds)
        self._freed()

    # ---- prompts and sequences

    @abstractmethod
    def _turn(self, step: int | None) -> StepCommand | None:
        """Takes a turn of the scheduler and carries it out. Returns its command, which has the
        number `step`."""

    @abstractmethod
    def _apply(self, command: StepCommand, result: StepResult) -> None:
        """Processes the result of a planned command."""

    def _freed(self) -> None:
        """Lets others have what became free, and a drain see it."""
        if not self._scheduler.idle(True):
            self._loop.wake()
        self._quiet.set()

    def _requests_running(self) -> list[Request]:
        return [
            task.prompt.request
            for key, task in self._tasks.items()
            if task.stream is None or key in self._state.groups
        ]

    def _busy(self) -> bool:
        return bool(self._tasks or len(self._outgoing))

    @abstractmethod
    def _hand_on(self) -> None:
        """Offers running work to other workers during a drain."""

    @abstractmethod
    def _end_old(self, keep: bool) -> None:
        """Ends sequences with KV of earlier weights as preempted, so that later attempts recompute
        it. If `keep` is set, sequences that decode continue."""

    @abstractmethod
    def _end_everything(self, error: UnavailableError) -> None:
        """Ends all running and waiting work with this error."""

    async def _compiled(self, request: Request, seconds: float) -> None:
        self._check_awake()
        grammar = request.sampling.grammar
        if grammar is not None:
            if self._grammars is None:
                raise InvalidRequestError(
                    f"grammar: worker {self.name!r} has no tokenizer.json beside its model, which"
                    " structured output needs; leave the grammar out, or add the file"
                )
            await self._grammars.prepare(grammar, seconds)

    def _check_awake(self) -> None:
        if self.weights.asleep:
            raise UnavailableError(f"worker {self.name!r} sleeps; wake it, or try another")

    def _check_serving(self, children: tuple[Child, ...]) -> None:
        self._loop.check()
        self._check_awake()
        if self._changing or (self._draining and not any(child.accepted for child in children)):
            raise UnavailableError(
                f"worker {self.name!r} is draining and takes no new requests; try another",
                retry_after_seconds=1.0,
            )

    # ---- weights and cache

    def forget_weights(self, keep: bool, identity: str) -> None:
        self._cache.forget(None, "weights")
        self._kept.rename(identity)
        self._hello = msgspec.structs.replace(self._hello, weights=identity)
        self._outgoing.introduce(self._hello)
        self._peers.introduce(self._hello)
        reason = f"worker {self.name!r} changed its weights, or sleeps"
        self._outgoing.end_all(HandoffError(reason))
        self._end_old(keep)

    async def reset_cache(self) -> int:
        return await self._cache.reset()

    async def session(self, call: SessionCall) -> SessionReport | None:
        return await self._sessions.answer(call)

    @property
    def kept_scheme(self) -> KeptScheme | None:
        """Parameters of block names, for routers; None without a prefix cache."""
        return self._kept.scheme

    def kept_news(self, mark: KeptMark) -> KeptNews | None:
        """Returns the changes of the prefix cache since a router's log position `mark`, or None if
        nothing changed."""
        return self._kept.log.news(self.name, mark)

    def report_kept(self, pending: Callable[[], None]) -> KeptEvents | None:
        """Starts to collect events about the cached blocks in pages, for routers of other projects
        (`Residency.report`)."""
        return self._kept.report(pending)

    def kept_blocks(self) -> tuple[KeptBlock, ...]:
        """Returns the cached blocks for display (`KeptBlock`)."""
        tiers = {source.name: source.listed() for source in self._sources}
        return tuple(kept_blocks(self.name, self._kept, tiers))

    # ---- status

    async def status(self) -> WorkerStatus:
        return self.status_now()

    def status_now(self) -> WorkerStatus:
        """Returns the worker's status. Raises UnavailableError if the mesh has failed."""
        self._loop.check()
        context, mesh, state, scheduler = self._context, self._mesh, self._state, self._scheduler
        status = WorkerStatus(
            name=self.name,
            role=self.role,
            layout=self._layout,
            running=sum(state.living) if self._decodes else len(self._prompts.placed),
            waiting=len(self._admission.queue),
            slots=mesh.ranks * mesh.rows_per_chunk,
            free_pages=tuple([ledger.free_pages for ledger in state.ledgers]),
            total_pages=tuple([ledger.total_pages for ledger in state.ledgers]),
            page_size=mesh.page_size,
            context_tokens=mesh.context_tokens,
            draining=self._draining,
            handoffs=len(self._incoming) + len(self._outgoing),
            queued_tokens=self._prompts.backlog.tokens,
            queued_pairs=self._prompts.backlog.pairs,
            free_states=state.states.free_by_rank(),
            total_states=state.states.by_rank,
            kept=self._cache.tiers(),
            kv_channels=context.kv_channels(),
            times=context.times(),
            links=self._peers.meter.links(),
            kernels=context.kernels,
            adapter_slots=mesh.adapters,
            adapters=self._adapters.table.loaded,
            weights=self.weights.served.identity,
            asleep=self.weights.asleep,
            images=mesh.images is not None,
            can_prefill=scheduler.chunk_tokens > 0,
            chunk_tokens=scheduler.chunk_tokens,
            priorities=scheduler.loads(),
        )
        if not self._decodes:
            return status
        return msgspec.structs.replace(
            status,
            slots=mesh.ranks * mesh.slots_per_rank,
            preemptions=state.preemptions,
            reserved_pages=state.reserved_pages(),
            rank_sequences=tuple(state.living),
            rank_contexts=state.contexts(),
            drafted_tokens=self.counters["drafted_tokens"],
            accepted_tokens=self.counters["accepted_tokens"],
        )

    # ---- other workers

    async def hello(self, hello: PeerHello) -> PeerHello:
        return await self._outgoing.hello(hello)

    async def fetch(self, call: FetchCall) -> FetchReply:
        # lossily compressed KV differs from the KV that the requesting worker would compute
        if self._decodes and (self._draining or self._config.codec != "none"):
            return FetchReply()
        return await self._given.give(call)

    def offers(self, handoff_id: int, attempt: int) -> AsyncIterator[PeerMessage]:
        return self._outgoing.offers(handoff_id, attempt)

    async def acknowledge(self, handoff_id: int, offer_ids: tuple[int, ...]) -> None:
        await self._outgoing.acknowledge(handoff_id, offer_ids)
        self._given.moved()
        self._migration.poke()
        if self._admission.queue or self._prompts:
            self._loop.wake()  # their destination may have been stalled

    async def abort(self, handoff_id: int, reason: str) -> None:
        await self._outgoing.abort(handoff_id, reason)

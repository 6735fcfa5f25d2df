"""The base class of prefill and decode workers: step loop, outgoing KV, restores of cached KV,
leases, drain.

A worker gets commands from its scheduler, runs them and reports results. Only schedulers assign
pages and choose batches. State changes only on the event loop and between awaits, so every method
sees a consistent state. A background task periodically ends expired leases and detects a mesh that
hangs."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from jdisagg.clock import Clock
from jdisagg.config import InstanceConfig, LimitsConfig
from jdisagg.costs.measured import StepTimes
from jdisagg.errors import (
    BrokenModelError,
    HandoffError,
    InvalidRequestError,
    JdisaggError,
    UnavailableError,
)
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.messages.kept_blocks import KeptMark, KeptNews, KeptScheme
from jdisagg.messages.ports import (
    Child,
    FetchCall,
    FetchReply,
    PeerHello,
    PeerMessage,
    PrefillCall,
    ReserveCall,
)
from jdisagg.messages.step_commands import (
    BROKEN_TOKEN,
    STUCK_TOKEN,
    CopyPages,
    PrefillChunk,
    PrefillResult,
    SampledToken,
    StepCommand,
    StepResult,
)
from jdisagg.messages.worker_status import LinkTimes, PriorityLoad, WorkerRole, WorkerStatus
from jdisagg.request import Request
from jdisagg.scheduler.attempts import Attempts
from jdisagg.scheduler.decode_state import DecodeState
from jdisagg.scheduler.executor import Executor, InterruptibleExecutor
from jdisagg.scheduler.host_blocks import MOST_WRITING, MOST_WRITING_OF_DECODE, TierRoom
from jdisagg.scheduler.kept_events import KeptEvents
from jdisagg.scheduler.kept_view import KeptBlock, kept_blocks, kept_tiers
from jdisagg.scheduler.prices import Prices
from jdisagg.scheduler.prompt import Prompt, check_experts
from jdisagg.scheduler.residency import BlockNames
from jdisagg.scheduler.turn import Facts, Scheduler, Turn
from jdisagg.telemetry import Counters
from jdisagg.worker.adapter_loads import AdapterLoads
from jdisagg.worker.background import SideCalls
from jdisagg.worker.disk_tier import DiskTier
from jdisagg.worker.given_kv import GivenKv
from jdisagg.worker.host_tier import HostTier
from jdisagg.worker.kv_sources import KvSource, KvSources, RestoredBlocks, RestoreQuery
from jdisagg.worker.outgoing_kv import OutgoingHandoff, OutgoingKv
from jdisagg.worker.peer_fetch import PeerFetch
from jdisagg.worker.peers import PeerResolver, Peers, hello_of
from jdisagg.worker.step_loop import DEPTH, StepLoop
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


class MeshWorker(ABC):
    """Base class of prefill and decode workers. Answers calls of other workers (`PeerPort`).

    Attributes:
        weights: Implements the calls that update the worker's weights or let it sleep.

    Args:
        peers: Function that returns the interface of another worker from which cached KV may be
            fetched; None if none may be fetched.
    """

    def __init__(
        self,
        role: WorkerRole,
        context: WorkerContext,
        executor: Executor,
        config: InstanceConfig,
        limits: LimitsConfig,
        peers: PeerResolver | None,
    ) -> None:
        decodes = role is not WorkerRole.PREFILL
        self._role = role
        self.name = context.name
        self.address = context.address
        self.boot_id = context.ids()
        self.counters = Counters()
        self._context = context
        self._config = config
        self._limits = limits
        self._clock = context.clock
        self._mesh = executor.limits
        # of prefills alone, one chunk per stage, and one in the queue
        depth = DEPTH if decodes else executor.limits.stages + 1
        self._loop = StepLoop(
            executor,
            self._turn,
            self._apply,
            self._break_down,
            self._clock.now,
            depth,
            before=lambda: self._host.copy_evicted(),
        )
        self._connections: list[Peers] = []
        self._calls = SideCalls(self.counters, limits.timeouts.handoff)
        self._hello = hello_of(
            context.name,
            context.model_fingerprint,
            executor.limits,
            executor.card,
            self.boot_id,
            checksum_key=context.ids() if limits.verify else 0,
            weights=context.weights.identity,
            tuning=context.tuning,
            tuned_apart=limits.tuned_apart,
        )
        self._outgoing = OutgoingKv(
            self._hello,
            self._loop,
            executor.limits,
            context.clock,
            limits,
            self.counters,
            ended=self._sent,
        )
        self._adapters = AdapterLoads(
            context.name,
            executor.limits.adapters,
            self._loop,
            self.counters,
            self._requests_running,
        )
        now = self._clock.now
        self.weights = WeightsUpdates(self, context.weights, self._loop, self.counters, now)
        self._attempts = Attempts()
        self._grammars: GrammarCompiler | None = None
        lease_seconds = limits.handoff_lease_seconds
        if decodes:
            lease_seconds = min(lease_seconds, limits.reservation_lease_seconds)
        self._sweep_seconds = min(lease_seconds / 4, limits.timeouts.handoff.sweep_seconds)
        self._sweeping: asyncio.Task[None] | None = None
        self._draining = False
        self._forgotten = 0  # blocks that were cleared rather than evicted for lack of room
        self._quiet = asyncio.Event()
        self._state = DecodeState(executor.limits, context.names, self._adapters.table)
        self._kept = self._state.residency
        self._interruptible = executor if isinstance(executor, InterruptibleExecutor) else None
        self._scheduler = Scheduler(
            self._state,
            config,
            role,
            decodes and self._interruptible is not None,
            context.ids,
            time.thread_time,
            self.counters,
        )
        self._prompts, self._admission = self._scheduler.prompts, self._scheduler.admission
        self._sources = self._find_sources(peers, decodes)
        self._given = GivenKv(
            self._sources,
            self._outgoing,
            self._loop,
            executor.limits,
            context.ids,
            self.counters,
            decodes,
        )

    def constrain(self, grammars: GrammarCompiler | None) -> None:
        """Sets the grammar compiler. Without one, requests with a grammar are refused."""
        self._grammars = grammars

    async def start(self) -> None:
        self._kept.rename(self.weights.served.identity)
        self._loop.start()
        await self._sources.start()
        self._sweeping = asyncio.get_running_loop().create_task(self._keep_sweeping())

    async def stop(self) -> None:
        """Ends all work with UnavailableError. Does not close the executor."""
        self._given.stop()
        self._end_everything(UnavailableError(f"worker {self.name!r} was stopped"))
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
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

    async def reset_cache(self) -> int:
        blocks = self._forget_kept(None, "reset")
        await self._sources.erase()
        return blocks

    def forget_weights(self, keep: bool, identity: str) -> None:
        self._forget_kept(None, "weights")
        self._sources.erase_later()
        self._kept.rename(identity)
        self._hello = msgspec.structs.replace(self._hello, weights=identity)
        self._outgoing.introduce(self._hello)
        for peers in self._connections:
            peers.introduce(self._hello)
        reason = f"worker {self.name!r} changed its weights, or sleeps"
        self._outgoing.end_all(HandoffError(reason))
        self._end_old(keep)

    def at_rest(self) -> bool:
        return self._sources.quiet and self._adapters.idle and not self._busy()

    async def status(self) -> WorkerStatus:
        return self.status_now()

    def status_now(self) -> WorkerStatus:
        """Returns the worker's status. Raises UnavailableError if the mesh has failed."""
        self._loop.check()
        context, ledgers, states = self._context, self._state.ledgers, self._state.states
        common = WorkerStatus(
            name=self.name,
            role=self._role,
            layout=str(self._config.layout),
            running=0,
            waiting=len(self._admission.queue),
            slots=0,
            free_pages=tuple([ledger.free_pages for ledger in ledgers]),
            total_pages=tuple([ledger.total_pages for ledger in ledgers]),
            page_size=self._mesh.page_size,
            context_tokens=self._mesh.context_tokens,
            draining=self._draining,
            queued_tokens=self._prompts.backlog.tokens,
            queued_pairs=self._prompts.backlog.pairs,
            free_states=states.free_by_rank(),
            total_states=states.total_by_rank(),
            kept=(*kept_tiers(self._kept, self._mesh), *self._sources.stats()),
            kv_channels=context.kv_channels(),
            times=context.times(),
            links=self._links(),
            kernels=context.kernels,
            adapter_slots=self._mesh.adapters,
            adapters=self._adapters.table.loaded,
            weights=self.weights.served.identity,
            asleep=self.weights.asleep,
            images=self._mesh.images is not None,
            can_prefill=self._scheduler.chunk_tokens > 0,
            chunk_tokens=self._scheduler.chunk_tokens,
            priorities=self._loads(self._admission.priorities()),
        )
        return self._status(common)

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
        """Returns the cached blocks for display (`scheduler/kept_view.py`)."""
        tiers = {source.name: source.listed() for source in self._sources}
        return tuple(kept_blocks(self.name, self._kept, tiers))

    async def hello(self, hello: PeerHello) -> PeerHello:
        return await self._outgoing.hello(hello)

    async def fetch(self, call: FetchCall) -> FetchReply:
        return await self._given.give(call)

    def offers(self, handoff_id: int, attempt: int) -> AsyncIterator[PeerMessage]:
        return self._outgoing.offers(handoff_id, attempt)

    async def acknowledge(self, handoff_id: int, offer_ids: tuple[int, ...]) -> None:
        await self._outgoing.acknowledge(handoff_id, offer_ids)
        self._given.moved()

    async def abort(self, handoff_id: int, reason: str) -> None:
        await self._outgoing.abort(handoff_id, reason)

    def _turn(self, step: int | None) -> StepCommand | None:
        """Takes a turn of the scheduler and carries it out. Returns its command, which has the
        number `step`."""
        prompts = self._prompts
        for prompt in prompts.take_released() if prompts.released else ():
            self._seek(prompt)
        turn = self._scheduler.turn(self._facts(step))
        if turn.command is None:
            self._host.copy_evicted()  # otherwise before the command
        for copies in turn.copies:
            self._loop.fire(CopyPages(self._loop.next_number(), (), copies))
        command = self._carry_out(turn)
        if prompts.released:
            self._loop.wake()
        if self._draining:
            self._quiet.set()
        return command

    def _query(self, prompt: Prompt, call: PrefillCall | ReserveCall) -> RestoreQuery:
        """Asks the sources of KV for the blocks of a prompt that are not in pages."""
        hinted = min(call.peer_tokens, prompt.most_known)
        return RestoreQuery(prompt.useful, prompt.known, 0, call.peer, hinted)

    @abstractmethod
    def _facts(self, step: int | None) -> Facts:
        """Returns what the scheduler needs to know for a turn."""

    @abstractmethod
    def _carry_out(self, turn: Turn) -> StepCommand | None:
        """Carries a turn out, except for its command, which is returned."""

    @abstractmethod
    def _seek(self, prompt: Prompt) -> None:
        """Lets a prompt wait for blocks of another prompt, or for pages."""

    @abstractmethod
    def _apply(self, command: StepCommand, result: StepResult) -> None:
        """Processes the result of a planned command."""

    @abstractmethod
    def _status(self, common: WorkerStatus) -> WorkerStatus:
        """Completes a status with what differs between the two kinds of workers."""

    @abstractmethod
    def _prefilled(self, key: int, firsts: list[SampledToken]) -> None:
        """Called with the first tokens of a prompt that is computed."""

    @abstractmethod
    def _requests_running(self) -> list[Request]:
        """Returns the requests with sequences that have pages or wait for them."""

    @abstractmethod
    def _busy(self) -> bool:
        """Returns whether any work is left that a drain must wait for."""

    @abstractmethod
    def _end_everything(self, error: UnavailableError) -> None:
        """Ends all running and waiting work with this error."""

    def _sent(self, handoff: OutgoingHandoff, error: JdisaggError | None) -> None:
        if not self._given.ended(handoff.sequence):
            self._handed_over(handoff, error)
        self._loop.wake()  # others may get what became free
        self._quiet.set()

    @abstractmethod
    def _handed_over(self, handoff: OutgoingHandoff, error: JdisaggError | None) -> None:
        """Called when a hand-off of a prompt or sequence has ended. `error` is None if it
        succeeded."""

    @abstractmethod
    def _end_old(self, keep: bool) -> None:
        """Ends sequences with KV of earlier weights as preempted, so that later attempts recompute
        it. If `keep` is set, sequences that decode continue."""

    @abstractmethod
    def _hand_on(self) -> None:
        """Offers running work to other workers during a drain."""

    def _connect(self, peers: PeerResolver, codec: str) -> Peers:
        timeouts = self._limits.timeouts.handoff
        now = self._clock.now
        made = Peers(peers, self._hello, self._loop, codec, now, timeouts, self._calls)
        self._connections.append(made)
        return made

    def _links(self) -> tuple[LinkTimes, ...]:
        return tuple([link for peers in self._connections for link in peers.meter.links()])

    def _find_sources(self, peers: PeerResolver | None, decodes: bool) -> KvSources:
        kept, loop, mesh, now = self._kept, self._loop, self._mesh, self._clock.now
        ids, room = self._context.ids, self._context.tiers
        if decodes and kept.snapshots:  # their blocks are of use only with a snapshot
            peers, room = None, TierRoom()
        most_writing = MOST_WRITING_OF_DECODE if decodes else MOST_WRITING
        self._host = HostTier(kept, loop, mesh, room, ids, self.counters, most_writing)
        self._disk = DiskTier(kept, loop, self._host, room, self.counters, now)
        sources: list[KvSource] = [tier for tier in (self._host, self._disk) if tier.on]
        # without these, windows or state that arrive with blocks could not be stored
        has_place = not mesh.ring_pages and (kept.snapshots or not mesh.kv_spec.has_state)
        if peers is not None and kept.on and has_place:
            fetch = PeerFetch(
                kept,
                loop,
                mesh,
                self._connect(peers, "none"),
                self._limits,
                Prices(room.always),
                self.counters,
            )
            sources.append(fetch)
        return KvSources(kept, mesh.page_size, self.counters, now, sources, self._admission.spares)

    def _apply_chunk(self, chunk: PrefillChunk, result: PrefillResult) -> None:
        seconds = self._loop.took
        self._prompts.computed(chunk, result, seconds)
        self._sources.computed_in(sum([len(row.tokens) for row in chunk.rows]), seconds)
        for row in chunk.rows:
            if row.samples:
                firsts = [one for one in result.samples if one.sequence == row.sequence]
                self._prefilled(row.sequence, firsts)

    def _loads(self, waiting: Mapping[int, int]) -> tuple[PriorityLoad, ...]:
        """`waiting`: number of requests that wait for pages, by priority."""
        held, queued = self._state.priorities(), self._prompts.backlog.by_priority()
        return tuple(
            [
                PriorityLoad(one, *held.get(one, (0, 0)), waiting.get(one, 0), queued.get(one, 0))
                for one in sorted({*held, *waiting, *queued})
            ]
        )

    def _count_reuse(
        self, prompt: Prompt, rank: int, cached_tokens: int, restored: RestoredBlocks
    ) -> None:
        kept = self._kept
        if cached_tokens:
            self._sources.used(rank, prompt.chain[: cached_tokens // kept.block_tokens])
        if kept.on:
            self.counters.add("prefix_asked_tokens", prompt.tokens)
            for tier, count in restored.split(rank, cached_tokens).by_tier().items():
                if count or tier == "pages":
                    self.counters.add("prefix_hit_tokens", count, tier=tier)
            known = self.counters["prefix_blocks_evicted"] - self._forgotten
            if kept.evicted_blocks > known:
                count = kept.evicted_blocks - known
                self.counters.add("prefix_blocks_evicted", count, cause="room")
        if kept.snapshots:
            made, used, evicted = (
                sum([getattr(one, what) for one in kept.snapshots])
                for what in ("made", "used", "evicted")
            )
            self.counters.add("snapshots_kept", made - self.counters["snapshots_kept"])
            self.counters.add("snapshots_used", used - self.counters["snapshots_used"])
            self.counters.add("snapshots_evicted", evicted - self.counters["snapshots_evicted"])

    def _forget_kept(self, rank: int | None, cause: str) -> int:
        # a reset of all workers may take this long
        self._given.close_for(self._limits.timeouts.request.status_seconds)
        elsewhere = self._sources.clear(cause)
        blocks = self._kept.clear(rank)
        self._forgotten += blocks
        if blocks:
            self.counters.add("prefix_blocks_evicted", blocks, cause=cause)
        return blocks + elsewhere

    def _forget_broken(self, rank: int) -> None:
        """Drops the cached blocks of a rank, which may be the cause of a result that is no
        number."""
        self._forget_kept(rank, "broken")
        self._sources.erase_later()

    async def _compiled(self, request: Request, seconds: float) -> None:
        """Compiles the request's grammar, if any.

        Raises:
            InvalidRequestError: The grammar cannot be compiled.
            UnavailableError: The worker sleeps.
        """
        self._check_awake()
        grammar = request.sampling.grammar
        if grammar is not None:
            if self._grammars is None:
                raise InvalidRequestError(
                    f"grammar: worker {self.name!r} has no tokenizer.json beside its model, which"
                    " structured output needs; leave the grammar out, or add the file"
                )
            await self._grammars.prepare(grammar, seconds)

    def _unsampled(self, request: Request, firsts: Iterable[SampledToken]) -> JdisaggError | None:
        codes = [one.token for one in firsts if one.token in (BROKEN_TOKEN, STUCK_TOKEN)]
        return self._unchosen(request, codes[0]) if codes else None

    def _unchosen(self, request: Request, token: int) -> JdisaggError:
        grammar = request.sampling.grammar
        if token != STUCK_TOKEN or grammar is None:
            return BrokenModelError()
        return InvalidRequestError(
            f"grammar: the {grammar.kind.value} became too complex for the text so far, or the"
            " tokens so far do not follow it; simplify it"
        )

    def _check_serving(
        self, request: Request, children: tuple[Child, ...], computes: bool = True
    ) -> None:
        self._loop.check()
        self._check_awake()
        self._check_images(request, computes)
        check_experts(self.name, self._mesh, request)
        if self._draining and not any(child.accepted for child in children):
            raise UnavailableError(
                f"worker {self.name!r} is draining and takes no new requests; try another",
                retry_after_seconds=1.0,
            )

    def _check_images(self, request: Request, computes: bool) -> None:
        form = self._mesh.images
        for image in request.images:
            if form is None:
                raise InvalidRequestError(
                    f"worker {self.name!r} reads no images: its model has no vision encoder that is"
                    " served, its checkpoint lacks the encoder's weights, or its instance has"
                    " pipeline stages or several processes; send text only"
                )
            form.check(image, request.prompt_token_ids, computes)

    def _check_awake(self) -> None:
        if self.weights.asleep:
            raise UnavailableError(f"worker {self.name!r} sleeps; wake it, or try another")

    def _sweep(self, now: float) -> None:
        self._outgoing.sweep(now)
        self._sources.expire(now)
        self.weights.expire()
        self._loop.break_if_stalled(self._limits.step_seconds)
        self._attempts.forget_before(now - 2 * self._limits.handoff_lease_seconds)

    async def _keep_sweeping(self) -> None:
        while True:
            await self._clock.sleep(self._sweep_seconds)
            try:
                self._sweep(self._clock.now())
            except Exception as error:
                self._loop.break_down(error)  # without sweeps no lease would expire
                return

    def _break_down(self, error: UnavailableError) -> None:
        self.counters.add("mesh_failures")
        self._end_everything(error)

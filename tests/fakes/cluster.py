"""Clusters on fake meshes in virtual time: workers, request path and oracle, for tests of the path
and the workers.

`Fleet` has any number of workers, which may be killed and started again under their names.
`Cluster` is the fleet of one prefill and one decode worker, or of one mixed worker. `check_quiet`
is rule 6 of the design: when nothing runs, every page is free, every offer released, every block
gone."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import msgspec

from jdisagg.assembly import LocalAffinity, LocalCluster, Worker, WorkerHost
from jdisagg.config import InstanceConfig, LimitsConfig, Mode, RoutingConfig, WorkerConfig
from jdisagg.costs.speeds import Kind
from jdisagg.dispatch.placer import PlacerSettings
from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.dispatch.request_path import RequestPath
from jdisagg.dispatch.token_stream import TextDelta
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.messages.ports import (
    DecodePort,
    HandoffSource,
    PeerPort,
    PrefillCall,
    PrefillPort,
    PrefillReply,
    Reservation,
    ReserveCall,
)
from jdisagg.messages.ports_middleware import through
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.prompt.logprobs import PromptLogprobs
from jdisagg.request import (
    CachedTokens,
    FinishReason,
    Request,
    SamplingParams,
    StreamEvent,
    Timings,
    TokenLogprobs,
    Usage,
)
from jdisagg.router.cluster_state import Description
from jdisagg.router.decision import NO_ROUTER_EVENTS, Affinity, RouterEvents
from jdisagg.scheduler.executor import Executor, MeshLimits
from jdisagg.scheduler.host_blocks import TierRoom
from jdisagg.scheduler.residency import BlockNames
from jdisagg.worker.mesh_worker import WorkerContext
from tests.fakes.fake_executor import Costs, FakeChannel, FakeExecutor, Faults, toy_limits
from tests.fakes.packed_ports import packed
from tests.fakes.toy_grammars import GRAMMARS
from tests.fakes.toy_model import expected_scores, expected_tokens
from tests.fakes.virtual_time import VirtualClock

P = TypeVar("P")
Call = TypeVar("Call", PrefillCall, ReserveCall)
Wrap = Callable[[P], P]


class ToyText:
    """Each token is one word `<id>`. Stop strings are searched for in the newest token's word
    only."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = set(stop)
        self.stop_string = ""

    def push(self, token_ids: tuple[int, ...]) -> TextDelta:
        words: list[str] = []
        for kept, token_id in enumerate(token_ids):
            word = f"<{token_id}>"
            if word in self._stop:
                self.stop_string = word
                return TextDelta("".join(words), kept + 1, True)
            words.append(word)
        return TextDelta("".join(words), len(token_ids), False)

    def finish(self) -> str:
        return ""


@dataclass
class Collected:
    """One request's stream, put together. `add` asserts that each token arrives once and in
    order."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    finish: dict[int, FinishReason] = field(default_factory=dict)
    usage: Usage | None = None
    timings: Timings | None = None
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def cached_tokens(self) -> int:
        assert self.usage is not None
        return self.usage.cached_tokens

    @property
    def cached_by_tier(self) -> CachedTokens:
        assert self.usage is not None and self.usage.cached_by_tier is not None
        return self.usage.cached_by_tier

    def add(self, event: StreamEvent) -> None:
        assert self.usage is None, "nothing follows the last event"
        assert event.child not in self.finish, "nothing follows a child's end"
        if event.prompt_logprobs is not None:
            assert not self.tokens, "they come with the first event, and once"
            self.prompt_logprobs = event.prompt_logprobs
        tokens = self.tokens.setdefault(event.child, [])
        assert event.first_index == len(tokens), "each token once, in order"
        tokens += event.token_ids
        self.text[event.child] = self.text.get(event.child, "") + event.text
        self.logprobs.setdefault(event.child, []).extend(event.logprobs)
        if event.finish_reason is not None:
            self.finish[event.child] = event.finish_reason
        self.usage, self.timings = event.usage, event.timings
        if event.usage is not None:
            assert event.usage.cached_by_tier is not None
            assert event.usage.cached_by_tier.total == event.usage.cached_tokens


def _as_it_is(port: P) -> P:
    return port


class _Ports(LocalCluster):
    """Its ports pass the wire format where asked, and the test's wraps, by Protocol."""

    def __init__(
        self,
        clock: VirtualClock,
        new_id: Callable[[], int],
        mortal: bool,
        wire: bool,
        wraps: Mapping[type, Wrap[Any]],
    ) -> None:
        super().__init__(clock, new_id, mortal=mortal)
        self._wire, self._wraps = wire, wraps
        self._made: dict[tuple[type, Worker, Worker | None], Any] = {}

    def called(self, protocol: type[P], port: P, worker: Worker, caller: Worker | None) -> P:
        if (protocol, worker, caller) not in self._made:
            inner = packed(protocol, port) if self._wire else port
            made = super().called(protocol, inner, worker, caller)
            self._made[protocol, worker, caller] = self._wraps[protocol](made)
        return self._made[protocol, worker, caller]


@dataclass
class Process:
    """One start of one worker."""

    worker: Worker
    mesh: FakeExecutor


class Fleet:
    """`prefills` and `decodes` workers behind a path. Use inside `run_virtually`.

    Args:
        faults: Faults of the mesh of the worker of this name.
        wire: Whether every port call passes the wire format and back.
        fingerprint: Model fingerprint of the worker of this name.
        tuning: Autotune results of the worker of this name.
        names: Names of cached blocks, or None without a prefix cache.
        affinity: What the router knows of prefix caches.
        tiers: Host and disk room of prefill workers.
        decode_tiers: Host and disk room of workers that decode.
        hints: Whether each prompt comes with the name of the other worker that caches most of it.
        hinted: Letters with which the names of such other workers begin.
        grammars: Grammar compiler of all workers.
        fetches: Whether workers may fetch cached KV.
        mortal: Whether workers can be killed.
        ends_quiet: Whether nothing is left when the test ends; see `check_quiet`.
        mixes: Whether a mesh in chunked mode runs chunks and steps together.
        addressed: Whether peers find a worker by address, or by name.
        wrap_mesh: Wraps a worker's mesh.
        wrap_prefill, wrap_decode, wrap_peer: Wrap ports, once each.
    """

    def __init__(
        self,
        prefills: int = 2,
        decodes: int = 2,
        decode: MeshLimits | None = None,
        prefill: MeshLimits | None = None,
        growth_tokens: int = 8,
        limits: LimitsConfig | None = None,
        faults: Callable[[str], Faults | None] = lambda name: Faults(),
        costs: Costs | None = None,
        seed: int = 0,
        wire: bool = False,
        fingerprint: Callable[[str], str] = lambda name: "",
        tuning: Callable[[str], str] = lambda name: "",
        routing: RoutingConfig | None = None,
        events: RouterEvents = NO_ROUTER_EVENTS,
        names: BlockNames | None = None,
        affinity: Affinity | None = None,
        tiers: TierRoom | None = None,
        decode_tiers: TierRoom | None = None,
        hints: bool = False,
        hinted: str = "p",
        grammars: GrammarCompiler | None = GRAMMARS,
        fetches: bool = True,
        mortal: bool = True,
        addressed: bool = True,
        mode: Mode = Mode.DISAGGREGATED,
        ends_quiet: bool = True,
        steps_per_dispatch: int = 1,
        queue_limit: int = 1024,
        mixes: bool = True,
        wrap_mesh: Callable[[str, Executor], Executor] = lambda name, mesh: mesh,
        wrap_prefill: Wrap[PrefillPort] = _as_it_is,
        wrap_decode: Wrap[DecodePort] = _as_it_is,
        wrap_peer: Wrap[PeerPort] = _as_it_is,
    ) -> None:
        self.channel = FakeChannel()
        self.clock = VirtualClock()
        self.limits = limits or LimitsConfig()
        self.mode, self.ends_quiet = mode, ends_quiet
        self.processes: dict[str, Process] = {}
        self.unseen: list[dict[str, object]] = []
        self.hinted = hinted
        wraps = {PrefillPort: wrap_prefill, DecodePort: wrap_decode, PeerPort: wrap_peer}
        self.local = _Ports(self.clock, self.new_id, mortal, wire, wraps)
        self._config = InstanceConfig(
            growth_tokens=growth_tokens,
            steps_per_dispatch=steps_per_dispatch,
            queue_limit=queue_limit,
        )
        self._limits = {"p": prefill or toy_limits(), "d": decode or toy_limits()}
        if mode is Mode.UNIFIED:
            whole = self._limits["d"].chunk_buckets[-1]
            self._limits["d"] = replace(self._limits["d"], pack_tokens=whole)
        if mode is Mode.CHUNKED and mixes and not self._limits["d"].kv_spec.has_state:
            sizes = self._limits["d"].chunk_buckets
            self._limits["d"] = replace(self._limits["d"], mixed_buckets=sizes)
        self._tiers = {"p": tiers or TierRoom(), "d": decode_tiers or TierRoom()}
        self._faults, self._costs, self._fingerprint = faults, costs, fingerprint
        self._tuning = tuning
        self._random = random.Random(seed)
        self._hints, self._wrap_mesh = hints, wrap_mesh
        self._addressed = addressed
        self._settings = PlacerSettings(
            routing or RoutingConfig(), affinity=affinity, events=events
        )
        self._block_names, self._grammars, self._fetches = names, grammars, fetches
        self._prefill_ports: dict[str, PrefillPort] = {}
        self._decode_ports: dict[str, DecodePort] = {}
        for count, kind in ((prefills, "prefill"), (decodes, "decode")):
            for number in range(count):
                self._build(f"{kind}{number}")
        self.path = self.new_path()

    def new_path(self, prefill: str = "", decode: str = "") -> RequestPath:
        """The path of another router to the same workers, or to the named ones only."""
        ports, decodes = self._prefill_ports, self._decode_ports
        return RequestPath(
            ClusterPorts(
                {prefill: ports[prefill]} if prefill else ports,
                {decode: decodes[decode]} if decode else decodes,
                self._address,
            ),
            lambda request: ToyText(request.sampling.stop),
            self.limits,
            self.clock,
            self._settings,
            self.new_id,
        )

    def new_id(self) -> int:
        return self._random.getrandbits(63)

    def _address(self, name: str) -> str:
        return f"{name}:1" if self._addressed else ""

    def prefill_worker(self, name: str) -> Worker:
        worker = self.processes[name].worker
        assert not worker.role.decodes
        return worker

    def decode_worker(self, name: str) -> Worker:
        worker = self.processes[name].worker
        assert worker.role.decodes
        return worker

    def counted(self, counter: str) -> int:
        return sum(process.worker.counters[counter] for process in self.processes.values())

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: self.unseen.append(context)
        )
        await self.local.start()
        return self

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self.ends_quiet and error is None:
            await self.check_quiet()
        for worker in reversed(self.local.workers.values()):
            if not self.local.is_dead(worker):
                await worker.stop()

    async def start(self, name: str) -> None:
        """Starts a killed worker again."""
        self._build(name)
        await self.processes[name].worker.start()

    def _build(self, name: str) -> None:
        kind = name[0]
        mesh = FakeExecutor(self._limits[kind], self.channel, self._faults(name), self._costs)
        context = WorkerContext(
            name,
            self.clock,
            self.new_id,
            self._fingerprint(name),
            address=self._address(name),
            names=self._block_names,
            tiers=self._tiers[kind],
            tuning=self._tuning(name),
        )
        decodes = WorkerRole.DECODE if self.mode is Mode.DISAGGREGATED else WorkerRole.MIXED
        role = WorkerRole.PREFILL if kind == "p" else decodes
        mesh.choose_chunks(role.computes)
        config = WorkerConfig(mode=self.mode, instance=self._config, limits=self.limits)
        host = WorkerHost(context, role, config, self._fetches)
        worker = self.local.add(host, self._wrap_mesh(name, mesh))
        worker.constrain(self._grammars)
        self.processes[name] = Process(worker, mesh)
        ports = self.local.ports(name)
        if port := ports.decode:
            hinted = self._hints and self.mode is not Mode.DISAGGREGATED
            self._decode_ports[name] = (
                through(DecodePort, port, _Hints(self, name)) if hinted else port
            )
        elif ports.prefill and self.mode is Mode.DISAGGREGATED:
            port = ports.prefill
            self._prefill_ports[name] = (
                through(PrefillPort, port, _Hints(self, name)) if self._hints else port
            )

    async def change_role(self, name: str, seconds: float = 10.0) -> None:
        """Lets a prefill worker become a decode worker, or the other way round. It keeps its name,
        and no prompt or sequence has pages as its mesh is prepared."""
        worker, mesh = self.processes[name].worker, self.processes[name].mesh
        role = worker.role.other

        async def prepare(pages: tuple[tuple[int, ...], ...]) -> None:
            assert all(map(len, pages)) and not (worker._prompts.placed or worker._state.groups)
            mesh.choose_chunks(role.computes)

        await worker.change_role(role, seconds, prepare, scratch_tokens=8)
        self._prefill_ports.pop(name, None)
        self._decode_ports.pop(name, None)
        ports = self.local.ports(name)
        if ports.decode:
            self._decode_ports[name] = ports.decode
        elif ports.prefill:
            self._prefill_ports[name] = ports.prefill

    async def kill(self, name: str) -> None:
        """Kills a worker as `kill -9` would."""
        await self.local.kill(name, lambda: self.channel.lose(self.processes[name].mesh))

    async def collect(
        self, request: Request, path: RequestPath | None = None, into: Collected | None = None
    ) -> Collected:
        collected = into or Collected()
        async for event in (path or self.path).stream(request):
            collected.add(event)
        return collected

    def check(self, request: Request, collected: Collected) -> None:
        """Compares an answer with the oracle."""
        for child in range(request.sampling.n):
            tokens, reason = expected_tokens(request, child, self._limits["d"].context_tokens)
            assert tuple(collected.tokens[child]) == tokens, f"{request.request_id} child {child}"
            assert collected.finish[child].value == reason
        wanted = request.sampling.prompt_logprobs
        prompt = request.prompt_token_ids
        scores = None if wanted is None else expected_scores(prompt, wanted)
        assert collected.prompt_logprobs == scores
        assert collected.usage is not None
        assert collected.usage.completion_tokens == sum(map(len, collected.tokens.values()))

    async def ask(self, request: Request, path: RequestPath | None = None) -> Collected:
        """Streams one and checks it against the oracle."""
        collected = await self.collect(request, path)
        self.check(request, collected)
        return collected

    async def collect_all(self, requests: Sequence[Request]) -> list[Collected]:
        """Streams all at once and checks each against the oracle."""
        answers = await asyncio.gather(*(self.collect(request) for request in requests))
        for request, answer in zip(requests, answers, strict=True):
            self.check(request, answer)
        return answers

    async def check_quiet(self, settle_seconds: float = 1.0) -> None:
        """All pages are free on all ranks of live workers; no offer, block or hand-off is left."""
        await asyncio.sleep(settle_seconds)
        assert not self.unseen, f"failures that no test saw: {self.unseen}"
        for name, process in self.processes.items():
            if self.local.is_dead(process.worker):
                continue
            status = await process.worker.status()
            assert status.free_pages == status.total_pages, f"{name} holds pages: {status}"
            assert status.free_states == status.total_states, f"{name} holds states: {status}"
            left = (status.running, status.waiting, status.handoffs)
            queued = (status.queued_tokens, status.queued_pairs, sum(status.rank_contexts))
            assert (*left, *queued) == (0,) * 6, status
            assert not process.mesh.pulled
        offers = [self.channel.owners[offer_id].log[:1] for offer_id in self.channel.offered]
        assert not offers, f"offers of {offers}"


class Cluster(Fleet):
    """One prefill worker and one decode worker, or one mixed worker, without crashes. Its router
    holds no request back.

    Args:
        appends: Kinds of the prefill and the decode mesh, for a router that knows their caches and
            may leave a prompt to the decode mesh.
    """

    def __init__(
        self,
        mode: Mode = Mode.DISAGGREGATED,
        *,
        decode_faults: Faults | None = None,
        prefill_faults: Faults | None = None,
        appends: tuple[Kind, Kind] | None = None,
        names: BlockNames | None = None,
        **options: Any,
    ) -> None:
        faults = {"prefill0": prefill_faults, "decode0": decode_faults}
        super().__init__(
            1,
            1,
            faults=faults.__getitem__,
            routing=RoutingConfig(hold_seconds=1e9, local_gain=0.0),
            grammars=None,
            fetches=False,
            mortal=False,
            addressed=False,
            mode=mode,
            names=names,
            **options,
        )
        self.prefill, self.decode = self.prefill_worker("prefill0"), self.decode_worker("decode0")
        self.prefill_mesh, self.decode_mesh = (one.mesh for one in self.processes.values())
        if appends is not None:
            assert names is not None, "a router can know caches only where there are some"
            affinity = LocalAffinity((self.prefill, self.decode), names.secret)
            self._settings = replace(self._settings, affinity=affinity)
            self.path = self.new_path()
            for worker, kind in zip((self.prefill, self.decode), appends, strict=True):
                state = self.path.placer.accounts.state
                state.describe(worker.name, Description("rack/host", kind))


class _Hints:
    """Middleware of worker `name`, which computes prompts: adds the name of the other worker that
    caches most of a prompt, as if the router knew all caches at that moment."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._fleet = fleet
        self._name = name

    async def prefill(
        self, proceed: Callable[[PrefillCall], Awaitable[PrefillReply]], call: PrefillCall
    ) -> PrefillReply:
        return await proceed(self._hinted(call))

    async def reserve(
        self, proceed: Callable[[ReserveCall], Awaitable[Reservation]], call: ReserveCall
    ) -> Reservation:
        return await proceed(self._hinted(call))

    def _hinted(self, call: Call) -> Call:
        known = call.request.prompt_token_ids + call.children[0].accepted
        found: dict[str, int] = {}
        for name, process in self._fleet.processes.items():
            if name[0] in self._fleet.hinted and name != self._name:
                worker, kept = process.worker, process.worker._kept
                chain = kept.chain(call.request, known)
                count = max(kept.match(rank, chain) for rank in range(len(kept.trees)))
                count += worker._host.blocks.match(chain, count)
                found[name] = count * kept.block_tokens
        best = max(found, key=lambda name: found[name], default="")
        if found.get(best):
            source = HandoffSource(best, self._fleet.new_id(), self._fleet._address(best))
            call = msgspec.structs.replace(call, peer=source, peer_tokens=found[best])
        return call


async def until(holds: Callable[[], object], step_seconds: float = 1e-3) -> None:
    """Waits in virtual time."""
    while not holds():
        await asyncio.sleep(step_seconds)


def toy_request(
    number: int,
    prompt_tokens: int = 5,
    stop_ids: tuple[int, ...] = (),
    deadline_seconds: float | None = None,
    **sampling: object,
) -> Request:
    """A request with a prompt of its own, greedy by default."""
    prompt = tuple((number * 37 + at * 11 + 1) % 89 for at in range(prompt_tokens))
    params = replace(SamplingParams(max_tokens=12, temperature=0.0), **sampling)  # type: ignore[arg-type]
    return Request(f"r{number}", prompt, params, stop_ids, deadline_seconds)

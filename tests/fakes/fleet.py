"""Several prefill and decode workers on fake meshes in virtual time, which may be killed and
started again under their names.

A killed worker's calls fail, those under way too, its offers are gone, and nothing that it still
says reaches anybody. `check_quiet` is rule 6 of the design for those that live."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from jdisagg.config import InstanceConfig, LimitsConfig, RoutingConfig
from jdisagg.dispatch.placer import PlacerSettings
from jdisagg.dispatch.request_context import ClusterPorts
from jdisagg.dispatch.request_path import RequestPath
from jdisagg.dispatch.router_events import NO_ROUTER_EVENTS, RouterEvents
from jdisagg.errors import HandoffError
from jdisagg.messages.ports import (
    DecodePort,
    HandoffSource,
    PeerPort,
    PrefillCall,
    PrefillPort,
    PrefillReply,
)
from jdisagg.messages.ports_middleware import through
from jdisagg.request import Request
from jdisagg.router.affinity import Affinity
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.host_blocks import TierRoom
from jdisagg.scheduler.residency import BlockNames
from jdisagg.simulator.crashable import Crash, Crashable
from jdisagg.worker.decode_worker import DecodeWorker
from jdisagg.worker.mesh_worker import WorkerContext
from jdisagg.worker.prefill_worker import PrefillWorker
from tests.fakes.cluster import Collected, ToyText
from tests.fakes.fake_executor import Costs, FakeChannel, FakeExecutor, Faults, toy_limits
from tests.fakes.packed_ports import packed
from tests.fakes.toy_grammars import GRAMMARS
from tests.fakes.toy_model import expected_tokens
from tests.fakes.virtual_time import VirtualClock


@dataclass
class Process:
    """One start of one worker."""

    worker: PrefillWorker | DecodeWorker
    mesh: FakeExecutor
    crash: Crash = field(default_factory=Crash)


class Fleet:
    """`prefills` and `decodes` workers behind a path. Use inside `run_virtually`."""

    def __init__(
        self,
        prefills: int = 2,
        decodes: int = 2,
        decode: MeshLimits | None = None,
        prefill: MeshLimits | None = None,
        growth_tokens: int = 8,
        limits: LimitsConfig | None = None,
        faults: Callable[[str], Faults] = lambda name: Faults(),
        costs: Costs | None = None,
        seed: int = 0,
        wire: bool = False,
        fingerprint: Callable[[str], str] = lambda name: "",
        routing: RoutingConfig | None = None,
        events: RouterEvents = NO_ROUTER_EVENTS,
        names: BlockNames | None = None,
        affinity: Affinity | None = None,
        tiers: TierRoom | None = None,
        hints: bool = False,
        hinted: str = "p",
    ) -> None:
        """`fingerprint`: of the model that a worker of this name serves. `names`: KV stays for
        later requests; `affinity`: what the router knows of that. `tiers`: of prefill workers.
        `hints`: each prompt comes with the name of the other worker that keeps most of it, as if
        the router knew all that is kept at that moment; `hinted`: of those whose names begin with
        one of these letters."""
        self.channel = FakeChannel()
        self.clock = VirtualClock()
        self.limits = limits or LimitsConfig()
        self.processes: dict[str, Process] = {}
        self._config = InstanceConfig(growth_tokens=growth_tokens)
        self._meshes = {"p": prefill or toy_limits(), "d": decode or toy_limits()}
        self._faults = faults
        self._costs = costs
        self.unseen: list[dict[str, object]] = []
        self._random = random.Random(seed)
        self._wire = wire
        self._fingerprint = fingerprint
        self._routing = routing
        self._events = events
        self._block_names = names
        self._affinity = affinity
        self._tiers = tiers or TierRoom()
        self._hints = hints
        self.hinted = hinted
        self._names = [f"prefill{number}" for number in range(prefills)] + [
            f"decode{number}" for number in range(decodes)
        ]
        self._prefill_ports: dict[str, PrefillPort] = {}
        self._decode_ports: dict[str, DecodePort] = {}
        self.path = self.new_path()

    def new_path(self, prefill: str = "", decode: str = "") -> RequestPath:
        """Of another router, to the same workers; `prefill`, `decode`: to this one alone."""
        ports, decodes = self._prefill_ports, self._decode_ports
        return RequestPath(
            ClusterPorts(
                {prefill: ports[prefill]} if prefill else ports,
                {decode: decodes[decode]} if decode else decodes,
                lambda name: f"{name}:1",
            ),
            lambda request: ToyText(request.sampling.stop),
            self.limits,
            self.clock,
            PlacerSettings(
                self._routing or RoutingConfig(), affinity=self._affinity, events=self._events
            ),
            self.new_id,
        )

    def new_id(self) -> int:
        return self._random.getrandbits(63)

    def decode_worker(self, name: str) -> DecodeWorker:
        worker = self.processes[name].worker
        assert isinstance(worker, DecodeWorker)
        return worker

    def counted(self, counter: str) -> int:
        return sum(process.worker.counters[counter] for process in self.processes.values())

    async def __aenter__(self) -> "Fleet":
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: self.unseen.append(context)
        )
        for name in self._names:
            await self.start(name)
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in self._names:
            if not self.processes[name].crash.dead.is_set():
                await self.processes[name].worker.stop()

    async def start(self, name: str) -> None:
        mesh = FakeExecutor(self._meshes[name[0]], self.channel, self._faults(name), self._costs)
        crash = Crash()
        context = WorkerContext(
            name,
            self.clock,
            self.new_id,
            self._fingerprint(name),
            address=f"{name}:1",
            names=self._block_names,
            tiers=self._tiers if name.startswith("p") else TierRoom(),
        )
        worker: PrefillWorker | DecodeWorker
        if name.startswith("p"):
            worker = PrefillWorker(
                context, mesh, self._config, self.limits, lambda source: self._peer(source, crash)
            )
            port = through(
                PrefillPort, packed(PrefillPort, worker) if self._wire else worker, Crashable(crash)
            )
            hinted = through(PrefillPort, port, _Hints(self, name)) if self._hints else port
            self._prefill_ports[name] = hinted
        else:
            worker = DecodeWorker(
                context, mesh, self._config, self.limits, lambda source: self._peer(source, crash)
            )
            self._decode_ports[name] = through(
                DecodePort, packed(DecodePort, worker) if self._wire else worker, Crashable(crash)
            )
        worker.constrain(GRAMMARS)
        self.processes[name] = Process(worker, mesh, crash)
        await worker.start()

    def prefill_worker(self, name: str) -> PrefillWorker:
        worker = self.processes[name].worker
        assert isinstance(worker, PrefillWorker)
        return worker

    async def kill(self, name: str) -> None:
        """As `kill -9`: from one moment to the next nothing of it answers."""
        process = self.processes[name]
        process.crash.dead.set()
        self.channel.lose(process.mesh)
        await asyncio.sleep(0)
        await process.worker.stop()

    async def collect(
        self, request: Request, path: RequestPath | None = None, into: Collected | None = None
    ) -> Collected:
        collected = into or Collected()
        async for event in (path or self.path).stream(request):
            collected.add(event)
        return collected

    def check(self, request: Request, collected: Collected) -> None:
        for child in range(request.sampling.n):
            tokens, reason = expected_tokens(request, child, self._meshes["d"].context_tokens)
            assert tuple(collected.tokens[child]) == tokens, f"{request.request_id} child {child}"
            assert collected.finish[child].value == reason

    async def collect_all(self, requests: list[Request]) -> None:
        """Streams all at once and checks each against the oracle."""
        answers = await asyncio.gather(*(self.collect(request) for request in requests))
        for request, answer in zip(requests, answers, strict=True):
            self.check(request, answer)

    async def check_quiet(self, settle_seconds: float = 1.0) -> None:
        await asyncio.sleep(settle_seconds)
        assert not self.unseen, f"failures that nobody saw: {self.unseen}"
        for name, process in self.processes.items():
            if process.crash.dead.is_set():
                continue
            status = await process.worker.status()
            assert status.free_pages == status.total_pages, f"{name} holds pages: {status}"
            assert status.free_states == status.total_states, f"{name} holds states: {status}"
            assert (status.running, status.waiting, status.handoffs) == (0, 0, 0), status
            assert (status.queued_tokens, status.queued_pairs, sum(status.rank_contexts)) == (
                0,
                0,
                0,
            ), status
            assert not process.mesh.pulled
        left = [offer_id for offer_id in self.channel.offered]
        assert not left, f"offers of {[self.channel.owners[offer_id].log[:1] for offer_id in left]}"

    def _peer(self, source: HandoffSource, ours: Crash) -> PeerPort:
        assert source.address == f"{source.worker}:1", "the path tells where a source is"
        process = self.processes.get(source.worker)
        if process is None:
            raise HandoffError(f"nobody listens at {source.address}")
        peer = process.worker
        return through(
            PeerPort, packed(PeerPort, peer) if self._wire else peer, Crashable(process.crash, ours)
        )


class _Hints:
    """Before the port of prefill worker `name`."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._fleet = fleet
        self._name = name

    async def prefill(
        self, proceed: Callable[[PrefillCall], Awaitable[PrefillReply]], call: PrefillCall
    ) -> PrefillReply:
        known = call.request.prompt_token_ids + call.children[0].accepted
        found: dict[str, int] = {}
        for name, process in self._fleet.processes.items():
            if name[0] in self._fleet.hinted and name != self._name:
                worker, kept = process.worker, process.worker._kept
                chain = kept.chain(call.request, known)
                count = max(kept.match(rank, chain) for rank in range(len(kept.kept_pages)))
                if isinstance(worker, PrefillWorker):
                    count += worker._host.blocks.match(chain, count)
                found[name] = count * kept.block_tokens
        best = max(found, key=lambda name: found[name], default="")
        if found.get(best):
            source = HandoffSource(best, self._fleet.new_id(), f"{best}:1")
            call = msgspec.structs.replace(call, peer=source, peer_tokens=found[best])
        return await proceed(call)

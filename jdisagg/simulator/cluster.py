"""Runs the code of the live workers, membership and request path on simulated meshes.

It assembles a `LocalCluster` (`jdisagg/assembly.py`) and makes no decisions of its own. It must run
on the event loop of `virtual_time`."""

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jdisagg.assembly import LocalCluster, Worker, WorkerHost
from jdisagg.clock import Clock
from jdisagg.config import Mode, WorkerConfig
from jdisagg.dispatch.frontend import ServingPath
from jdisagg.dispatch.membership import Membership, cluster_ports
from jdisagg.dispatch.placer import PlacerSettings, rules_of
from jdisagg.dispatch.request_path import RequestPath
from jdisagg.dispatch.token_stream import TextDelta
from jdisagg.errors import ConfigError, UnavailableError
from jdisagg.messages.kept_blocks import KeptMark
from jdisagg.messages.registry import ModelCard, WorkerCard
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.request import Request
from jdisagg.router.decision import NO_ROUTER_EVENTS, PlacementPolicy, RouterEvents
from jdisagg.router.known_blocks import KnownBlocks
from jdisagg.simulator.channel import ChannelEnd, SimulatedChannel
from jdisagg.simulator.executor import EngineTraits, SimulatedExecutor
from jdisagg.simulator.fleet import Fleet, Pool
from jdisagg.simulator.host_memory import HostMemory
from jdisagg.simulator.prompt_names import PromptBook, PromptNames
from jdisagg.simulator.report import WorkerUsage
from jdisagg.simulator.timeline import Timeline
from jdisagg.telemetry import Counters
from jdisagg.worker.mesh_worker import WorkerContext

SWEEP_SECONDS = 0.5
SECRET = b"simulated"  # the key of block names; simulated prompts are not secret
NEWS_A_BEAT = 4


@dataclass(frozen=True, slots=True)
class _NoText:
    """Detokenizer that returns no text, because simulated tokens have no text."""

    stop_string: str = ""

    def push(self, token_ids: tuple[int, ...]) -> TextDelta:
        return _NOTHING

    def finish(self) -> str:
        return ""


_NOTHING, _NO_TEXT = TextDelta("", 0, False), _NoText()


@dataclass(slots=True, eq=False)
class Process:
    """One process of a worker. A restart of the worker creates another `Process`.

    Attributes:
        mark: Position in the worker's log of prefix cache changes. The router has received all
            changes up to this position.
    """

    worker: Worker
    mesh: SimulatedExecutor
    card: WorkerCard
    beating: asyncio.TimerHandle | None = None
    mark: KeptMark = KeptMark()


@dataclass(frozen=True, slots=True)
class Seat:
    """The properties of a worker that a restart does not change: name, role, pool and place."""

    name: str
    role: WorkerRole
    pool: Pool
    place: str


class SimulatedCluster:
    """Runs the code of the live workers and request path for a fleet of simulated meshes.

    Studies of other engines subclass it and pass the subclass to `simulate`
    (benchmarks/simulator_engines/cluster.py).

    Args:
      mortal: Whether workers may be killed during the run. If True, every call is slightly slower.
    """

    executor: Callable[..., SimulatedExecutor] = SimulatedExecutor

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        seed: int = 0,
        mortal: bool = False,
        events: RouterEvents = NO_ROUTER_EVENTS,
    ) -> None:
        self.fleet = fleet
        self.clock = clock
        self.timelines: list[Timeline] = []
        self.processes: dict[str, Process] = {}
        self.former: list[Process] = []
        # Tasks of clients with a running request, in order of arrival.
        self.clients: dict[asyncio.Task[None], None] = {}
        self.counters = Counters()
        self.channel = SimulatedChannel(fleet.link_between(), fleet.overlap)
        self._random = random.Random(seed)
        self.local = LocalCluster(clock, self.new_id, self._between, mortal)
        self._costs = [fleet.costs_of(pool) for pool in fleet.pools]
        self._limits = [fleet.limits_of(pool) for pool in fleet.pools]
        self._model = _model_card(fleet)
        self._sweeping: asyncio.Task[None] | None = None
        self.seats = {seat.name: seat for seat in _seats(fleet)}
        self.book = PromptBook(fleet.block_tokens)
        self._names = _names(fleet, self.book)
        self.known = KnownBlocks(SECRET, names=self._named) if self._names else None
        self.membership = Membership(
            clock, lambda card: self.local.ports(card.name), known=self.known
        )
        settings = PlacerSettings(fleet.routing, self._policy(), self.known, events)
        self.path = RequestPath(
            cluster_ports(self.membership), _no_text, fleet.limits, clock, settings, self.new_id
        )
        # Clients call `front`; a hook may wrap the path.
        self.front: ServingPath = self.path

    def new_id(self) -> int:
        return self._random.getrandbits(63)

    async def start(self) -> None:
        for name in self.seats:
            await self.start_worker(name)
        self._sweeping = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        for process in self.processes.values():
            if process.beating is not None:
                process.beating.cancel()
            await process.worker.stop()

    async def start_worker(self, name: str) -> None:
        if name in self.processes:
            self.former.append(self.processes[name])
        seat = self.seats[name]
        index = 0 if seat.role is WorkerRole.PREFILL else -1  # the two pools may be equal
        timeline = Timeline(len(self.timelines), name)
        self.timelines.append(timeline)
        self.channel.ends[name] = ChannelEnd(
            seat.place, seat.pool.devices, seat.pool.devices // seat.pool.instance.layout.dp
        )
        self.channel.gone.discard(name)
        self.channel.stalled.discard(name)
        fleet, instance = self.fleet, seat.pool.instance
        longest = min(30.0, fleet.limits.step_seconds / 4)
        mesh = self.executor(
            name,
            self._limits[index],
            self._costs[index],
            self.channel,
            timeline,
            EngineTraits(seat.pool.stages, longest),
            self._host_memory(seat),
        )
        worker = self._worker(name, seat.role, mesh, seat.pool)
        hardware = None if seat.pool.costs else fleet.hardware_of(seat.pool)
        card = WorkerCard(
            name,
            worker.boot_id,
            seat.role,
            f"{name}:1",
            instance.layout,
            self._model,
            seat.place,
            hardware,
            instance.layout.pp,
            worker.kept_scheme,
        )
        process = self.processes[name] = Process(worker, mesh, card)
        await worker.start()
        self.membership.register(card)
        self.membership.heartbeat(worker.boot_id, await worker.status())
        self._beat_later(process)

    async def kill(self, name: str) -> None:
        process = self.processes[name]
        if process.beating is not None:
            process.beating.cancel()
        await self.local.kill(name, lambda: self.channel.lose(name))

    def usage(self) -> tuple[WorkerUsage, ...]:
        busy: dict[str, float] = {}
        for process in (*self.former, *self.processes.values()):
            busy[process.card.name] = busy.get(process.card.name, 0.0) + process.mesh.busy_seconds
        return tuple(
            WorkerUsage(
                name,
                seat.role.value,
                seat.pool.devices,
                busy.get(name, 0.0),
                seat.pool.hardware.dollars_per_hour,
                self.channel.moved_bytes(name),
            )
            for name, seat in self.seats.items()
        )

    def _worker(self, name: str, role: WorkerRole, mesh: SimulatedExecutor, pool: Pool) -> Worker:
        fleet, names = self.fleet, self._names
        context = WorkerContext(
            name, self.clock, self.new_id, address=f"{name}:1", names=names, tiers=fleet.tiers
        )
        config = WorkerConfig(
            mode=fleet.mode, instance=pool.instance, limits=fleet.limits, prefix=fleet.prefix
        )
        fetches = names is not None and bool(fleet.routing.peer_fetch)
        return self.local.add(WorkerHost(context, role, config, fetches), mesh)

    def _policy(self) -> PlacementPolicy:
        rules = rules_of(self.fleet.routing, self.fleet.limits.timeouts)
        return replace(rules, far=self.fleet.far)

    def _host_memory(self, seat: Seat) -> HostMemory | None:
        if not self.fleet.tiers.host_bytes:
            return None
        return HostMemory(self.fleet.host_link(seat.pool), seat.pool.instance.layout.dp)

    def _between(self, worker: Worker, caller: Worker | None) -> Sequence[object]:
        return ()

    async def switch_role(
        self, name: str, role: WorkerRole, seconds: float, drain_seconds: float | None = None
    ) -> None:
        """Moves a worker to the other pool. The worker drains, is unavailable for `seconds` while
        it reshards its weights, and returns under the same name.

        Raises:
          ConfigError: The pools do not allow the change.
          UnavailableError: The worker's process ended in the meantime.
        """
        self.fleet.check_roles_change()
        if role is WorkerRole.MIXED:
            raise ConfigError(
                f"worker {name!r} cannot become a {role.value} worker: the fleet has no such pool"
            )
        process = await self._retire(name, drain_seconds)
        await self.clock.sleep(seconds)
        self._check_still_there(name, process)
        pool = self.fleet.pools[0 if role is WorkerRole.PREFILL else 1]
        self.seats[name] = replace(self.seats[name], role=role, pool=pool)
        self.counters.add("roles_switched")
        await self.start_worker(name)

    async def add_worker(self, role: WorkerRole) -> str:
        """Starts one more worker of a role, on a host of its own, and returns its name."""
        names = (f"{role.value}-{number}" for number in itertools.count())
        name = next(name for name in names if name not in self.processes)
        pool = next(seat.pool for seat in self.seats.values() if seat.role is role)
        self.seats[name] = Seat(name, role, pool, f"rack0/{name}/{name}/0.0")
        await self.start_worker(name)
        return name

    async def remove_worker(self, name: str, drain_seconds: float | None = None) -> None:
        """Stops a worker for good. It drains first."""
        self.former.append(await self._retire(name, drain_seconds))
        del self.processes[name]

    async def _retire(self, name: str, drain_seconds: float | None) -> Process:
        process = self.processes[name]
        await process.worker.drain(drain_seconds)
        self._check_still_there(name, process)
        if process.beating is not None:
            process.beating.cancel()
        self.membership.deregister(name, process.worker.boot_id)
        await process.worker.stop()
        return process

    def _check_still_there(self, name: str, process: Process) -> None:
        if self.processes[name] is not process or self.local.is_dead(process.worker):
            raise UnavailableError(
                f"worker {name!r} ended while it changed its role; a restart keeps the old role"
            )

    def _beat_later(self, process: Process) -> None:
        process.beating = asyncio.get_running_loop().call_later(
            self.fleet.heartbeat_seconds, self._beat, process
        )

    def _beat(self, process: Process) -> None:
        try:
            status = process.worker.status_now()
        except UnavailableError:
            return  # its mesh failed: no further heartbeats
        self.membership.heartbeat(process.worker.boot_id, status)
        if self._names is not None:
            self._send_kept_news(process)
        self._beat_later(process)

    def _send_kept_news(self, process: Process) -> None:
        for _ in range(NEWS_A_BEAT):
            news = process.worker.kept_news(process.mark)
            if news is None:
                return
            process.mark = self.membership.kept(process.worker.boot_id, news)

    def _named(self, secret: bytes, model: str, grain_tokens: int) -> PromptNames:
        assert self._names is not None, "block names exist only with a prefix cache"
        return self._names

    async def _sweep(self) -> None:
        while True:
            await self.clock.sleep(SWEEP_SECONDS)
            self.membership.sweep()


def _seats(fleet: Fleet) -> Iterator[Seat]:
    counts = {role: itertools.count() for role in WorkerRole}
    for number, (pool, places) in enumerate(zip(fleet.pools, fleet.places(), strict=True)):
        role = WorkerRole.DECODE if number == 1 else WorkerRole.PREFILL
        if fleet.mode is not Mode.DISAGGREGATED:
            role = WorkerRole.MIXED
        for place in places:
            yield Seat(f"{role.value}-{next(counts[role])}", role, pool, place)


def _names(fleet: Fleet, book: PromptBook) -> PromptNames | None:
    prefix = fleet.prefix
    if not prefix.reuse:
        return None
    model = f"{fleet.geometry.name} {fleet.kept_dtype}"
    return PromptNames(SECRET, model, prefix.grain_tokens, prefix.grid_tokens, book=book)


def _no_text(request: Request) -> _NoText:
    return _NO_TEXT


def _model_card(fleet: Fleet) -> ModelCard:
    geometry, dtype = fleet.geometry, fleet.dtype
    kept = geometry.kv_bytes_per_token(fleet.kept_dtype)
    return ModelCard(
        geometry.name,
        "simulated",
        geometry.vocabulary,
        fleet.context,
        dtype,
        kept,
        geometry=geometry,
    )

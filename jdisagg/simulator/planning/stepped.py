"""Runs a fast, simplified simulation of a workload on a whole fleet (*stepping* the cost model), to
rank candidates before they are simulated with live code.

Queues, chunks, spans, KV room, hand-off and the duration of each step are modelled as in the
simulator, but with plain counters. A request is placed on the prefill instance with the fewest
queued tokens and on the decode instance with the fewest sequences. For each request, stepping takes
tens of microseconds, and the simulator a millisecond."""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jdisagg.config import Mode
from jdisagg.costs.hardware import Link
from jdisagg.costs.speeds import exposed_seconds
from jdisagg.router.placement import most_queued_seconds
from jdisagg.simulator.fleet import Fleet, Pool
from jdisagg.simulator.planning.candidates import Candidate, Site, handoff_path
from jdisagg.simulator.planning.stepped_instances import Chunk, Instance, SteppedRequest
from jdisagg.simulator.planning.trials import Loss, Lost, TrialRun
from jdisagg.simulator.report import RequestOutcome, WorkerUsage
from jdisagg.simulator.step_costs import StepCosts
from jdisagg.simulator.workloads import Arrival, names_blocks


@dataclass(frozen=True, slots=True)
class HandoffLinks:
    """The links over which prefill instances send KV to decode instances.

    Attributes:
      lanes: Number of links over which one prompt's KV is sent in parallel.
      links: Number of links of one prefill or decode instance, whichever has fewer.
    """

    link: Link
    lanes: int
    links: int


class SteppedRunner:
    def __init__(self, site: Site, fleet_of: Callable[[Candidate], Fleet]) -> None:
        self._site, self._fleet_of = site, fleet_of
        self._costs: dict[object, StepCosts] = {}
        self._last: tuple[Candidate, Fleet, HandoffLinks | None] | None = None

    def __call__(
        self, candidate: Candidate, arrivals: Sequence[Arrival], lost: Lost | None = None
    ) -> TrialRun:
        if self._last is None or self._last[0] != candidate:
            self._last = candidate, self._fleet_of(candidate), self._handoff(candidate)
        _, fleet, handoff = self._last
        prefill = self._costs_of(fleet, fleet.prefill) if fleet.prefill else None
        run = SteppedRun(fleet, handoff, prefill, self._costs_of(fleet, fleet.decode))
        return run.run(arrivals, lost)

    def _handoff(self, candidate: Candidate) -> HandoffLinks | None:
        if candidate.prefill is None:
            return None
        link, lanes = handoff_path(self._site, candidate)
        return HandoffLinks(link, lanes, min(candidate.prefill.devices, candidate.decode.devices))

    def _costs_of(self, fleet: Fleet, pool: Pool) -> StepCosts:
        key = pool.hardware.name, pool.instance.layout
        if key not in self._costs:
            self._costs[key] = fleet.costs_of(pool)
        return self._costs[key]


class PrefixCache:
    """The prefix cache of one instance, as the names of the cached prompt blocks. The least
    recently used block is evicted first."""

    def __init__(self, block_tokens: int, room_tokens: int) -> None:
        self._block, self._most = block_tokens, max(1, room_tokens // block_tokens)
        self._kept: OrderedDict[int, None] = OrderedDict()

    def cached_tokens(self, arrival: Arrival) -> int:
        """Returns the number of leading prompt tokens that are cached. The result is at most the
        prompt's length minus one, because at least one token must be computed."""
        known = itertools.takewhile(self._kept.__contains__, arrival.block_hashes)
        return min(sum(1 for _ in known) * self._block, arrival.prompt_tokens - 1)

    def add(self, arrival: Arrival) -> None:
        for name in arrival.block_hashes:
            self._kept[name] = None
            self._kept.move_to_end(name)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)


class SteppedRun:
    def __init__(
        self,
        fleet: Fleet,
        handoff: HandoffLinks | None,
        prefill: StepCosts | None,
        decode: StepCosts,
    ) -> None:
        self._fleet, self._handoff = fleet, handoff
        self._now, self._front = 0.0, fleet.software.engine.front_seconds
        self._decodes = self._instances(fleet.decode, decode)
        self._prefills = (
            self._instances(fleet.prefill, prefill) if fleet.prefill and prefill else []
        )
        self._first = self._prefills or self._decodes  # the instances that prefill
        self._every = [*self._prefills, *self._decodes]
        self._sent = prefill or decode
        self._out_free, self._in_free = [0.0] * len(self._first), [0.0] * len(self._decodes)
        self._waiting: deque[SteppedRequest] = deque()
        limits = fleet.limits_of(fleet.prefill or fleet.decode)
        chunk = limits.chunk_buckets[-1]
        self._ranks, self._chunk_seconds = limits.ranks, self._sent.prefill(((chunk, 0),))[1]
        self._room = limits.pages_per_rank * limits.page_size * limits.ranks  # of a prefix cache
        self._seconds_per_token = self._chunk_seconds / chunk
        self._caches: list[PrefixCache] = []
        # Ends of commands have a version, arrivals of KV a request.
        self._events: list[tuple[float, int, int, int, SteppedRequest | None]] = []
        self._numbers = itertools.count()
        self._arrivals: Sequence[Arrival] = ()
        self._outcomes: list[RequestOutcome] = []
        self._begun: Callable[[RequestOutcome], bool] | None = None
        self._stopped = False

    def _instances(self, pool: Pool, costs: StepCosts) -> list[Instance]:
        fleet, limits = self._fleet, self._fleet.limits_of(pool)
        growth = pool.instance.growth_tokens
        return [Instance(limits, costs, growth, fleet.fused) for _ in range(pool.count)]

    def run(self, arrivals: Sequence[Arrival], lost: Lost | None = None) -> TrialRun:
        self._arrivals = arrivals
        if self._fleet.prefix.reuse and names_blocks(arrivals):
            self._caches = [PrefixCache(self._fleet.block_tokens, self._room) for _ in self._first]
        self._begun = lost.begun if isinstance(lost, Loss) else None
        coming, number = len(arrivals), 0
        ended, events = self._outcomes, self._events
        while number < coming or events:
            seen = len(ended)
            if number < coming and (
                not events or arrivals[number].at_seconds + self._front <= events[0][0]
            ):
                self._now = arrivals[number].at_seconds + self._front
                self._arrive(number)
                number += 1
            else:
                self._now, _, index, version, request = heapq.heappop(events)
                if request is not None:
                    self._receive(request)
                elif self._every[index].version == version:
                    self._end_command(index)
            more = len(ended) > seen
            if lost is not None and (self._stopped or (more and any(map(lost, ended[seen:])))):
                return TrialRun(tuple(ended), tuple(self._usage()), stopped=True)
        ended.sort(key=lambda outcome: int(outcome.request_id))
        return TrialRun(tuple(ended), tuple(self._usage()))

    # ---- placement

    def _arrive(self, number: int) -> None:
        item = self._arrivals[number]
        request = SteppedRequest(number, item.at_seconds, item.prompt_tokens, item.output_tokens)
        if not self._decodes[0].batch.fits_at_all(request):
            self._close(request, "the request exceeds the KV room of a dp rank")
            return
        self._waiting.append(request)
        self._place_waiting()

    def _place_waiting(self) -> None:
        while self._waiting and self._place(self._waiting[0]):
            self._waiting.popleft()

    def _place(self, request: SteppedRequest) -> bool:
        arrival = self._arrivals[request.number]
        cached = [cache.cached_tokens(arrival) for cache in self._caches]
        work = [item.prompt_tokens for item in self._first]
        if cached:
            work = [queued - known for queued, known in zip(work, cached, strict=True)]
        if self._prefills:
            first = min(range(len(work)), key=work.__getitem__)
            if self._held(work[first], request.prompt - (cached[first] if cached else 0)):
                return False
        loads = [item.batch.load for item in self._decodes]
        if self._prefills:
            order = sorted(range(len(loads)), key=loads.__getitem__)
        else:
            order = sorted(range(len(loads)), key=lambda one: (work[one], loads[one]))
        decode = next((one for one in order if self._decodes[one].batch.reserve(request)), None)
        if decode is None:
            return False
        if not self._prefills:
            first = decode
        request.cached = cached[first] if cached else 0
        request.left = request.prompt - request.cached
        request.decode = decode
        if self._caches:
            self._caches[first].add(arrival)
        queues = self._first[first].queues
        queues.add(request, queues.shortest() if self._prefills else request.rank)
        self._go_on(first)
        return True

    def _held(self, queued_tokens: int, prompt_tokens: int) -> bool:
        each = self._seconds_per_token
        hold = self._fleet.routing.hold_seconds
        most = most_queued_seconds(hold, self._ranks, self._chunk_seconds, prompt_tokens * each)
        return queued_tokens * each / self._ranks > most

    # ---- commands

    def _go_on(self, index: int) -> None:
        instance = self._every[index]
        if instance.ends_at is not None:
            if index < len(self._prefills):
                instance.issue_ahead()
            if not instance.interrupt(self._now):
                return
        elif not instance.begin(self._now):
            return
        elif instance.chunk is not None and self._handoff is not None:
            self._send(self._handoff, index, instance.chunk, instance.sampled_at)
            instance.issue_ahead()
        assert instance.ends_at is not None
        entry = instance.ends_at, next(self._numbers), index, instance.version, None
        heapq.heappush(self._events, entry)

    def _send(self, path: HandoffLinks, index: int, chunk: Chunk, ready: float) -> None:
        overlap = self._fleet.overlap
        head_at = self._now + (ready - self._now) / overlap
        rate = path.link.bytes_per_second * path.link.efficiency
        rows = [row for rows in chunk.rows for row in rows]
        for request, (new, _) in zip(chunk.requests, rows, strict=True):
            if request.output < 2:
                continue
            size = self._sent.wire_bytes(new + (0 if request.received else request.cached))
            start = max(head_at, self._out_free[index], self._in_free[request.decode])
            free_at = start + size / (rate * path.links)
            self._out_free[index] = self._in_free[request.decode] = free_at
            alone = size / (rate * path.lanes)
            exposed = exposed_seconds(alone, ready - self._now, overlap, start - head_at)
            request.received = max(request.received, ready + exposed + path.link.latency_seconds)

    def _receive(self, request: SteppedRequest) -> None:
        if request.output < 2:
            self._finish(request)
            self._place_waiting()
            return
        self._decodes[request.decode].receive(request)
        self._go_on(len(self._prefills) + request.decode)

    def _end_command(self, index: int) -> None:
        instance = self._every[index]
        done = instance.end()
        for request in done.first:
            request.first = first = self._now + done.later
            if self._begun is not None:
                number, arrival = str(request.number), request.arrival
                so_far = RequestOutcome(number, arrival, first, request.prompt, 1, first)
                self._stopped = self._begun(so_far) or self._stopped
            if request.output < 2 and not done.later:
                self._finish(request)
            elif self._handoff is None:
                instance.joining.append(request)
            else:
                at = max(request.first, request.received)
                heapq.heappush(self._events, (at, next(self._numbers), index, 0, request))
        for request in done.last:
            self._finish(request)
        if self._waiting:
            self._place_waiting()
        if instance.ends_at is None:
            self._go_on(index)

    def _finish(self, request: SteppedRequest) -> None:
        self._decodes[request.decode].batch.release(request)
        self._close(request)

    def _close(self, request: SteppedRequest, refused: str = "") -> None:
        self._outcomes.append(
            RequestOutcome(
                str(request.number),
                request.arrival,
                self._now,
                request.prompt,
                0 if refused else request.output,
                None if refused else request.first,
                end="failed" if refused else "finished",
                reason=refused,
                cached_tokens=request.cached,
            )
        )

    def _usage(self) -> list[WorkerUsage]:
        fleet, usage = self._fleet, []
        one_pool = fleet.mode is not Mode.DISAGGREGATED
        pools = (
            (self._prefills, fleet.prefill, "prefill"),
            (self._decodes, fleet.decode, "decode"),
        )
        for instances, pool, role in pools:
            name = "mixed" if one_pool else role
            for index, item in enumerate(instances):
                assert pool is not None
                used = item.busy_seconds
                usage.append(WorkerUsage(f"{name}-{index}", name, pool.devices, used))
        return usage

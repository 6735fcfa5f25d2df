"""Simulates a closed loop of users on one deployment with the cost model, for comparison with
benchmarks that state a concurrency.

`users` requests are sent at once, and each user sends the next request when the previous answer
ends. The first requests form a burst; later requests share the deployment with others. A run has
`rounds` requests per user, and the returned means are over all of them. Lengths are spread evenly
between the fraction `shortest` of the nominal lengths and the nominal lengths, so that users do not
stay in step.

Batching follows the engine. "mixed": a step contains all decoding sequences and, within
`chunk_tokens`, chunks of prompts. "prefill_first": while a prompt waits and has room, steps contain
only prompts. With two pools, prompts wait for one of the prefill ranks, which prefill up to
`chunk_tokens` tokens together, and then join the decode batch. A prompt starts when there is room
for it and for a part of its answer. If the batch exceeds the room, its youngest sequence is
preempted, waits before all others, and is recomputed.

One rank of one instance is simulated, and the other ranks are assumed to be equally full. Host
times outside the steps and the network take no time. Pure."""

import heapq
import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Literal

from jdisagg.costs.cost_model import CostModel

Order = Literal["mixed", "prefill_first"]
GOLDEN = 0.6180339887498949  # its multiples, modulo 1, are spread evenly
LEAST_REQUESTS = 24
LATER_ROUNDS = 2  # simulated of those after the burst: they are alike


@dataclass(frozen=True, slots=True)
class Load:
    """Load of one dp rank: number of users, nominal lengths, the shortest request's fraction of
    these lengths, and number of requests per user."""

    users: int
    prompt: int
    output: int
    shortest: float = 1.0
    rounds: int = 10


@dataclass(frozen=True, slots=True)
class Batching:
    """How an engine forms its steps. `kv_tokens`: KV capacity of one rank, in tokens.
    `front_seconds`: seconds from the client's sending to the queue. `ahead`: number of steps issued
    before the step that a new request can join, without the running step. `reserved`: fraction of
    the answer for which a prompt needs room before it starts. `most`: largest number of concurrent
    requests; 0 for as many as have room. `poll`: number of decode steps between two checks for new
    requests while no prompt is computed; 0 for every step."""

    order: Order
    chunk_tokens: int
    kv_tokens: int
    front_seconds: float = 0.0
    ahead: int = 0
    reserved: float = 1.0
    most: int = 0
    poll: int = 0


@dataclass(slots=True)
class Request:
    number: int
    prompt: int
    output: int
    sent: float
    left: int  # of the prompt, not computed yet
    seen: float = 0.0  # when it is in the queue
    turn: int = 0  # the first step that may carry it
    first: float = -1.0
    answer: int = 0  # all of it, where a part was computed before
    begun: bool = False


@dataclass(frozen=True, slots=True)
class Times:
    """Mean times in seconds."""

    ttft: float
    tpot: float


@dataclass(slots=True)
class _Record:
    load: Load
    measured: int
    ttft: list[float] = field(default_factory=lambda: [0.0, 0.0])
    tpot: list[float] = field(default_factory=lambda: [0.0, 0.0])
    counts: list[int] = field(default_factory=lambda: [0, 0])
    done: int = 0

    def take(self, request: Request, now: float) -> None:
        if request.number >= self.measured:
            return
        later = request.number >= self.load.users
        self.done += 1
        self.counts[later] += 1
        self.ttft[later] += request.first - request.sent
        self.tpot[later] += (now - request.first) / max(1, request.answer - 1)

    def means(self) -> Times:
        def mean(sums: list[float]) -> float:
            after = sums[1] / self.counts[1]
            if not self.counts[0]:
                return after
            burst = sums[0] / self.counts[0]
            return (burst + (self.load.rounds - 1) * after) / self.load.rounds

        return Times(mean(self.ttft), mean(self.tpot))


class Loop:
    """The requests in progress. Decoding requests are in a heap of (step number at which the
    request ends, request number), because each step makes one token of each."""

    def __init__(self, load: Load, batching: Batching) -> None:
        self.load, self.now, self.steps, self.sent = load, 0.0, 0, 0
        self.batching, self.turn = batching, 0
        later = max(LATER_ROUNDS * load.users, LEAST_REQUESTS)
        self.record = _Record(load, load.users + later)
        self.waiting: deque[Request] = deque()
        self.running: list[tuple[int, int, Request]] = []
        self.context, self.prefilling, self.held, self.begun = 0, 0, 0.0, 0
        self.unpolled, self.looked = 0, math.inf
        for _ in range(load.users):
            self.send()

    def send(self) -> None:
        drawn = (self.sent * GOLDEN) % 1.0
        other = (self.sent * GOLDEN * GOLDEN) % 1.0
        short = self.load.shortest
        prompt = max(1, round(self.load.prompt * (short + (1 - short) * drawn)))
        output = max(2, round(self.load.output * (short + (1 - short) * other)))
        seen = self.now + self.batching.front_seconds
        fresh = Request(self.sent, prompt, output, self.now, prompt, seen, answer=output)
        self.waiting.append(fresh)
        self.sent += 1

    def arrived(self, request: Request) -> bool:
        """Returns whether a step that begins now may include the request, which must have arrived
        before the steps issued ahead."""
        if request.seen > min(self.now, self.looked):
            return False
        if not request.turn:
            request.turn = self.turn + (self.batching.ahead if self.running else 0) + 1
        return self.turn + 1 >= request.turn

    def fits(self, request: Request, kv_tokens: int) -> bool:
        """Returns whether the request may start. At least one request may always run."""
        if request.begun:
            return True
        if not self.arrived(request) or 0 < self.batching.most <= self.begun:
            return False
        full = self.context + self.prefilling + request.prompt > kv_tokens
        return self.held < 1 or not (full or self.held + self.needs(request) > kv_tokens)

    def needs(self, request: Request) -> float:
        return request.prompt + self.batching.reserved * request.output

    def steps_until_seen(self, step_seconds: float) -> int | None:
        """Returns the number of steps until the next queued request may join. None if it may join
        now or if none is queued."""
        if not self.waiting or self.arrived(self.waiting[0]):
            return None
        head = self.waiting[0]
        if head.turn:
            return head.turn - self.turn - 1
        steps = int(max(0.0, head.seen - self.now) / step_seconds) + 1
        if every := self.batching.poll:
            left = every - self.unpolled
            steps = left + every * max(0, -(-(steps - left) // every))
        return steps

    def look(self) -> None:
        """Checks for new requests, if a check is due."""
        if self.batching.poll and (not self.running or self.unpolled >= self.batching.poll):
            self.looked, self.unpolled = self.now, 0

    def begin(self, request: Request) -> None:
        self.held += self.needs(request)
        self.prefilling += request.prompt
        self.begun, request.begun = self.begun + 1, True

    def join(self, request: Request, first: float) -> None:
        """Adds a request whose prompt was done, and whose first token arrived, at time `first`."""
        if request.first < 0:
            request.first = first
        self.context += request.prompt + 1
        self.prefilling -= request.prompt
        heapq.heappush(self.running, (self.steps + request.output - 1, request.number, request))

    def advance(self, steps: int, seconds: float) -> None:
        """Runs `steps` decode steps. The user of each request that ends sends the next request."""
        self.now, self.steps, self.turn = self.now + seconds, self.steps + steps, self.turn + steps
        if every := self.batching.poll:  # looks on the way found nobody; one may be due now
            self.unpolled = (self.unpolled + steps) % every or every
        self.context += steps * len(self.running)
        while self.running and self.running[0][0] <= self.steps:
            request = heapq.heappop(self.running)[2]
            self.context -= request.prompt + request.output
            self.held -= self.needs(request)
            self.begun -= 1
            self.record.take(request, self.now)
            self.send()

    def make_room(self) -> None:
        """Preempts the youngest requests until one more step fits."""
        while len(self.running) > 1 and self.context + len(self.running) > self.batching.kv_tokens:
            youngest = max(self.running, key=lambda entry: entry[:2])
            self.running.remove(youngest)
            heapq.heapify(self.running)
            ends, _, request = youngest
            self.held -= self.needs(request)
            left = ends - self.steps  # steps that it lacks, the next of which computes it anew
            made = request.output - left
            self.context -= request.prompt + made
            request.prompt, request.output = request.prompt + made, left
            request.left, request.begun = request.prompt, False
            self.begun -= 1
            self.waiting.appendleft(request)

    def chunk(self, budget: int, kv_tokens: int) -> tuple[list[tuple[int, int]], list[Request]]:
        """Returns rows (new, cached tokens) of waiting prompts, within `budget` tokens and the
        room, and the requests whose prompts end in the chunk. Removes these requests from the
        queue."""
        rows: list[tuple[int, int]] = []
        ended: list[Request] = []
        while self.waiting and budget > 0 and self.fits(self.waiting[0], kv_tokens):
            request = self.waiting[0]
            if not request.begun:
                self.begin(request)
            new = min(budget, request.left)
            rows.append((new, request.prompt - request.left))
            budget, request.left = budget - new, request.left - new
            if not request.left:
                ended.append(self.waiting.popleft())
        return rows, ended


def one_pool(costs: CostModel, load: Load, batching: Batching) -> Times:
    """Returns mean TTFT (from sending to the first token) and mean TPOT, in seconds, of an instance
    that prefills and decodes.

    Args:
        costs: Cost model of one instance.
        load: Load of one of its dp ranks.
        batching: Batching of the engine."""
    return stepped(costs, Loop(load, batching))


def stepped(costs: CostModel, loop: Loop) -> Times:
    """Returns the means of all requests of `loop` on one instance that prefills and decodes."""
    batching = loop.batching
    while loop.record.done < loop.record.measured:
        loop.make_room()
        loop.look()
        running = len(loop.running)
        mixed = batching.order == "mixed"
        budget = batching.chunk_tokens - (running if mixed else 0)
        rows, ended = loop.chunk(budget, batching.kv_tokens)
        if not rows:
            if running:
                _decode(costs, loop, loop.running[0][0] - loop.steps)
            else:
                loop.now = max(loop.now, loop.waiting[0].seen)
            continue
        context = loop.context if mixed else 0
        seconds = costs.mixed_of(
            sum(new for new, _ in rows),
            sum(costs.pairs(new, cached) for new, cached in rows),
            float(sum(new + cached for new, cached in rows)),
            len(rows),
            running if mixed else 0,
            float(context),
        ).seconds
        loop.advance(1 if mixed and running else 0, seconds)
        loop.turn += not (mixed and running)
        loop.unpolled = batching.poll
        for request in ended:
            loop.join(request, loop.now)
    return loop.record.means()


def two_pools(
    prefill: CostModel, decode: CostModel, load: Load, batching: Batching, servers: int, ranks: int
) -> Times:
    """Returns the means of prefill and decode instances. `load`: load of the whole deployment.
    `servers`, `ranks`: number of prefill ranks and of decode ranks of all instances.
    `batching.kv_tokens`: capacity of one decode rank."""
    loop = Loop(
        load, replace(batching, ahead=0, poll=0)
    )  # prefill ranks have no steps issued ahead
    free = [0.0] * servers  # when each prefill rank is
    ready: list[tuple[float, int, Request]] = []
    room = batching.kv_tokens * ranks
    while loop.record.done < loop.record.measured:
        while ready and ready[0][0] <= loop.now:
            done, _, request = heapq.heappop(ready)
            loop.join(request, done)
        while loop.waiting and free[0] <= loop.now and loop.waiting[0].seen <= loop.now:
            rows, ended = loop.chunk(batching.chunk_tokens, room)
            if not rows:
                break
            done = loop.now + prefill.prefill(rows).seconds
            heapq.heapreplace(free, done)
            for request in ended:
                heapq.heappush(ready, (done, request.number, request))
        events = [ready[0][0]] if ready else []
        if loop.waiting:
            due = max(free[0], loop.waiting[0].seen)
            events += [due] if due > loop.now else []
        if loop.running:
            _decode(
                decode,
                loop,
                loop.running[0][0] - loop.steps,
                ranks,
                min(events) - loop.now if events else None,
            )
        elif events:
            loop.now = max(loop.now, min(events))
    return loop.record.means()


def _decode(
    costs: CostModel, loop: Loop, steps: int, ranks: int = 1, within: float | None = None
) -> None:
    """Runs up to `steps` decode steps, fewer if `within` seconds end earlier, but at least one. The
    time of a step grows with its contexts from the first to the last step."""
    sequences = -(-len(loop.running) // ranks)
    first = costs.decode_of(sequences, loop.context / ranks).seconds
    if within is not None:
        steps = min(steps, max(1, int(within / first) + 1))
    if ranks == 1 and (seen := loop.steps_until_seen(first)) is not None:
        steps = min(steps, max(1, seen))
    if ranks == 1:
        steps = min(steps, max(1, (loop.batching.kv_tokens - loop.context) // len(loop.running)))
    if steps > 1:
        grown = (loop.context + len(loop.running) * (steps - 1)) / ranks
        last = costs.decode_of(sequences, grown).seconds
    else:
        last = first
    loop.advance(steps, steps * (first + last) / 2)

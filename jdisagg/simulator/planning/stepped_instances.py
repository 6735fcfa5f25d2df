"""Instances of the stepped fleet (`stepped.py`): queues, batches and KV room of one instance, and
the seconds of its next command.

An instance runs one command at a time: a prefill chunk, a span of decode steps, or a chunk and a
step together (`fused`). The dp rank with the most work determines the duration. A span ends when
its first sequence ends, or two steps after a request waits to join, as in the live loop."""

import functools
import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.prefill_batches import gathers
from jdisagg.scheduler.turn import Action, StepSnapshot, next_step
from jdisagg.simulator.executor import SimulatedExecutor
from jdisagg.simulator.step_costs import Pace, StepCosts


@dataclass(slots=True)
class SteppedRequest:
    """A request in progress.

    Attributes:
      left: Number of prompt tokens that are in no chunk yet.
      decode: Number of its decode instance.
    """

    number: int
    arrival: float
    prompt: int
    output: int
    cached: int = 0
    left: int = 0
    kept: int = 0
    first: float = -1.0
    received: float = 0.0
    rank: int = 0
    decode: int = 0

    @property
    def begun(self) -> bool:
        return self.left < self.prompt - self.cached


@dataclass(slots=True)
class Chunk:
    """A prefill chunk of one instance.

    Attributes:
        rows: For each dp rank, its rows as (number of new tokens, number of tokens before them).
        ended: Requests whose prompts end in the chunk.
    """

    rows: list[list[tuple[int, int]]]
    requests: list[SteppedRequest]
    ended: list[SteppedRequest]
    tokens: list[int]


class PromptQueues:
    def __init__(self, limits: MeshLimits, chunk_tokens: int) -> None:
        self._queues: list[deque[SteppedRequest]] = [deque() for _ in range(limits.ranks)]
        self._tokens = [0] * limits.ranks
        self._chunk, self._rows = chunk_tokens, limits.rows_per_chunk
        self.count = self.tokens = 0

    def shortest(self) -> int:
        return min(range(len(self._tokens)), key=self._tokens.__getitem__)

    def add(self, request: SteppedRequest, rank: int) -> None:
        self._queues[rank].append(request)
        self._tokens[rank] += request.left
        self.tokens += request.left
        self.count += 1

    @property
    def all_ranks(self) -> bool:
        return all(self._queues)

    @property
    def gathers(self) -> bool:
        return gathers(self._queues)

    def take(self) -> Chunk:
        """On each rank it has the oldest prompts, up to the chunk's number of tokens. The last
        prompt is split if it does not fit."""
        chunk = Chunk([], [], [], [])
        for rank, queue in enumerate(self._queues):
            rows: list[tuple[int, int]] = []
            room = self._chunk
            while queue and room and len(rows) < self._rows:
                request = queue[0]
                new = min(room, request.left)
                rows.append((new, request.prompt - request.left))
                chunk.requests.append(request)
                request.left -= new
                room -= new
                if not request.left:
                    chunk.ended.append(queue.popleft())
                    self.count -= 1
            chunk.rows.append(rows)
            chunk.tokens.append(self._chunk - room)
            self._tokens[rank] -= self._chunk - room
        self.tokens -= sum(chunk.tokens)
        return chunk


class DecodeBatch:
    """The decoding sequences of one instance, and the KV room of its dp ranks.

    Each sequence gets one token per step, so it ends after a known number of the instance's
    steps."""

    def __init__(self, limits: MeshLimits, growth_tokens: int) -> None:
        ranks = limits.ranks
        self.room = limits.pages_per_rank * limits.page_size
        self.slots = limits.slots_per_rank
        self._growth = growth_tokens
        self.counts, self.contexts = [0] * ranks, [0] * ranks
        self.held, self.reserved = [0] * ranks, [0] * ranks
        self.steps = 0
        self._ends: list[tuple[int, int, SteppedRequest]] = []

    @property
    def running(self) -> int:
        return len(self._ends)

    @property
    def load(self) -> int:
        return sum(self.reserved)

    def fits_at_all(self, request: SteppedRequest) -> bool:
        return request.prompt + request.output - 1 <= self.room

    def reserve(self, request: SteppedRequest) -> bool:
        need = request.prompt + min(request.output, self._growth)
        ranks = [
            rank
            for rank, count in enumerate(self.reserved)
            if count < self.slots and (not count or self._taken(rank) + need <= self.room)
        ]
        if not ranks:
            return False
        rank = min(ranks, key=lambda one: (self.reserved[one], self.held[one]))
        request.rank, request.kept = rank, need
        self.held[rank] += need
        self.reserved[rank] += 1
        return True

    def _taken(self, rank: int) -> int:
        return max(self.held[rank], self.contexts[rank] + self.counts[rank])

    def release(self, request: SteppedRequest) -> None:
        self.held[request.rank] -= request.kept
        self.reserved[request.rank] -= 1

    def join(self, request: SteppedRequest) -> None:
        self.counts[request.rank] += 1
        self.contexts[request.rank] += request.prompt + 1
        entry = (self.steps + request.output - 1, request.number, request)
        heapq.heappush(self._ends, entry)

    def until_first_end(self) -> int:
        return self._ends[0][0] - self.steps

    def advance(self, steps: int) -> list[SteppedRequest]:
        """Runs `steps` steps. Removes and returns the sequences that end. Their room stays reserved
        until `release`."""
        self.steps += steps
        for rank, count in enumerate(self.counts):
            self.contexts[rank] += steps * count
        ended: list[SteppedRequest] = []
        while self._ends and self._ends[0][0] <= self.steps:
            request = heapq.heappop(self._ends)[2]
            self.counts[request.rank] -= 1
            self.contexts[request.rank] -= request.prompt + request.output
            ended.append(request)
        return ended


@dataclass(slots=True)
class SteppedSpan:
    start: float
    pace: Pace
    steps: int


@dataclass(slots=True)
class CommandEnd:
    """The result of a command: the requests that got their first token, and those that got their
    last token. `later`: seconds until the first tokens leave the last pipeline stage."""

    first: Sequence[SteppedRequest] = ()
    last: Sequence[SteppedRequest] = ()
    later: float = 0.0


class Instance:
    """One instance that prefills, decodes or does both. If it does both, steps and chunks
    alternate, or whole prompts go first (`limits.pack_tokens`).

    Attributes:
      joining: Sequences whose KV has arrived and that join after the running command.
      ends_at: End of the running command, None without one. A chunk ends when it leaves the first
        pipeline stage.
    """

    def __init__(
        self, limits: MeshLimits, costs: StepCosts, growth_tokens: int, fused: bool
    ) -> None:
        self.queues = PromptQueues(limits, limits.pack_tokens or limits.chunk_buckets[-1])
        self.batch = DecodeBatch(limits, growth_tokens)
        self.joining: list[SteppedRequest] = []
        self.ends_at: float | None = None
        self.sampled_at = 0.0
        self.busy_seconds = 0.0
        self.version = 0
        self.chunk: Chunk | None = None
        self._costs, self._fused = costs, fused
        self._alternates = limits.pack_tokens is None
        self._stages = limits.stages
        self._span: SteppedSpan | None = None
        self._prefilled_last = False
        self._most_waited, self._waited = limits.gather_steps, 0
        self._delay = 0.0
        self._issued: Chunk | None = None
        self._in_chunks = 0  # tokens of the running chunk and of the one issued ahead

    @property
    def prompt_tokens(self) -> int:
        return self.queues.tokens + self._in_chunks

    def receive(self, request: SteppedRequest) -> None:
        """Writing its KV to pages delays the next steps."""
        self.joining.append(request)
        self._delay += self._costs.insert(request.prompt)

    def begin(self, now: float) -> bool:
        for request in self.joining:
            self.batch.join(request)
        self.joining.clear()
        prompts, running = bool(self.queues.count or self._issued), bool(self.batch.running)
        if not prompts and not running:
            return False
        turn = self._alternates and self._prefilled_last
        if _begins_chunk(prompts, prompts and self._gathering(), turn, running, self._fused):
            self._begin_chunk(now)
        else:
            self._begin_span(now)
        return True

    def _gathering(self) -> bool:
        waits = self._waited < self._most_waited and self.queues.count
        return bool(waits) and all(self.batch.counts) and self.queues.gathers

    def _begin_chunk(self, now: float) -> None:
        self._waited = 0
        self.chunk = chunk = self._issued or self._take()
        self._issued = None
        if self._fused and self.batch.running:
            seconds = self._mixed_seconds(chunk)
            interval = seconds
            self._span = SteppedSpan(now, Pace(seconds), 1)
        else:
            fullest = _fullest(chunk)
            seconds, interval = max(self._costs.prefill(chunk.rows[rank]) for rank in fullest)
            self._prefilled_last = not self._fused
        self.sampled_at = now + seconds
        self._ends(now, now + interval)

    def _mixed_seconds(self, chunk: Chunk) -> float:
        counts, contexts = self.batch.counts, self.batch.contexts
        tokens = [new + count for new, count in zip(chunk.tokens, counts, strict=True)]
        every = sum(tokens)
        return max(
            self._costs.mixed(chunk.rows[rank], counts[rank], contexts[rank], every - tokens[rank])
            for rank in _fullest(chunk)
        )

    def _begin_span(self, now: float) -> None:
        batch, stages = self.batch, self._stages
        prompts = self.queues.count
        self._waited += 1 if prompts else 0
        steps = 1 if prompts else batch.until_first_end()
        count, context = -(-max(batch.counts) // stages), max(batch.contexts) / stages
        pace = self._costs.decode(count, context, steps)
        start, self._delay = now + self._delay, 0.0
        self._span = SteppedSpan(start, pace, steps)
        self._prefilled_last = False
        self._ends(now, start + pace.seconds(steps))

    def issue_ahead(self) -> None:
        """Fixes the content of the next chunk while the current chunk runs, as live prefill workers
        do. Does so only if every dp rank has a prompt. Prompts that arrive later cannot join this
        chunk."""
        if self.chunk is not None and self._issued is None and self.queues.all_ranks:
            self._issued = self._take()

    def _take(self) -> Chunk:
        chunk = self.queues.take()
        self._in_chunks += sum(chunk.tokens)
        return chunk

    def interrupt(self, now: float) -> bool:
        span = self._span
        if span is None or self.chunk is not None or self.ends_at is None:
            return False
        steps = span.pace.boundary(now - span.start, SimulatedExecutor.run_ahead)
        if steps >= span.steps:
            return False
        span.steps = steps
        end = span.start + span.pace.seconds(steps)
        self.busy_seconds -= self.ends_at - end
        self.ends_at = end
        self.version += 1
        return True

    def _ends(self, now: float, at: float) -> None:
        self.ends_at = at
        self.busy_seconds += at - now
        self.version += 1

    def end(self) -> CommandEnd:
        ended_at, self.ends_at = self.ends_at, None
        done = CommandEnd()
        if self._span is not None:
            done.last = self.batch.advance(self._span.steps)
            self._span = None
        if self.chunk is not None:
            assert ended_at is not None
            done.first, done.later = self.chunk.ended, self.sampled_at - ended_at
            self._in_chunks -= sum(self.chunk.tokens)
            self.chunk = None
        return done


@functools.cache
def _begins_chunk(
    prompts: bool, gathering: bool, steps_turn: bool, running: bool, mixes: bool
) -> bool:
    """Asks the live policy whether the mesh takes a chunk next, alone or with a step."""
    decision = next_step(
        StepSnapshot(
            interruptible=True,
            prompts_queued=prompts,
            gathering=gathering,
            steps_turn=steps_turn,
            decode_runnable=running,
            mixes=mixes,
            step_seconds=1.0,
            mixed_seconds=((1, 1.0),),  # every chunk has the size that is planned
        )
    )
    return decision.action in (Action.PREFILL, Action.MIXED)


def _fullest(chunk: Chunk) -> set[int]:
    rows = chunk.rows
    if len(rows) == 1:
        return {0}
    filled = [rank for rank, of_rank in enumerate(rows) if of_rank]
    if len(filled) == 1:
        return set(filled)
    tokens = max(filled, key=chunk.tokens.__getitem__)
    pairs = max(filled, key=lambda rank: sum([new * (new + 2 * old) for new, old in rows[rank]]))
    return {tokens, pairs}

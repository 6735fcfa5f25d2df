"""A simulated mesh: an `Executor` (scheduler/executor.py) whose commands take the seconds that a
cost model estimates.

Commands run one after the other, as on a device. A `DecodeSteps` command of k steps, called a span,
is one event.

Must not depend on requests, pages or schedulers. Invariant: all commands except pulls end in the
order in which they were submitted."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jdisagg.errors import UnavailableError
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.messages.step_commands import (
    HOST,
    NO_TOKEN,
    BlockChecksum,
    DecodeResult,
    DecodeSteps,
    Done,
    ExtractBlock,
    ExtractResult,
    InsertBlock,
    InsertResult,
    PrefillChunk,
    PrefillResult,
    PrefillRow,
    PullBlock,
    PullResult,
    ReleaseOffers,
    SampledToken,
    StepCommand,
    StepResult,
)
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.simulator.channel import SimulatedChannel, SimulatedOffer
from jdisagg.simulator.host_memory import HostMemory
from jdisagg.simulator.step_costs import Pace, StepCosts
from jdisagg.simulator.timeline import Timeline
from jdisagg.simulator.turns import Load, largest_batch

Result = asyncio.Future[StepResult]


@dataclass(slots=True, eq=False)
class RunningSpan:
    """A running `DecodeSteps` command.

    Attributes:
        delay: Seconds that insertions of received KV, or a fused prefill chunk, add to the span.
    """

    command: DecodeSteps
    future: Result
    start: float
    pace: Pace
    steps: int
    timer: asyncio.TimerHandle | None = None
    delay: float = 0.0

    def end_of(self, steps: int) -> float:
        return self.start + self.delay + self.pace.seconds(steps)


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """How the simulated engine runs its commands.

    Attributes:
      longest_span_seconds: Cap on the duration of one span, so that a long span is not mistaken for
        a hung mesh.
    """

    stages: int = 1
    longest_span_seconds: float = 30.0


class SimulatedExecutor:
    """Simulates a mesh on a virtual clock: each command completes after the time that a cost model
    predicts. Implements `InterruptibleExecutor`."""

    # Decode commands issued before the first result is read, as the live step loop does.
    run_ahead = 1

    def __init__(
        self,
        name: str,
        limits: MeshLimits,
        costs: StepCosts,
        channel: SimulatedChannel,
        timeline: Timeline,
        engine: EngineTraits = EngineTraits(),
        host: HostMemory | None = None,
    ) -> None:
        self.name = name
        self.limits = limits
        self.card = MeshCard((limits.ranks, 1, 1), tuple(range(limits.ranks)), (0,) * limits.ranks)
        self.timeline = timeline
        self.host = host
        self.busy_seconds = 0.0
        self.steps_run = 0
        self._costs = costs
        self._channel = channel
        self._longest_span_seconds = engine.longest_span_seconds
        self._stages = engine.stages
        self._loop = asyncio.get_running_loop()
        self._free_at = 0.0
        self._prefills = False  # whether any chunk has run
        self._span: RunningSpan | None = None
        self._positions = [[0] * limits.slots_per_rank for _ in range(limits.ranks)]
        self._limit = [[0] * limits.slots_per_rank for _ in range(limits.ranks)]
        self._broken = self._hanging = False
        self._ways: dict[type, Callable[..., None]] = {
            DecodeSteps: self._decode,
            PullBlock: self._pull,
            InsertBlock: self._insert,
            PrefillChunk: self._prefill,
            ExtractBlock: self._extract,
            ReleaseOffers: self._release,
        }

    def run(self, command: StepCommand) -> Result:
        future: Result = self._loop.create_future()
        if self._broken:
            self._loop.call_soon(_fail, future)
        elif not self._hanging:
            self._ways.get(type(command), _do_nothing)(command, future)
        return future

    def interrupt(self) -> None:
        """Shortens the running span, so that a waiting command can run. The span ends after the
        running step and the steps that are already issued."""
        span = self._span
        if span is not None:
            steps = self._boundary(span)
            if steps < span.steps:
                span.steps = steps
                self._reschedule(span)

    def break_down(self) -> None:
        self._broken = True
        self._drop_span()

    def hang(self) -> None:
        self._hanging = True
        self._drop_span()

    def close(self) -> None:
        """Does nothing, because a simulated mesh holds no resources."""

    # ---- prefill

    def _prefill(self, command: PrefillChunk, future: Result) -> None:
        seconds, interval = self._prefill_seconds(command)
        start = max(self._loop.time(), self._free_at)
        self._free_at = start + interval
        self._prefills = True
        self.busy_seconds += interval
        self._offer(command.rows, start, start + seconds)
        self._loop.call_at(start + seconds, self._end_chunk, command, future, start, seconds)

    def _end_chunk(
        self, command: PrefillChunk, future: Result, start: float, seconds: float
    ) -> None:
        if not self._ends(future):
            return
        (token,) = self.timeline.add(start, Pace(seconds), 1)
        future.set_result(_sampled(command, token))

    def _offer(self, rows: Sequence[PrefillRow], begins_at: float, ready_at: float) -> None:
        for row in rows:
            for offer in row.offers:
                self._channel.offered[offer.offer_id] = SimulatedOffer(
                    self.name, offer.block_tokens, begins_at, ready_at
                )

    def _prefill_seconds(self, command: PrefillChunk) -> tuple[float, float]:
        if self.limits.ranks == 1:
            return self._costs.prefill(_sizes(command.rows))
        ranks: dict[int, list[PrefillRow]] = {}
        for row in command.rows:
            ranks.setdefault(row.rank, []).append(row)
        return max(self._costs.prefill(_sizes(rows)) for rows in ranks.values())

    # ---- decode

    def _decode(self, command: DecodeSteps, future: Result) -> None:
        assert self._span is None, "the scheduler issues a span only after the previous one ended"
        for admit in command.admits:
            self._positions[admit.rank][admit.slot] = admit.position
            self._limit[admit.rank][admit.slot] = admit.limit
        for grow in command.grows:
            self._limit[grow.rank][grow.slot] = grow.limit
        loads = [
            largest_batch(slots, positions, self._stages)
            for positions, slots in zip(self._positions, command.slots, strict=True)
        ]
        start = max(self._loop.time(), self._free_at)
        pace, steps = self._pace(command, loads, start)
        if pace.seconds(steps) > self._longest_span_seconds:
            steps = max(1, pace.steps_begun(self._longest_span_seconds))
        span = self._span = RunningSpan(command, future, start, pace, steps)
        if command.chunk is not None:
            self._fuse(span, command.chunk, loads)
        self._reschedule(span)

    def _pace(self, command: DecodeSteps, loads: Sequence[Load], start: float) -> tuple[Pace, int]:
        one = loads[0] if len(loads) == 1 else map(max, zip(*loads, strict=True))
        sequences, tokens, longest = one
        return self._costs.decode(sequences, tokens, command.steps, longest), command.steps

    def _fuse(self, span: RunningSpan, chunk: PrefillChunk, loads: Sequence[Load]) -> None:
        chunks: list[list[tuple[int, int]]] = [[] for _ in loads]
        for row, sizes in zip(chunk.rows, _sizes(chunk.rows), strict=True):
            chunks[row.rank].append(sizes)
        tokens = [
            sum(new for new, _ in rows) + sequences
            for rows, (sequences, _, _) in zip(chunks, loads, strict=True)
        ]
        seconds = max(
            self._costs.mixed(rows, sequences, held, sum(tokens) - own)
            for rows, (sequences, held, _), own in zip(chunks, loads, tokens, strict=True)
        )
        span.delay = max(0.0, seconds - span.pace.first)

    def _reschedule(self, span: RunningSpan) -> None:
        if span.timer is not None:
            span.timer.cancel()
        self._free_at = span.end_of(span.steps)
        span.timer = self._loop.call_at(self._free_at, self._end_span, span)

    def _boundary(self, span: RunningSpan) -> int:
        ran = self._loop.time() - span.start - span.delay
        return min(span.steps, span.pace.boundary(ran, self.run_ahead))

    def _end_span(self, span: RunningSpan) -> None:
        self._span = span.timer = None
        steps, command = span.steps, span.command
        self.busy_seconds += self._free_at - span.start
        self.steps_run += steps
        made = self.timeline.add(span.start + span.delay, span.pace, steps)
        tokens: list[tuple[tuple[int, ...], ...]] = []
        for positions, limits, slots in zip(
            self._positions, self._limit, command.slots, strict=True
        ):
            rows = [made] * len(slots)
            for row, slot in enumerate(slots):
                position = positions[slot] = positions[slot] + steps
                if position > limits[slot]:
                    over = position - limits[slot]
                    rows[row] = made[: steps - over] + (NO_TOKEN,) * over
                    positions[slot] = limits[slot]
            tokens.append(tuple(rows))
        chunk = _sampled(command.chunk, made[0]) if command.chunk is not None else None
        span.future.set_result(DecodeResult(command.step, tuple(tokens), chunk=chunk))

    def _drop_span(self) -> None:
        if self._span is not None and self._span.timer is not None:
            self._span.timer.cancel()
            if self._broken:
                self._loop.call_soon(_fail, self._span.future)
            self._span = None  # so that an interruption does not set its timer again

    def _ends(self, future: Result) -> bool:
        if self._broken:
            _fail(future)
        return not (self._broken or self._hanging or future.done())

    def _end(self, future: Result, result: StepResult) -> None:
        if self._ends(future):
            future.set_result(result)

    # ---- hand-off

    def _release(self, command: ReleaseOffers, future: Result) -> None:
        if command.from_host and self.host is not None:
            self.host.release(command.offer_ids)
        for offer_id in () if command.from_host else command.offer_ids:
            self._channel.offered.pop(offer_id, None)
        future.set_result(Done(command.step))

    def _pull(self, command: PullBlock, future: Result) -> None:
        if command.peer == HOST:
            self._pull_from_host(command, future)
            return
        offered = self._channel.offered.get(command.offer_id)
        if offered is None:
            self._loop.call_soon(
                self._end, future, PullResult(command.step, command.offer_id, 0, "no such offer")
            )
            return
        size_bytes = self._costs.wire_bytes(offered.tokens)

        def arrived() -> None:
            if offered.owner in self._channel.gone:
                self._end(future, PullResult(command.step, command.offer_id, 0, "connection reset"))
            elif offered.owner not in self._channel.stalled:
                self._end(future, PullResult(command.step, command.offer_id, int(size_bytes)))

        self._channel.pull(offered, self.name, size_bytes, arrived)

    def _pull_from_host(self, command: PullBlock, future: Result) -> None:
        assert self.host is not None, "a mesh without host memory holds no blocks there"
        now = self._loop.time()
        at = self.host.copied_back(command.offer_id, command.rank, now)
        size_bytes = int(self._costs.wire_bytes(command.block_tokens)) if at is not None else 0
        error = "" if at is not None else "no such block"
        result = PullResult(command.step, command.offer_id, size_bytes, error)
        self._loop.call_at(now if at is None else at, self._end, future, result)

    def _insert(self, command: InsertBlock, future: Result) -> None:
        seconds = self._costs.insert(command.valid_tokens)
        self.busy_seconds += seconds
        span = self._span
        if span is None:
            at = max(self._loop.time(), self._free_at) + seconds
            self._free_at = at
        else:
            # The insertion runs between steps of the span and delays the later ones.
            boundary = self._boundary(span)
            at = span.end_of(boundary) + seconds
            if boundary < span.steps:
                span.delay += seconds
                self.busy_seconds -= seconds
                self._reschedule(span)
            else:
                self._free_at = at
        self._loop.call_at(at, self._end, future, InsertResult(command.step, command.offer_id, 0))

    def _extract(self, command: ExtractBlock, future: Result) -> None:
        start, seconds = self._loop.time(), self._costs.insert(command.valid_tokens)
        if self._prefills and self._span is None:
            start = max(start, self._free_at)
            self._free_at = start + seconds
            self.busy_seconds += seconds
        ready_at = start + seconds
        result = ExtractResult(command.step, BlockChecksum(command.offer_id, 0))
        if command.to_host:
            assert self.host is not None, "a mesh without host memory holds no blocks there"
            at = self.host.copied_out(
                command.offer_id, command.rank, command.valid_tokens, ready_at
            )
            self._loop.call_at(at, self._end, future, result)
            return
        self._channel.offered[command.offer_id] = SimulatedOffer(
            self.name, command.block_tokens, start, ready_at
        )
        self._loop.call_at(ready_at, self._end, future, result)


def _sampled(chunk: PrefillChunk, token: int) -> PrefillResult:
    samples = [
        SampledToken(row.sequence, spec.child, token) for row in chunk.rows for spec in row.samples
    ]
    return PrefillResult(chunk.step, tuple(samples))


def _sizes(rows: Sequence[PrefillRow]) -> list[tuple[int, int]]:
    return [(len(row.tokens), row.start) for row in rows]


def _do_nothing(command: StepCommand, future: Result) -> None:
    future.set_result(Done(command.step))


def _fail(future: Result) -> None:
    if not future.done():
        future.set_exception(UnavailableError("the simulated mesh broke"))

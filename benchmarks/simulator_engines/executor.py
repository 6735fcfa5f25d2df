"""Simulated meshes whose loop also fetches KV: no step is issued while pages are written, and a new
sequence joins the next step."""

from collections.abc import Sequence

from benchmarks.simulator_engines.serial_loop import SerialLoop
from jdisagg.messages.step_commands import DecodeSteps, InsertBlock, InsertResult
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.simulator.channel import SimulatedChannel
from jdisagg.simulator.executor import EngineTraits, Result, RunningSpan, SimulatedExecutor
from jdisagg.simulator.host_memory import HostMemory
from jdisagg.simulator.step_costs import Pace, StepCosts
from jdisagg.simulator.timeline import Timeline
from jdisagg.simulator.turns import Load


class DrainingExecutor(SimulatedExecutor):
    """With pipeline stages, batches take turns as on live decode workers."""

    _after = 0.0  # seconds of insertions behind the running span

    def _insert(self, command: InsertBlock, future: Result) -> None:
        seconds = self._costs.insert(command.valid_tokens)
        if (span := self._span) is None:
            self._free_at = max(self._loop.time(), self._free_at) + seconds
            self.busy_seconds += seconds
        else:
            # The loop waits for the insertion at the next boundary.
            span.steps = self._boundary(span)
            self._after += seconds
            self._reschedule(span)
        future.set_result(InsertResult(command.step, command.offer_id, 0))

    def _reschedule(self, span: RunningSpan) -> None:
        super()._reschedule(span)
        self._free_at += self._after

    def _end_span(self, span: RunningSpan) -> None:
        super()._end_span(span)
        self._after = 0.0


class SerialExecutor(DrainingExecutor):
    """One loop (`serial_loop`) does everything for all pipeline stages, turn by turn."""

    def __init__(
        self,
        name: str,
        limits: MeshLimits,
        costs: StepCosts,
        channel: SimulatedChannel,
        timeline: Timeline,
        engine: EngineTraits,
        host: HostMemory | None,
    ) -> None:
        super().__init__(name, limits, costs, channel, timeline, engine, host)
        loops = range(limits.ranks if engine.stages > 1 else 0)
        self._loops = [SerialLoop(engine.stages, self._step_parts) for _ in loops]

    def _step_parts(self, sequences: int, context_tokens: int, longest: int) -> tuple[float, float]:
        host = self._costs.host(sequences)
        return self._costs.decode(sequences, context_tokens, 1, longest).first - host, host

    def _pace(self, command: DecodeSteps, loads: Sequence[Load], start: float) -> tuple[Pace, int]:
        if not self._loops:
            return super()._pace(command, loads, start)
        ranks = enumerate(zip(self._loops, command.slots, self._positions, strict=True))
        cycles = [
            loop.cycle(
                start,
                slots,
                [admit.slot for admit in command.admits if admit.rank == rank],
                positions,
            )
            for rank, (loop, slots, positions) in ranks
        ]
        return Pace(max(cycles)), 1

    def _insert(self, command: InsertBlock, future: Result) -> None:
        if not self._loops:
            super()._insert(command, future)
            return
        position = command.start + command.valid_tokens
        seconds = self._costs.insert(command.valid_tokens)
        self._loops[command.rank].came(self._loop.time(), position, seconds)
        future.set_result(InsertResult(command.step, command.offer_id, 0))

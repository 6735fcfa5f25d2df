"""An executor that runs nothing, for the processes of an instance."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from jdisagg.clock import MonotonicClock
from jdisagg.layout.kv_spec import KVSpec
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.messages.step_commands import Done, StepCommand, StepResult
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.settings.timeouts import InstanceTimeouts

LIMITS = MeshLimits(1, 16, 4, 2, 64, (64,), (1, 2), 1, 16, 4, 4, KVSpec((), "float32"))
FAST = InstanceTimeouts(beat_seconds=0.05, silence_seconds=1.0, starting_silence_seconds=5.0)
CLOCK = MonotonicClock()


@dataclass
class NotingExecutor:
    """Runs nothing. `answers` may change what a command gives: a result, an error to raise, or None
    for never."""

    limits: MeshLimits = LIMITS
    card: MeshCard = field(default_factory=lambda: MeshCard((1, 1, 1), (0,), (0,)))
    seen: list[StepCommand] = field(default_factory=list)
    answers: Callable[[StepCommand], StepResult | Exception | None] = lambda command: Done(
        command.step
    )
    closed: bool = False

    def run(self, command: StepCommand) -> asyncio.Future[StepResult]:
        self.seen.append(command)
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        answer = self.answers(command)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)
        return future

    def close(self) -> None:
        self.closed = True


async def nothing() -> None:
    return

"""Requests that come whether or not others were answered, on one deployment, stepped by the cost
model: what benchmarks that state a rate measure.

Intervals are exponential, scaled so that they fill the stage, as inference-perf draws them. Of each
prompt `cached` tokens are known before it comes. All else, the order of steps, room and waits, is
`closed_loop.py`'s. Pure: a seed decides."""

from dataclasses import dataclass

import numpy as np

from benchmarks.closed_loop import Batching, Load, Loop, Request, Times, stepped
from jdisagg.costs.cost_model import CostModel

SEED = 20260217


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Of one dp rank: so many requests a second for so many seconds, all with these tokens."""

    rate: float
    seconds: float
    prompt: int
    output: int
    cached: int = 0

    @property
    def requests(self) -> int:
        return max(1, int(self.rate * self.seconds))


class ArrivingLoop(Loop):
    """All of the stage's requests wait from the beginning, each to be seen when it comes; ends send
    none."""

    def __init__(self, arrivals: Arrivals, batching: Batching) -> None:
        super().__init__(Load(0, arrivals.prompt, arrivals.output), batching)
        count = arrivals.requests
        intervals = np.random.default_rng(SEED).exponential(size=count)
        times = np.cumsum(intervals) * (arrivals.seconds / intervals.sum())
        self.record.measured = count
        prompt, output = arrivals.prompt, max(2, arrivals.output)
        left = max(1, prompt - arrivals.cached)
        for number, sent in enumerate(times.tolist()):
            seen = sent + batching.front_seconds
            self.waiting.append(
                Request(number, prompt, output, sent, left, seen=seen, answer=output)
            )

    def send(self) -> None:
        pass


def one_pool_at(costs: CostModel, arrivals: Arrivals, batching: Batching) -> Times:
    """Of an instance that computes prompts and decodes.

    Args:
        costs: of one instance.
        arrivals: at one of its dp ranks.
        batching: the engine's.

    Returns: mean TTFT, from sending to the first token, and mean TPOT, in seconds."""
    return stepped(costs, ArrivingLoop(arrivals, batching))

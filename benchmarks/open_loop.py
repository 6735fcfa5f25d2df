"""Simulates an open loop of requests on one deployment with the cost model, for comparison with
benchmarks that state a request rate.

Intervals are exponential and scaled so that they fill the stage, as in inference-perf. `cached`
tokens of each prompt are in the prefix cache. Everything else (order of steps, room, waits) is as
in `closed_loop.py`. Pure; results depend only on the seed."""

from dataclasses import dataclass

import numpy as np

from benchmarks.closed_loop import Batching, Load, Loop, Request, Times, stepped
from jdisagg.costs.cost_model import CostModel

SEED = 20260217


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrivals at one dp rank: requests per second, seconds, and the lengths of all requests."""

    rate: float
    seconds: float
    prompt: int
    output: int
    cached: int = 0

    @property
    def requests(self) -> int:
        return max(1, int(self.rate * self.seconds))


class ArrivingLoop(Loop):
    """A loop in which all requests of a stage are queued from the start, and become visible at
    their arrival. A request that ends sends no other request."""

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
    """Returns mean TTFT (from sending to the first token) and mean TPOT, in seconds, of an instance
    that prefills and decodes.

    Args:
        costs: Cost model of one instance.
        arrivals: Arrivals at one of its dp ranks.
        batching: Batching of the engine."""
    return stepped(costs, ArrivingLoop(arrivals, batching))

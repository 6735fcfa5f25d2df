"""Nothing is lost in a simulated run."""

import random
from collections import Counter
from collections.abc import Sequence

from jdisagg.simulator.faults import Broken, Cancels, Death, Fault, SlowLink, Stall
from jdisagg.simulator.run import Result
from jdisagg.simulator.workloads import poisson
from tests.simulator.fleets import LENGTHS


def random_faults(
    seed: int, workers: Sequence[str], until_seconds: float, count: int, back_after: float = 5.0
) -> list[Fault]:
    """Returns `count` faults of all kinds at random times; dead workers are restarted."""
    chance = random.Random(seed)
    found: list[Fault] = []
    for _ in range(count):
        at, worker = chance.uniform(0, until_seconds), chance.choice(list(workers))
        match chance.randrange(5):
            case 0:
                found.append(Death(worker, at, back_after))
            case 1:
                found.append(Stall(worker, at, back_after))
            case 2:
                found.append(Broken(worker, at, back_after))
            case 3:
                found.append(
                    SlowLink(
                        worker,
                        at,
                        chance.choice([0.5, 0.1, 0.01]),
                        chance.uniform(0, until_seconds),
                    )
                )
            case _:
                found.append(Cancels(at, chance.uniform(0.05, 0.5), chance.getrandbits(32)))
    return found


def check(result: Result, count: int = 40) -> Counter[str]:
    assert [outcome.request_id for outcome in result.outcomes] == [
        str(number) for number in range(count)
    ]
    assert result.pages_lost == 0
    arrivals = poisson(4.0, count, LENGTHS, 0)
    for outcome in result.outcomes:
        if outcome.end == "finished" and count == len(arrivals):
            assert outcome.output_tokens > 0
    return Counter(outcome.end for outcome in result.outcomes)

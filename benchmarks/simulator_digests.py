"""Computes digests of the simulator's results, to check that a change alters no bit. Each of
several short runs has a digest of its complete results: outcomes and gaps, usage, counters,
seconds, and all decisions of the router with their predictions.

    python -m benchmarks.simulator_digests            # before and after; compare the lines
    python -m benchmarks.simulator_digests --calls --only=trace

The runs: two pools of 40 instances, one pool with alternating and with fused steps, prefix reuse,
workers with faults, and role changes. Digests depend on the machine and the version of numpy, and
can be compared only between equal ones. --calls counts Python calls per request instead of seconds,
because these do not depend on the machine's load."""

import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from absl import app, flags

from benchmarks.simulator_engines.cluster import simulate
from benchmarks.simulator_engines.fleet import StudyFleet
from jdisagg.config import Mode, PrefixConfig
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import accelerator
from jdisagg.layout.axes import Layout
from jdisagg.router.decision import NoRouterEvents, PlacementOutcome, PlacementQuery
from jdisagg.router.elastic import ElasticConfig
from jdisagg.router.elastic_signals import SloTarget
from jdisagg.simulator.elastic import elastic
from jdisagg.simulator.faults import Broken, Cancels, Death, SlowLink, Stall, schedule
from jdisagg.simulator.fleet import INSTANCE, Fleet, Pool
from jdisagg.simulator.run import Result
from jdisagg.simulator.trace_files import read_trace
from jdisagg.simulator.workloads import Arrival, Fixed, at_rate, merge, poisson
from tests.simulator.fleets import LENGTHS, small_fleet

_ONLY = flags.DEFINE_list("only", None, "These runs alone.")
_CALLS = flags.DEFINE_boolean("calls", False, "Count Python calls: takes three times as long.")

Simulation = Callable[["Decisions"], tuple[Result, int]]


class Decisions(NoRouterEvents):
    """Adds every decision, and every measured prediction, to a digest."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def answered(self, query: PlacementQuery, now: float, answer: PlacementOutcome) -> None:
        self.digest.update(f"{now!r} {answer!r}\n".encode())

    def measured(self, what: str, predicted: float, actual: float) -> None:
        self.digest.update(f"{what} {predicted!r} {actual!r}\n".encode())

    def handed_over(self, prefill: str | None, decode: str) -> None:
        self.digest.update(f"{prefill} {decode}\n".encode())


CONVERSATION = read_trace(Path(__file__).parent / "data/azure2023_conv_slice.csv.gz", 1500)


def trace(events: NoRouterEvents) -> tuple[Result, int]:
    """Simulates Azure's conversation trace at 70 requests per second on 26 + 14 instances of 8
    H100."""
    arrivals = at_rate(CONVERSATION, 70.0)
    instance = replace(INSTANCE, layout=Layout(tp=8))
    pools = [Pool(many, accelerator("h100"), instance) for many in (26, 14)]
    fleet = Fleet(geometry("llama-3.1-70b"), prefill=pools[0], decode=pools[1])
    return simulate(fleet, arrivals, events=events), len(arrivals)


def ranks(fleet: Fleet) -> Fleet:
    """Returns the fleet with two dp ranks in each instance."""
    wide = replace(fleet.decode, instance=replace(fleet.decode.instance, layout=Layout(dp=2)))
    return replace(fleet, decode=wide, prefill=wide if fleet.prefill else None)


def late(fleet: Fleet) -> Fleet:
    """Returns the fleet with decode pages reserved after the prefill, and with a loop that
    drains."""
    same = {spec.name: getattr(fleet, spec.name) for spec in fields(fleet)}
    return StudyFleet(**same, late_reservation=True, drains=True)


def plain(fleet: Fleet, rate: float, count: int = 200) -> Simulation:
    arrivals = poisson(rate, count, LENGTHS, seed=3)
    return lambda events: (simulate(fleet, arrivals, events=events), count)


def reuse(events: NoRouterEvents) -> tuple[Result, int]:
    fleet = replace(small_fleet(pages=512), prefix=PrefixConfig(reuse=True, host_gib=1.0))
    arrivals = [
        Arrival(0.3 * number, 1024 + 512 * (number % 4), 8 + number % 5, (1, number % 3, 9, 11, 12))
        for number in range(120)
    ]
    return simulate(fleet, arrivals, events=events), len(arrivals)


def struck(events: NoRouterEvents) -> tuple[Result, int]:
    arrivals = poisson(4.0, 150, LENGTHS, seed=5)
    faults = [
        Death("decode-1", 4.0, 5.0),
        Stall("prefill-0", 9.0, 5.0),
        SlowLink("prefill-1", 12.0, 0.1, 6.0),
        Cancels(15.0, 0.3),
        Broken("decode-0", 20.0, 4.0),
    ]
    fleet = small_fleet()
    hooks = [schedule(faults)]
    result = simulate(fleet, arrivals, hooks=hooks, mortal=True, events=events, settle_seconds=30.0)
    return result, len(arrivals)


def roles(events: NoRouterEvents) -> tuple[Result, int]:
    prompts = poisson(20.0, 300, Fixed(2000, 4))
    answers = [
        replace(one, at_seconds=one.at_seconds + 15.0) for one in poisson(8.0, 150, Fixed(100, 200))
    ]
    slo = SloTarget(ttft_seconds=2.0, tpot_seconds=0.2)
    config = ElasticConfig(
        slo=slo, window_seconds=10, patience_seconds=2, cooldown_seconds=5, horizon_seconds=60
    )
    result = simulate(
        small_fleet(pages=512),
        merge(prompts, answers),
        hooks=[elastic(config, 5.0)],
        events=events,
        settle_seconds=20.0,
    )
    return result, len(prompts) + len(answers)


RUNS: dict[str, Simulation] = {
    "trace": trace,
    "short of pages": plain(small_fleet(), 5.0),
    "two ranks": plain(ranks(small_fleet(pages=256)), 12.0),
    "chunked": plain(small_fleet(Mode.CHUNKED), 5.0),
    "chunked, two ranks": plain(ranks(small_fleet(Mode.CHUNKED, 256)), 12.0),
    "fused": plain(replace(small_fleet(Mode.CHUNKED, 256), fused=True), 8.0),
    "unified": plain(small_fleet(Mode.UNIFIED, 256), 5.0),
    "late": plain(late(small_fleet(pages=256)), 5.0),
    "reuse": reuse,
    "faults": struck,
    "roles": roles,
}


def digest_of(result: Result, events: Decisions) -> str:
    digest = events.digest.copy()
    for outcome in result.outcomes:
        digest.update(f"{outcome!r} {outcome.gaps and outcome.gaps!r}\n".encode())
    usage, counters = result.usage, sorted(result.counters.items())
    digest.update(
        f"{usage!r} {result.seconds!r} {result.steps} {counters} {result.pages_lost}".encode()
    )
    return digest.hexdigest()[:16]


def main(_: list[str]) -> None:
    for name, run in RUNS.items():
        if _ONLY.value and name not in _ONLY.value:
            continue
        events, calls = Decisions(), 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        if _CALLS.value:
            sys.setprofile(count)
        began = time.process_time()
        result, requests = run(events)
        seconds = time.process_time() - began
        sys.setprofile(None)
        cost = f"{calls / requests:.0f} calls" if calls else f"{1e6 * seconds / requests:.0f} us"
        print(f"{name:20} {digest_of(result, events)}  {cost} a request", flush=True)


if __name__ == "__main__":
    sys.exit(app.run(main))

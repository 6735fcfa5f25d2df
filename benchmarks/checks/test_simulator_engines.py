"""Engines that only studies simulate: a loop that fetches KV between steps, against a plain
simulation of that loop; and pages reserved after the prefill, with and without faults."""

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest

from benchmarks.simulator_engines.cluster import simulate
from benchmarks.simulator_engines.fleet import StudyFleet
from benchmarks.simulator_engines.serial_loop import SerialLoop
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import Link, accelerator
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.simulator.cluster import SimulatedCluster
from jdisagg.simulator.faults import Broken, Death, Fault, Stall, schedule
from jdisagg.simulator.fleet import INSTANCE, LIMITS, Pool
from jdisagg.simulator.run import Result
from jdisagg.simulator.workloads import Arrival, Fixed, poisson
from tests.simulator.conservation import check, random_faults
from tests.simulator.fleets import LENGTHS, small_fleet


def one_loop(
    arrivals: list[float], tokens: int, base: float, each: float, host: float, fetch: float
) -> list[float]:
    """Returns the end of each sequence behind two stages and one loop that reads, fetches, admits,
    issues, and waits for the other batch."""
    batches: list[dict[int, int]] = [{}, {}]
    back, free, ends = [0.0, 0.0], [0.0, 0.0], [0.0] * len(arrivals)
    waiting, now, seen, turn = list(range(len(arrivals))), 0.0, 0.0, 0
    while waiting or any(batches):
        if not any(batches):
            now = seen = max(now, arrivals[waiting[0]])
        if batches[turn] or batches[1 - turn]:
            now = seen = max(now, back[turn])
            now += host / 2 if batches[turn] else 0.003
        for number in list(batches[turn]):
            batches[turn][number] -= 1
            if not batches[turn][number]:
                ends[number] = now
                del batches[turn][number]
        # A batch of nobody takes one; meanwhile the other takes none.
        most = len(waiting) if all(batches) else 1 - min(1, len(batches[turn]))
        while waiting and arrivals[waiting[0]] <= seen and most:
            now = seen = max(now, *free) + fetch
            batches[turn][waiting.pop(0)] = tokens
            most -= 1
        if batches[turn]:
            now += host / 2
            at = now
            for stage in range(2):
                at = free[stage] = max(at, free[stage]) + (base + each * len(batches[turn])) / 2
            back[turn] = at
        turn = 1 - turn
    return ends


def moved(
    arrivals: list[float], tokens: int, cycle: Callable[[float, list[int], list[int]], float]
) -> np.ndarray:
    """Returns each sequence's seconds per token. `cycle(now, slots, new ones)` returns the seconds
    in which every slot makes one token; slots are the sequences' numbers."""
    left: dict[int, int] = {}
    ends, now, waiting = [0.0] * len(arrivals), 0.0, list(range(len(arrivals)))
    while waiting or left:
        new = [number for number in waiting if arrivals[number] <= now]
        del waiting[: len(new)]
        left |= dict.fromkeys(new, tokens)
        if not left:
            now = arrivals[waiting[0]]
            continue
        now += cycle(now, list(left), new)
        for number in list(left):
            left[number] -= 1
            if not left[number]:
                ends[number] = now
                del left[number]
    return (np.array(ends) - arrivals) / tokens


@pytest.mark.parametrize("fetch", [0.0, 0.006])
def test_one_loop_that_fetches_for_newcomers_takes_as_long_as_when_moved_turn_by_turn(
    fetch: float,
) -> None:
    base, each, host, tokens = 0.02, 0.0006, 0.004, 150
    arrivals = np.cumsum(np.random.default_rng(1).exponential(1 / 5.0, 400)).tolist()
    expected = (np.array(one_loop(arrivals, tokens, base, each, host, fetch)) - arrivals) / tokens
    loop = SerialLoop(2, lambda sequences, context, longest: (base + each * sequences, host))

    def cycle(now: float, slots: list[int], new: list[int]) -> float:
        for number in new:
            loop.came(arrivals[number], number, fetch)
        return loop.cycle(now, slots, new, range(400))

    found = moved(arrivals, tokens, cycle)
    assert np.median(found) == pytest.approx(np.median(expected), rel=0.1)
    assert np.percentile(found, 90) == pytest.approx(np.percentile(expected, 90), rel=0.1)


def full_decode_side(late: bool) -> Result:
    """The decode side has room for four sequences and sixty arrive at once, so that the last waits
    for longer than the lease of its KV."""
    instance = replace(INSTANCE, page_size=16)
    fleet = StudyFleet(
        geometry("llama-3-8b"),
        Pool(
            1,
            accelerator("a100"),
            replace(instance, pages_per_rank=4 * (512 + 64) // 16, growth_tokens=64),
        ),
        Pool(1, accelerator("a100"), instance),
        link=Link("test", 100e9, 1e-6),
        late_reservation=late,
    )
    return simulate(
        fleet, [replace(item, at_seconds=0.0) for item in poisson(1.0, 60, Fixed(512, 64))]
    )


def test_reserved_late_a_full_decode_side_delays_second_tokens_not_first_ones() -> None:
    early, late = full_decode_side(False), full_decode_side(True)
    for result in (early, late):
        assert [item.end for item in result.outcomes] == [
            "finished"
        ] * 60 and result.pages_lost == 0
    slowest_first = {
        kind: max(item.ttft or 0.0 for item in result.outcomes)
        for kind, result in (("early", early), ("late", late))
    }
    slowest_gap = {
        kind: max(item.gaps.first for item in result.outcomes if item.gaps)
        for kind, result in (("early", early), ("late", late))
    }
    assert slowest_first["late"] < slowest_first["early"] / 2
    assert slowest_gap["late"] > 2 * slowest_gap["early"]
    assert slowest_gap["late"] > LIMITS.handoff_lease_seconds
    assert "leases_expired" not in late.counters, "KV that is waited for stays"
    assert late.seconds == pytest.approx(early.seconds, rel=0.2)


def test_a_loop_that_waits_for_pages_lets_newcomers_in_a_step_sooner() -> None:
    def gaps(drains: bool) -> tuple[float, float]:
        pool = Pool(1, accelerator("a100"))
        fleet = StudyFleet(
            geometry("llama-3-8b"),
            pool,
            pool,
            link=Link("test", 50e9, 1e-6),
            drains=drains,
            run_ahead=0,
        )
        result = simulate(fleet, [Arrival(0.05 * number, 1024, 100) for number in range(40)])
        first = [item.gaps.first for item in result.outcomes if item.gaps]
        return float(np.mean(first)), float(
            np.mean([item.tpot for item in result.outcomes if item.tpot])
        )

    waits, others = gaps(True), gaps(False)
    assert waits[0] < others[0]
    assert waits[1] == pytest.approx(others[1], rel=0.05)


def late_fleet(pages: int = 64) -> StudyFleet:
    plain = small_fleet(pages=pages)
    same = {spec.name: getattr(plain, spec.name) for spec in fields(plain)}
    return StudyFleet(**same, late_reservation=True)


def struck(fleet: StudyFleet, faults: list[Fault], seed: int = 0) -> Result:
    arrivals = poisson(4.0, 40, LENGTHS, seed)
    hooks = [schedule(faults)]
    return simulate(fleet, arrivals, seed, hooks=hooks, mortal=True, settle_seconds=60.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pages", [24, 512])
def test_reserved_late_every_request_ends_once_and_pages_return(seed: int, pages: int) -> None:
    workers = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    result = struck(late_fleet(pages), random_faults(seed, workers, 8.0, 4, back_after=3.0), seed)
    check(result)
    assert all(outcome.reason for outcome in result.outcomes if outcome.end != "finished")


@pytest.mark.parametrize(
    "fault",
    [
        Death("decode-0", 3.0, 3.0),
        Death("prefill-0", 3.0, 3.0),
        Stall("decode-1", 3.0, 6.0),
        Broken("prefill-1", 3.0, 2.0),
    ],
    ids=lambda fault: f"{type(fault).__name__}-{fault.worker}",
)
def test_reserved_late_a_lost_worker_costs_its_requests_time_and_nothing_else(fault: Fault) -> None:
    calm, hit = struck(late_fleet(), []), struck(late_fleet(), [fault])
    assert check(calm) == check(hit) == {"finished": 40}
    assert hit.counters.get("attempts_failed", 0) + hit.counters.get("sources_replaced", 0) > 0
    wanted = [outcome.output_tokens for outcome in calm.outcomes]
    assert [outcome.output_tokens for outcome in hit.outcomes] == wanted


def test_reserved_late_running_sequences_move_off_a_worker_that_drains() -> None:
    async def switch(cluster: SimulatedCluster) -> None:
        await cluster.clock.sleep(3.0)
        await cluster.switch_role("decode-0", WorkerRole.PREFILL, seconds=0.1, drain_seconds=20.0)

    arrivals = poisson(4.0, 12, Fixed(400, 600), 0)
    result = simulate(late_fleet(pages=512), arrivals, hooks=[switch], settle_seconds=60.0)
    assert [outcome.end for outcome in result.outcomes] == ["finished"] * 12
    assert result.pages_lost == 0 and result.counters["sequences_moved"] > 0

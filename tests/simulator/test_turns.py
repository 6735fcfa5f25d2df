"""Batches that take turns at pipeline stages, against a plain step-by-step simulation of such
turns; and pages asked for late."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from jdisagg.costs.hardware import Link, accelerator
from jdisagg.costs.model_geometry import geometry
from jdisagg.simulator.fleet import INSTANCE, LIMITS, Fleet, Pool
from jdisagg.simulator.run import Result, simulate
from jdisagg.simulator.serial_loop import SerialLoop
from jdisagg.simulator.turns import Turns
from jdisagg.simulator.workloads import Arrival, Fixed, poisson


def by_hand(
    arrivals: list[float], tokens: int, stages: int, base: float, each: float
) -> list[float]:
    """Ends of sequences: every batch of every stage moved one after the other; an empty batch takes
    who comes next."""
    batches: list[dict[int, int]] = [{} for _ in range(stages)]
    back, free, ends = [0.0] * stages, [0.0] * stages, [0.0] * len(arrivals)
    waiting = list(range(len(arrivals)))
    while waiting or any(batches):
        turn = min(
            range(stages),
            key=lambda index: (
                back[index] if batches[index] else (arrivals[waiting[0]] if waiting else np.inf)
            ),
        )
        now = back[turn] if batches[turn] else max(arrivals[waiting[0]], free[0])
        for number in list(batches[turn]):
            batches[turn][number] -= 1
            if not batches[turn][number]:
                ends[number] = now
                del batches[turn][number]
        while waiting and arrivals[waiting[0]] <= now:
            batches[turn][waiting.pop(0)] = tokens
        if batches[turn]:
            at, stage_seconds = now, (base + each * len(batches[turn])) / stages
            for stage in range(stages):
                at = free[stage] = max(at, free[stage]) + stage_seconds
            back[turn] = at
    return ends


def one_loop(
    arrivals: list[float], tokens: int, base: float, each: float, host: float, fetch: float
) -> list[float]:
    """Ends of sequences behind two stages and one loop that reads, fetches, lets in, issues, and
    waits for the other batch."""
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
    """Seconds a token of each sequence. `cycle(now, slots, new ones)`: what all take for one token
    each; slots are sequences' numbers."""
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


def test_steps_of_uneven_batches_take_as_long_as_turns_moved_one_by_one() -> None:
    base, each, tokens = 0.02, 0.0007, 150
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / 4.0, 400)).tolist()
    expected = (np.array(by_hand(arrivals, tokens, 2, base, each)) - arrivals) / tokens
    turns = Turns(2, lambda sequences, context, longest: (base + each * sequences, 0.0))
    found = moved(
        arrivals,
        tokens,
        lambda now, slots, new: base + each * turns.fullest(slots, new, [0] * 400)[0],
    )
    assert np.median(found) == pytest.approx(np.median(expected), rel=0.05)
    assert np.percentile(found, 90) == pytest.approx(np.percentile(expected, 90), rel=0.1)


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


def test_a_newcomer_founds_a_batch_where_one_is_empty_and_who_is_gone_counts_no_more() -> None:
    turns = Turns(2, lambda sequences, context, longest: (1.0, 0.0))
    assert turns.fullest([0, 1], [0, 1], [10, 20]) == (1, 21, 21)
    assert turns.fullest([0, 1, 2, 3], [2, 3], [10, 20, 5, 5])[0] in (2, 3)
    assert turns.fullest([3], [], [0, 0, 0, 5]) == (1, 6, 6)


def full_decode_side(late: bool) -> Result:
    """Room for four sequences on the decode side; sixty come at once, and the last waits for longer
    than KV that nobody asks after."""
    instance = replace(INSTANCE, page_size=16)
    fleet = Fleet(
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
        fleet = Fleet(
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

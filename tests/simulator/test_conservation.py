"""Under any faults every request ends once, all pages return, and the faults did strike."""

import gc

import pytest
from hypothesis import strategies as st

from jdisagg.config import Mode
from jdisagg.errors import ConfigError
from jdisagg.simulator.faults import (
    Broken,
    Cancels,
    Death,
    Fault,
    SlowLink,
    Stall,
    parse_fault,
    schedule,
)
from jdisagg.simulator.fleet import Fleet
from jdisagg.simulator.run import Result, simulate
from jdisagg.simulator.workloads import Arrival, poisson
from tests.lanes import given_examples
from tests.memory import set_aside
from tests.simulator.conservation import check, random_faults
from tests.simulator.fleets import LENGTHS, small_fleet


def run(
    fleet: Fleet, faults: list[Fault], count: int = 40, rate: float = 4.0, seed: int = 0
) -> Result:
    arrivals = poisson(rate, count, LENGTHS, seed)
    return simulate(
        fleet, arrivals, seed, hooks=[schedule(faults)], mortal=True, settle_seconds=60.0
    )


@given_examples(
    6,
    60,
    seed=st.integers(0, 10_000),
    count=st.integers(1, 6),
    mode=st.sampled_from([Mode.DISAGGREGATED, Mode.DISAGGREGATED, Mode.CHUNKED]),
    pages=st.sampled_from([24, 64, 512]),
)
def test_every_request_ends_once_and_pages_return_under_random_faults(
    seed: int, count: int, mode: Mode, pages: int
) -> None:
    workers = (
        ("prefill-0", "prefill-1", "decode-0", "decode-1")
        if mode is Mode.DISAGGREGATED
        else ("mixed-0", "mixed-1")
    )
    faults = random_faults(seed, workers, 8.0, count, back_after=3.0)
    result = run(small_fleet(mode, pages), faults, seed=seed)
    check(result)
    # With all workers of a role gone at once a request fails after its attempts, and says so.
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
def test_a_worker_that_is_lost_costs_its_requests_time_and_nothing_else(fault: Fault) -> None:
    fleet = small_fleet()
    calm, struck = run(fleet, []), run(fleet, [fault])
    assert check(calm) == check(struck) == {"finished": 40}
    assert struck.counters["faults"] == 1
    assert (
        struck.counters.get("attempts_failed", 0) + struck.counters.get("sources_replaced", 0) > 0
    ), "it struck when something ran there"
    wanted = [outcome.output_tokens for outcome in calm.outcomes]
    assert [outcome.output_tokens for outcome in struck.outcomes] == wanted, (
        "no token is lost or doubled"
    )


def test_a_slow_link_lengthens_the_hand_off_and_no_more() -> None:
    def gaps(result: Result) -> float:
        return sum(outcome.gaps.first for outcome in result.outcomes if outcome.gaps)

    calm = run(small_fleet(), [])
    slow = run(
        small_fleet(), [SlowLink(worker, 0.0, 0.05, 100.0) for worker in ("prefill-0", "prefill-1")]
    )
    assert check(slow) == {"finished": 40}
    assert gaps(slow) > 1.5 * gaps(calm)


def test_who_goes_away_is_counted_and_holds_nothing() -> None:
    ends = check(run(small_fleet(), [Cancels(float(at), 0.5, at) for at in range(1, 9)]))
    assert ends["cancelled"] > 3 and ends["finished"] + ends["cancelled"] == 40


@pytest.mark.parametrize("mode", list(Mode))
def test_the_same_call_gives_the_same_result(mode: Mode) -> None:
    workers = ("decode-0",) if mode is Mode.DISAGGREGATED else ("mixed-0",)
    results = [
        run(small_fleet(mode), random_faults(5, workers, 6.0, 3, 2.0), seed=5) for _ in range(2)
    ]
    assert results[0] == results[1]


def test_faults_of_nobody_and_words_of_no_meaning_are_refused() -> None:
    with pytest.raises(ConfigError, match="decode-7"):
        run(small_fleet(), [Death("decode-7", 1.0)])
    for text in (
        "death:decode-0",
        "flood:decode-0:1",
        "slow:decode-0:1:2:3",
        "death:decode-0:soon",
        "cancels:-1:0.5",
    ):
        with pytest.raises(ConfigError):
            parse_fault(text)
    assert parse_fault("death:decode-0:10:5") == Death("decode-0", 10.0, 5.0)
    assert parse_fault("slow:prefill-1:2:0.1:30") == SlowLink("prefill-1", 2.0, 0.1, 30.0)


def test_what_the_caller_set_aside_from_collections_stays_aside() -> None:
    set_aside()
    before = gc.get_freeze_count()
    run(small_fleet(), [], count=1)
    assert gc.get_freeze_count() > before / 2


@pytest.mark.parametrize("tokens", [9000, 10**18])
def test_a_prompt_that_never_fits_fails_alone(tokens: int) -> None:
    arrivals = [Arrival(0.0, 100, 1), Arrival(0.1, tokens, 5), Arrival(0.2, 100, 5)]
    outcomes = simulate(small_fleet(), arrivals).outcomes
    assert [outcome.end for outcome in outcomes] == ["finished", "failed", "finished"]
    assert "shorten" in outcomes[1].reason or "pages" in outcomes[1].reason

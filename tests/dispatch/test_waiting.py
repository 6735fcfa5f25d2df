"""What becomes of requests while a role has no worker, over the real membership and workers, in
virtual time."""

from dataclasses import replace

import pytest

from jdisagg.config import RoutingConfig
from jdisagg.dispatch.public_text import public
from jdisagg.dispatch.routing_status import WaitingRequest
from jdisagg.errors import HandoffError, NoWorkerError, OverloadedError, UnavailableError
from jdisagg.request import Request, SamplingParams
from jdisagg.router.absences import FIRST_GUESS_SECONDS, Absences
from jdisagg.simulator.cluster import SimulatedCluster
from jdisagg.simulator.faults import Death, schedule
from jdisagg.simulator.fleet import Fleet
from jdisagg.simulator.run import Hook, Result, simulate
from jdisagg.simulator.workloads import Arrival
from tests.simulator.fleets import small_fleet

AWAY_SECONDS = 30.0
ARRIVALS = [Arrival(0.5 * number, 500, 40) for number in range(40)]


def fleet(routing: RoutingConfig | None = None, deadline_seconds: float = 120.0) -> Fleet:
    """One worker of each role."""
    some = small_fleet(pages=512)
    assert some.prefill is not None
    pool = replace(some.prefill, count=1)
    limits = replace(some.limits, default_deadline_seconds=deadline_seconds)
    return replace(some, prefill=pool, decode=pool, limits=limits, routing=routing or some.routing)


def run(*hooks: Hook, on: Fleet | None = None, arrivals: list[Arrival] = ARRIVALS) -> Result:
    return simulate(on or fleet(), arrivals, hooks=hooks, mortal=True, settle_seconds=40.0)


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
def test_the_restart_of_the_only_worker_of_a_role_costs_a_pause_and_no_error(worker: str) -> None:
    seen: list[int] = []

    async def look(cluster: SimulatedCluster) -> None:
        await cluster.clock.sleep(5.0 + AWAY_SECONDS / 2)
        seen.append(cluster.path.routing().waiting)

    result = run(schedule([Death(worker, 5.0, AWAY_SECONDS)]), look)
    assert {outcome.end for outcome in result.outcomes} == {"finished"}
    assert seen[0] >= 20, "those that had arrived meanwhile wait, and those that were running"
    assert result.pages_lost == 0


def test_both_roles_may_be_away_one_after_the_other() -> None:
    deaths = [Death("prefill-0", 5.0, 10.0), Death("decode-0", 10.0, 10.0)]
    result = run(schedule(deaths))
    assert {outcome.end for outcome in result.outcomes} == {"finished"}


def test_a_request_waits_until_its_deadline_and_learns_when_a_worker_is_expected() -> None:
    errors: list[Exception] = []

    async def ask(cluster: SimulatedCluster) -> None:
        await cluster.clock.sleep(10.0)
        began = cluster.clock.now()
        request = Request("late", (1,) * 50, SamplingParams(max_tokens=4), deadline_seconds=7.0)
        try:
            async for _ in cluster.path.stream(request):
                pass
        except NoWorkerError as error:
            errors.append(error)
            assert cluster.clock.now() - began == pytest.approx(7.0, abs=0.2)

    run(schedule([Death("decode-0", 5.0, AWAY_SECONDS)]), ask)
    (error,) = errors
    assert isinstance(error, NoWorkerError)
    assert "decode" in error.message and "expected in about" in error.message
    assert error.retry_after_seconds is not None and error.retry_after_seconds >= 1.0


def test_the_status_lists_who_waits_in_their_order_and_why() -> None:
    found: list[tuple[WaitingRequest, ...]] = []

    async def look(cluster: SimulatedCluster) -> None:
        await cluster.clock.sleep(15.0)
        found.append(cluster.path.routing().waiting_requests)

    run(schedule([Death("prefill-0", 5.0, AWAY_SECONDS)]), look)
    (waiting,) = found
    assert [one.position for one in waiting] == list(range(1, len(waiting) + 1))
    assert len(waiting) >= 10 and all("no prefill worker" in one.reason for one in waiting)
    newest = max(one.waited_seconds for one in waiting)
    assert 5.0 < newest < 15.0


def test_a_bound_on_the_first_token_ends_the_wait() -> None:
    result = run(
        schedule([Death("decode-0", 5.0, AWAY_SECONDS)]),
        on=fleet(RoutingConfig(ttft_slo_seconds=2.0)),
    )
    ends = [outcome.end for outcome in result.outcomes]
    # Some had waited too long when the worker returned.
    assert ends.count("finished") > 10 and {"failed", "refused"} & set(ends)


def test_a_queue_that_stood_while_a_role_was_away_is_not_taken_for_a_slow_one() -> None:
    """Requests that arrive at the return must not be refused because few were served lately."""
    arrivals = [Arrival(0.1 * number, 500, 40) for number in range(500)]
    result = run(
        schedule([Death("prefill-0", 5.0, 40.0)]),
        on=fleet(deadline_seconds=60.0),
        arrivals=arrivals,
    )
    assert {outcome.end for outcome in result.outcomes} == {"finished"}


def test_the_wait_is_bounded_and_who_is_refused_learns_when_a_worker_is_expected() -> None:
    some, errors = fleet(), list[OverloadedError]()
    bounded = replace(some, limits=replace(some.limits, max_waiting_requests=8))

    async def ask(cluster: SimulatedCluster) -> None:
        await cluster.clock.sleep(15.0)
        request = Request("one more", (1,) * 50, SamplingParams(max_tokens=4))
        try:
            async for _ in cluster.path.stream(request):
                pass
        except OverloadedError as error:
            errors.append(error)

    result = run(schedule([Death("decode-0", 5.0, AWAY_SECONDS)]), ask, on=bounded)
    (error,) = errors
    assert error.retry_after_seconds is not None
    assert 1.0 <= error.retry_after_seconds < FIRST_GUESS_SECONDS
    ends = [outcome.end for outcome in result.outcomes]
    assert set(ends) == {"finished", "refused"} and ends.count("finished") >= 8


def test_a_return_is_expected_after_the_usual_time() -> None:
    absences = Absences()
    absences.left("d0", "decode", 100.0)
    assert absences.expected_seconds("decode", 100.0) == FIRST_GUESS_SECONDS
    assert absences.expected_seconds("decode", 106.0) == FIRST_GUESS_SECONDS - 6.0
    assert absences.expected_seconds("decode", 140.0) == 20.0, "half of the time so far"
    absences.came("d0", 140.0)
    absences.left("d1", "decode", 200.0)
    assert absences.expected_seconds("decode", 210.0) == 30.0
    assert absences.away_seconds("decode", 210.0) == 10.0
    assert absences.away_seconds("prefill", 210.0) is None


def test_a_worker_that_was_removed_long_ago_delays_no_expected_return() -> None:
    absences = Absences()
    absences.left("removed", "decode", 0.0)
    absences.left("d0", "decode", 3000.0)
    assert absences.expected_seconds("decode", 3002.0) == FIRST_GUESS_SECONDS - 2.0
    assert absences.away_seconds("decode", 3002.0) == 2.0


@pytest.mark.parametrize(
    "text",
    [
        "10.78.0.2:19201: UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN:"
        " ipv4:10.78.0.2:19201: Failed to connect to remote host: connect: Connection refused",
        "ipv6:%5B::1%5D:8811: Socket closed",
        "[fe80::1]:8811 did not answer within 5 s",
        "node-7.internal:8811 did not answer",
    ],
)
def test_no_address_of_the_cluster_is_in_a_text_that_a_client_sees(text: str) -> None:
    shown = public(HandoffError(text, retry_after_seconds=3.0), {"decode-0": "10.78.0.2:19201"})
    assert isinstance(shown, HandoffError) and shown.retry_after_seconds == 3.0
    assert not any(part in shown.message for part in ("10.78", "8811", "19201", "fe80"))
    assert ("decode-0" in shown.message) == ("10.78" in text)


def test_a_text_without_addresses_stays() -> None:
    error = UnavailableError("no decode worker takes requests; expected in about 10 s: wait")
    assert public(error, {}) is error

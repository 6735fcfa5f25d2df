"""Workers with other weights: the router pairs workers of equal weights, and none that sleeps."""

from collections.abc import Sequence

import msgspec
import pytest

from jdisagg.errors import NoWorkerError
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.router.accounts import Work
from jdisagg.router.cluster_state import ClusterState
from jdisagg.router.decision import PlacementQuery
from jdisagg.router.placement import another_decode, another_prefill
from tests.router.decisions import decision
from tests.router.fleets import decode_status, prefill_status
from tests.router.fleets import state_of as priced
from tests.router.pairs import RULES, D, P, place, state_of, status

QUERY = PlacementQuery(Work(1000, expected_tokens=100))


def of(worker: WorkerStatus, weights: str = "", **fields: object) -> WorkerStatus:
    return msgspec.structs.replace(worker, weights=weights, **fields)


def pair(by_price: bool, workers: Sequence[tuple[str, str]]) -> tuple[str | None, str]:
    """The pair that is chosen among workers (name, weights), the first of a role the least
    loaded."""
    if by_price:
        made = [
            of(prefill_status(name) if name[0] == "p" else decode_status(name), weights)
            for name, weights in workers
        ]
        chosen = decision(priced(*made), QUERY)
    else:
        made = [
            of(status(name, P if name[0] == "p" else D, running=int(name[1:])), weights)
            for name, weights in workers
        ]
        chosen = place(*made)
    return chosen.prefill, chosen.decode


@pytest.mark.parametrize("by_price", [True, False])
def test_pairs_have_equal_weights_while_workers_are_updated_one_after_the_other(
    by_price: bool,
) -> None:
    assert pair(by_price, [("p0", ""), ("p1", "v"), ("d0", "v")]) == ("p1", "d0")
    assert pair(by_price, [("p0", "v"), ("d0", ""), ("d1", "v")]) == ("p0", "d1")
    mixed = [("p0", "u"), ("p1", "v"), ("d0", "v"), ("d1", "u")]
    assert pair(by_price, mixed) in {("p0", "d1"), ("p1", "d0")}
    many = [(f"p{n}", "old") for n in range(9)] + [("p9", "v"), ("d0", "v")]
    assert pair(by_price, many) == ("p9", "d0"), "also beyond the few best prefill workers"
    with pytest.raises(NoWorkerError):
        pair(by_price, [("p0", "u"), ("d0", "v")])


def test_a_replaced_worker_has_the_weights_of_the_one_that_holds_the_kv() -> None:
    state = state_of(
        (
            of(status("p0", P), "u"),
            of(status("p1", P, running=3), "v"),
            of(status("d0", D), "v"),
            of(status("d1", D), "u"),
            of(status("d2", D, running=3), "v"),
        )
    )
    assert another_prefill(state, frozenset(), 0.0, RULES, "d0") == "p1"
    assert another_prefill(state, frozenset(), 0.0, RULES, "d1") == "p0"
    assert another_decode(state, frozenset({"d0"}), 0.0, RULES, "d0") == "d2"
    with pytest.raises(NoWorkerError):
        another_decode(state, frozenset({"d1"}), 0.0, RULES, "d1")


def test_a_sleeping_worker_gets_no_request_of_any_kind() -> None:
    workers = (status("p0", P, running=3), status("d0", D, running=3))
    asleep = (of(status("p1", P), asleep=True), of(status("d1", D), asleep=True))
    chosen = place(*asleep, *workers)
    assert (chosen.prefill, chosen.decode) == ("p0", "d0")
    with pytest.raises(NoWorkerError, match="asleep"):
        place(asleep[0], workers[1])
    with pytest.raises(NoWorkerError, match="asleep"):
        another_decode(state_of(asleep), frozenset(), 0.0, RULES)


def test_a_worker_that_takes_the_same_weights_later_is_paired_again() -> None:
    state = ClusterState()
    for worker in (of(status("p0", P), "v"), of(status("d0", D), "u")):
        state.update(worker, 0.0)
    assert state.prefill.weights != state.decode.weights
    state.update(of(status("d0", D), "v"), 1.0)
    assert state.prefill.weights == state.decode.weights
    assert state.weights("d0") == "v" and state.weights("nobody") == ""

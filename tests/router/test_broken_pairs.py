"""Pairs of workers between which KV does not arrive, while each of the two works with others."""

from dataclasses import replace

import pytest

from jdisagg.router.accounts import Work
from jdisagg.router.candidates import Breakers
from jdisagg.router.decision import PlacementQuery
from jdisagg.router.placement import another_prefill
from jdisagg.settings.timeouts import Backoff
from tests.router.decisions import TURN, appends, decision
from tests.router.fleets import decode_status, prefill_status
from tests.router.fleets import state_of as priced
from tests.router.pairs import RULES, D, P, state_of, status

QUERY = PlacementQuery(Work(1000, expected_tokens=100))


def pairs(*names: str) -> frozenset[tuple[str, str]]:
    return frozenset((pair[:2], pair[2:]) for pair in names)


@pytest.mark.parametrize(
    "broken", [(), ("p0d0",), ("p0d0", "p1d0"), ("p0d0", "p1d0", "p0d1", "p1d1")]
)
def test_a_broken_pair_is_chosen_only_if_all_are_broken(broken: tuple[str, ...]) -> None:
    state = priced(
        *(prefill_status(name) for name in ("p0", "p1")), decode_status("d0"), decode_status("d1")
    )
    query = replace(QUERY, broken=pairs(*broken))
    by_price = decision(state, query)
    assert by_price.prefill is not None
    assert ((by_price.prefill, by_price.decode) in query.broken) == (len(broken) == 4)


def test_a_decode_worker_without_a_link_computes_the_prompt_itself_if_it_can() -> None:
    query = replace(TURN, cached={}, work=Work(200, expected_tokens=100))
    state = priced(prefill_status("p0"), appends("d0", 8, 4000))
    assert decision(state, query).prefill == "p0"
    assert decision(state, replace(query, broken=pairs("p0d0"))).prefill is None


def test_another_source_is_one_whose_link_works() -> None:
    state = state_of((status("p0", P), status("p1", P, running=3), status("d0", D)))
    chosen = [
        another_prefill(state, frozenset(), 0.0, RULES, "d0", pairs(*broken))
        for broken in ((), ("p0d0",), ("p0d1",), ("p0d0", "p1d0"))
    ]
    assert chosen == ["p0", "p1", "p0", "p0"]


def test_a_pair_is_tried_again_after_a_while_and_forgotten_with_its_workers() -> None:
    lives = {"p0": 1, "d0": 1, "d1": 1}
    breakers = Breakers[tuple[str, str]](lives.__getitem__, 1, Backoff(1.0, 4.0))
    breakers.failed(("p0", "d0"), 10.0)
    assert breakers.barred(10.5) == pairs("p0d0")
    assert not breakers.barred(11.0), "the next attempt is the probe"
    breakers.placed(("p0", "d0"), 11.0)
    assert breakers.barred(11.5) == pairs("p0d0")
    breakers.failed(("p0", "d0"), 11.6)
    assert breakers.barred(13.5) == pairs("p0d0"), "twice as long"
    breakers.failed(("p0", "d1"), 13.5)
    breakers.succeeded(("p0", "d0"))
    assert breakers.barred(13.6) == pairs("p0d1")
    lives["d1"] = 2
    assert not breakers.barred(13.6), "another process, another link"

"""A decision that was recorded is decided again to the same answer, from its JSON alone."""

import json
import random

import pytest

from jdisagg.errors import ConfigError
from jdisagg.router.accounts import Work
from jdisagg.router.decision import Decision, PlacementPolicy, PlacementQuery
from jdisagg.router.decision_record import answer_of, record_of, replay
from jdisagg.router.placement import decide
from tests.router.fleets import accounts_of, random_fleet


@pytest.mark.parametrize(
    ("seed", "prefills", "decodes"), [(0, 1, 1), (1, 5, 4), (2, 40, 60), (3, 200, 100)]
)
def test_a_recorded_decision_replays_to_the_same_from_its_json(
    seed: int, prefills: int, decodes: int
) -> None:
    accounts, draw = random_fleet(seed, prefills, decodes), random.Random(seed)
    kinds = set()
    for number in range(60):
        work = Work(
            draw.randrange(1, 8000),
            expected_tokens=draw.randrange(1, 600),
            children=draw.choice([1, 1, 1, 3]),
        )
        names = draw.sample(list(accounts.state), min(4, len(accounts.state)))
        cached = (
            {name: draw.randrange(0, 4000) for name in names[:3]} if draw.random() < 0.4 else {}
        )
        limit = draw.choice([float("inf"), 0.05, 0.3, 2.0])
        query = PlacementQuery(
            work,
            cached,
            frozenset(names[3:]),
            draw.random() < 0.2,
            False,
            draw.random() * 0.1,
            0.0,
            limit,
            draw.random() * 300,
        )
        policy = PlacementPolicy(
            tpot_slo_seconds=draw.choice([float("inf"), 0.02]), hold_seconds=draw.choice([0.2, 2.0])
        )
        answer = decide(accounts.state, query, 0.0, policy)
        line = json.dumps(record_of(accounts.state, query, 0.0, policy, answer), allow_nan=False)
        assert answer_of(json.loads(line)) == answer
        assert replay(json.loads(line)) == answer
        kinds.add(type(answer).__name__)
        if isinstance(answer, Decision) and number % 2:
            accounts.place(answer.prefill, answer.decode, work, 0.0)
    assert len(kinds) > 1, "held and refused ones were among them"


def test_what_is_no_record_is_refused() -> None:
    accounts = accounts_of({})
    assert len(accounts.state) == 0
    for broken in (
        {},
        {"version": 99},
        {"version": 1, "now": 0, "ask": {}, "rules": {}, "kinds": [], "workers": []},
    ):
        with pytest.raises(ConfigError, match="record"):
            replay(broken)

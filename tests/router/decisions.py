"""Decisions over a fleet that a test describes."""

import msgspec

from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.router.accounts import Work
from jdisagg.router.cluster_state import ClusterState
from jdisagg.router.decision import Decision, PlacementPolicy, PlacementQuery
from jdisagg.router.placement import decide
from tests.router.fleets import decode_status

APPEND = 256


# A turn of 200 tokens behind a history that the decode worker keeps.
TURN = PlacementQuery(Work(4200, expected_tokens=100), cached={"d0": 4000})


def appends(name: str, sequences: int = 0, contexts: int = 0) -> WorkerStatus:
    status = decode_status(name, (sequences,), (contexts,), can_prefill=True)
    return msgspec.structs.replace(status, chunk_tokens=APPEND)


ASK = PlacementQuery(Work(1000, expected_tokens=100))
EASY = PlacementPolicy(hold_seconds=1e9)


def decision(
    state: ClusterState,
    query: PlacementQuery = ASK,
    policy: PlacementPolicy = EASY,
    now: float = 0.0,
) -> Decision:
    answer = decide(state, query, now, policy)
    assert isinstance(answer, Decision), answer
    return answer


def closeness(one: str, other: str) -> int:
    shared = [a == b for a, b in zip(one.split("/"), other.split("/"), strict=True)]
    return shared.index(False) if False in shared else len(shared)

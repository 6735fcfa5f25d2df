"""Chooses a worker that continues a running request after its worker failed or drains. Has no side
effects."""

import numpy as np

from jdisagg.router.candidates import FAILED, Candidates, broken_pairs, no_worker, usable
from jdisagg.router.cluster_state import ClusterState
from jdisagg.router.decision import PlacementPolicy, PlacementQuery
from jdisagg.router.placement import NO_WORK


def another_prefill(
    state: ClusterState,
    avoid: frozenset[str],
    now: float,
    policy: PlacementPolicy,
    decode: str = "",
    broken: frozenset[tuple[str, str]] = frozenset(),
) -> str:
    """Returns another prefill worker for a prompt whose prefill worker failed. `decode` is its
    decode worker. A worker in `avoid`, or one that forms a pair of `broken` with `decode`, is
    chosen only if no other worker is available."""
    query = PlacementQuery(NO_WORK, avoid=avoid, broken=broken, resuming=True)
    some = usable(state, state.prefill, query, now, policy)
    some = _like(state, some, decode)
    if not len(some):
        raise no_worker(state, state.prefill, "prefill")
    reluctance = some.against + some.load
    if broken and decode in state:
        decodes = np.array([state.row_of(decode)])
        reluctance = reluctance + broken_pairs(state, query, some.rows, decodes)[:, 0]
    return state.name(int(some.rows[np.argmin(reluctance)]))


def another_decode(
    state: ClusterState,
    avoid: frozenset[str],
    now: float,
    policy: PlacementPolicy,
    origin: str = "",
) -> str:
    """Returns the decode worker to which a running sequence of `origin` should migrate. Draining
    workers and workers in `avoid` are never chosen."""
    some = usable(state, state.decode, PlacementQuery(NO_WORK, avoid=avoid), now, policy)
    some = _like(state, some.where(some.against < FAILED), origin)
    if not len(some):
        raise no_worker(state, state.decode, "other decode")
    return state.name(int(some.rows[np.argmin(some.against + some.load)]))


def _like(state: ClusterState, some: Candidates, other: str) -> Candidates:
    row = state.row(other)
    if row is None:
        return some
    return some.where(some.table["weights"] == state.table["weights"][row])

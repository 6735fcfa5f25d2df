"""Selects the workers that may serve an attempt, with a penalty in seconds for each. Has no side
effects.

Workers that are gone are never candidates. Draining workers and workers whose heartbeats are late
are candidates, with a penalty, only if the request has tokens already. Workers with an open circuit
breaker have a larger penalty. Workers that failed this request have the largest penalty."""

import numpy as np

from jdisagg.costs.speeds import Array
from jdisagg.errors import NoWorkerError
from jdisagg.plain import plain
from jdisagg.router.cluster_state import ClusterState, Flags, Side, Table
from jdisagg.router.decision import PlacementPolicy, PlacementQuery
from jdisagg.router.link_costs import Indices

# Penalties (s), each larger than any prediction.
DRAINING, BARRED, FAILED = 1e6, 1e7, 1e8
# Penalty of a pair (s): larger than any prediction, smaller than the penalties of workers.
BROKEN = 5e5


@plain
class Candidates:
    """Workers of one `side` (prefill or decode) that may be chosen.

    Attributes:
        against: Penalty of each worker in seconds.
    """

    side: Side
    rows: Indices
    table: Table
    against: Array

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, which: Flags | Indices) -> "Candidates":
        places = np.arange(len(self))[which]
        return Candidates(
            self.side, self.rows[places], self.table.take(places), self.against[places]
        )

    @property
    def penalties(self) -> Array | None:
        """For each worker, its penalty. None if all are 0."""
        return None if self.against is self.side.zeros else self.against

    @property
    def trusted(self) -> Flags | None:
        return None if self.against is self.side.zeros else self.against < BARRED

    @property
    def load(self) -> Array:
        """Load of each worker: requests per decode slot, plus the fraction of KV pages in use."""
        table = self.table
        requests = np.maximum(table["running"] + table["waiting"], table["open"])
        pages = 1.0 - table["free_pages"] / np.maximum(1.0, table["total_pages"])
        return requests / np.maximum(1.0, table["slots"]) + pages


def candidates(
    state: ClusterState, query: PlacementQuery, now: float, policy: PlacementPolicy
) -> tuple[Candidates, Candidates]:
    """Returns the prefill and decode workers that may be chosen. Raises NoWorkerError if a needed
    role has none."""
    prefills = usable(state, state.prefill, query, now, policy)
    decodes = usable(state, state.decode, query, now, policy)
    prefills, decodes = with_partners(prefills, decodes)
    if not len(decodes):
        raise no_worker(state, state.decode, "decode")
    if not len(prefills) and not decodes.table.flag("can_prefill").any():
        raise no_worker(state, state.prefill, "prefill")
    return prefills, decodes


def usable(
    state: ClusterState, side: Side, query: PlacementQuery, now: float, policy: PlacementPolicy
) -> Candidates:
    rows, table = side.rows, side.table or state.table.take(side.span)
    all_well = not (side.draining or query.avoid or query.loads) and now >= state.barred_until
    if all_well and not state.silent_for(now, min(policy.suspect_seconds, policy.gone_seconds)):
        return Candidates(side, rows, table, side.zeros)
    silent = now - table["heard_at"]
    leaving = table.flag("draining") | (silent > policy.suspect_seconds)
    out = (silent > policy.gone_seconds) | table.flag("asleep")
    if not query.resuming:
        out |= leaving
    if np.count_nonzero(out):
        left = np.flatnonzero(~out)
        rows, table, leaving = rows[left], table.take(left), leaving[left]
    against = np.zeros(len(rows))
    for which, seconds in ((leaving, DRAINING), (table["barred_until"] > now, BARRED)):
        if np.count_nonzero(which):
            against += np.where(which, seconds, 0.0)
    for name in query.avoid:
        row = state.row(name)
        if row is not None:
            against[rows == row] += FAILED
    for name, seconds in query.loads.items():
        row = state.row(name)
        if row is not None:
            against[rows == row] += seconds
    return Candidates(side, rows, table, against)


def with_partners(prefills: Candidates, decodes: Candidates) -> tuple[Candidates, Candidates]:
    """Leaves out workers that can serve no request because of their weights: prefill workers if no
    decode worker has the same weights, and decode workers that can neither pair with a prefill
    worker nor compute prompts."""
    ours, theirs = prefills.side.weights, decodes.side.weights
    if (ours is not None and ours == theirs) or not len(prefills):
        return prefills, decodes
    able = decodes.table.flag("can_prefill") | decodes.table.flag("mixed")
    left = decodes.where(able | partnered(decodes, prefills))
    return prefills.where(partnered(prefills, decodes)), left


def partnered(some: Candidates, others: Candidates) -> Flags:
    return np.isin(some.table["weights"], others.table["weights"])


def apart(state: ClusterState, prefills: Indices, decodes: Indices) -> Flags | None:
    """Returns a mask [prefill workers, decode workers] of the pairs that cannot hand over KV,
    because their weights differ. Returns None if there are no such pairs."""
    if state.prefill.weights is not None and state.prefill.weights == state.decode.weights:
        return None
    weights = state.table["weights"]
    return weights[prefills][:, None] != weights[decodes][None, :]


def broken_pairs(
    state: ClusterState, query: PlacementQuery, prefills: Indices, decodes: Indices
) -> Array:
    against = np.zeros((len(prefills), len(decodes)))
    for prefill, decode in query.broken:
        here, there = prefills == state.row_of(prefill), decodes == state.row_of(decode)
        against[np.ix_(here, there)] = BROKEN
    return against


def no_worker(state: ClusterState, side: Side, kind: str) -> NoWorkerError:
    rows = side.rows

    def said(row: int) -> str:
        return f"{state.name(row)} ({_why_not(state.table, row)})"

    known = ", ".join(said(int(row)) for row in rows[:8]) or "none"
    more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
    error = NoWorkerError(
        f"no {kind} worker takes requests; known: {known}{more}", retry_after_seconds=1.0
    )
    error.role = "prefill" if side is state.prefill else "decode"
    return error


def _why_not(table: Table, row: int) -> str:
    if table.flag("asleep")[row]:
        return "asleep"
    return "draining" if table.flag("draining")[row] else "silent, avoided or of other weights"

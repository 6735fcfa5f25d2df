"""Effect of fetching cached KV from another worker (`worker/peer_fetch.py`) on the predicted
seconds of each candidate.

One holder is the prefill worker with the most cached tokens, the least busy of several. Another
is the decode worker with the most (`PlacementPolicy.fetch_from_decode`), of several the one
with the shortest steps in progress. Each candidate pays the least of two ways: compute what it
lacks itself, or fetch from a holder and compute what that holder lacks. The fetch follows what
either mesh has issued and overlaps with the candidate's own queue. Pure arithmetic. The holder
decides what it gives when it is asked."""

from dataclasses import replace

import numpy as np

from jdisagg.costs.speeds import Array
from jdisagg.plain import plain
from jdisagg.router.cluster_state import ClusterState, Flags, Side, Table
from jdisagg.router.cost_terms import DecodeCosts, Holder, PrefillCosts, alike, known_at
from jdisagg.router.decision import PlacementPolicy, PlacementQuery
from jdisagg.router.link_costs import Indices

# of a mesh at work: what is extracted or inserted comes behind them (worker/step_loop.py)
CHUNKS_ISSUED = STEPS_ISSUED = 2


@plain
class Trusted:
    """Which prefill and decode workers KV may be fetched from, or None if all."""

    prefills: Flags | None = None
    decodes: Flags | None = None


def with_fetches(
    state: ClusterState,
    side: Side,
    costs: PrefillCosts,
    table: Table,
    decodes: DecodeCosts,
    trusted: Trusted,
    query: PlacementQuery,
    policy: PlacementPolicy,
) -> PrefillCosts:
    """Returns the costs of prefill workers, some or all of `side`, where each may fetch."""
    queue = np.maximum(0.0, costs.queue)
    waiting = np.minimum(queue, _issued(state, side, table))
    holders = _prefill_holders(costs, waiting, trusted)
    if policy.fetch_from_decode:
        holders += _decode_holders(state, decodes, trusted, query)
    if not holders:
        return costs
    every = state.prefill.rows
    places = slice(None) if costs.rows is every else every.searchsorted(costs.rows)
    best, chosen, spared = costs.prefill, np.full(len(costs.rows), -1), costs.spared
    cold = costs.prefill + costs.spared
    for which, holder in enumerate(holders):
        missing = np.full(len(costs.rows), float(holder.tokens))
        missing[costs.known[0]] -= costs.known[1]
        if holder.decodes:
            links, among = state.return_costs(policy.far), state.decode.rows
        else:
            links, among = state.peer_costs(policy.far), every
        source = among.searchsorted(np.array([holder.row]))
        moving = links.seconds(source, places, missing)[0] + holder.issued_seconds + waiting
        computing = _computing(state, side, table, query, holder)
        fetched = np.maximum(0.0, moving - queue) + computing
        pays = (fetched < best) & (missing > 0)
        if np.count_nonzero(pays):
            best, chosen = np.where(pays, fetched, best), np.where(pays, which, chosen)
            spared = np.where(pays, cold - computing, spared)
    return replace(costs, prefill=best, spared=spared, holders=holders, fetches=chosen)


def _prefill_holders(costs: PrefillCosts, waiting: Array, trusted: Trusted) -> tuple[Holder, ...]:
    """Returns one holder or none. `waiting`: By worker, seconds until its issued steps are done."""
    at, known = _asked(costs.known, trusted.prefills)
    if not len(at) or len(costs.rows) < 2:
        return ()
    tokens = known.max()
    most = np.sort(at[known == tokens])  # independent of the order of reports
    place = int(most[costs.queue[most].argmin()])
    return (Holder(int(costs.rows[place]), int(tokens), float(waiting[place])),)


def _decode_holders(
    state: ClusterState, costs: DecodeCosts, trusted: Trusted, query: PlacementQuery
) -> tuple[Holder, ...]:
    """Returns one holder or none."""
    at, known = _asked(known_at(state, costs.rows, query), trusted.decodes)
    if not len(at):
        return ()
    tokens = known.max()
    most = np.sort(at[known == tokens])
    waits = np.where(costs.busy[most], STEPS_ISSUED * costs.step[most], 0.0)
    best = int(waits.argmin())
    return (Holder(int(costs.rows[most[best]]), int(tokens), float(waits[best]), decodes=True),)


def _asked(known: tuple[Indices, Array], trusted: Flags | None) -> tuple[Indices, Array]:
    at, tokens = known
    if trusted is not None and len(at):
        asked = np.flatnonzero(trusted[at])
        at, tokens = at[asked], tokens[asked]
    return at, tokens


def _issued(state: ClusterState, side: Side, table: Table) -> Array:
    """Returns the seconds of issued chunks of each busy prefill worker."""
    seconds = np.empty(len(table))
    for speed, chunk, which in alike(state, side, table):
        seconds[which] = CHUNKS_ISSUED * speed.backlog_rates(chunk)[0] * chunk
    return seconds


def _computing(
    state: ClusterState, side: Side, table: Table, query: PlacementQuery, holder: Holder
) -> Array:
    """Returns the seconds of each prefill worker for what the holder lacks."""
    seconds = np.empty(len(table))
    new, known = np.array([query.work.tokens - holder.tokens]), np.array([holder.tokens])
    for speed, chunk, which in alike(state, side, table):
        seconds[which] = speed.prefills_seconds(new.astype(float), known.astype(float), chunk)[0]
    return seconds

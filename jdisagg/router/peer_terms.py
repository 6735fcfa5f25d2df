"""Predicts the prefill costs of each candidate if it fetches cached KV from another worker, the
holder (`worker/peer_fetch.py`).

At most two holders are considered: the prefill worker with the most cached tokens, and, if
`PlacementPolicy.fetch_from_decode` is set, the decode worker with the most cached tokens. A
candidate is charged the cheaper of two ways: compute all tokens that are not cached, or fetch KV
from a holder and compute the rest. A fetch starts after the steps already issued to both meshes,
and overlaps with the candidate's queue."""

from dataclasses import replace

import numpy as np

from jdisagg.costs.speeds import Array
from jdisagg.plain import plain
from jdisagg.router.cluster_state import ClusterState, Flags, Side, Table
from jdisagg.router.cost_terms import DecodeCosts, Holder, PrefillCosts, alike, known_at
from jdisagg.router.decision import PlacementPolicy, PlacementQuery
from jdisagg.router.link_costs import Indices

# Number of chunks or steps that a busy mesh has been issued already. KV is read or written after
# these.
CHUNKS_ISSUED = STEPS_ISSUED = 2


@plain
class Trusted:
    """For each prefill worker and each decode worker, whether KV may be fetched from it. None means
    that KV may be fetched from all of them."""

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
        pays = _cheaper(query, queue + fetched, queue + best, chosen) & (missing > 0)
        if np.count_nonzero(pays):
            best, chosen = np.where(pays, fetched, best), np.where(pays, which, chosen)
            spared = np.where(pays, cold - computing, spared)
    return replace(costs, prefill=best, spared=spared, holders=holders, fetches=chosen)


def _cheaper(query: PlacementQuery, fetched: Array, best: Array, chosen: Indices) -> Flags:
    computing, fetching = query.corrections.prefill, query.corrections.fetch
    constant, factor = (
        np.where(chosen < 0, ours, theirs) for ours, theirs in zip(computing, fetching, strict=True)
    )
    return fetching[0] + fetching[1] * fetched < constant + factor * best


def _prefill_holders(costs: PrefillCosts, waiting: Array, trusted: Trusted) -> tuple[Holder, ...]:
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
    seconds = np.empty(len(table))
    for speed, chunk, which in alike(state, side, table):
        seconds[which] = CHUNKS_ISSUED * speed.backlog_rates(chunk)[0] * chunk
    return seconds


def _computing(
    state: ClusterState, side: Side, table: Table, query: PlacementQuery, holder: Holder
) -> Array:
    seconds = np.empty(len(table))
    new, known = np.array([query.work.tokens - holder.tokens]), np.array([holder.tokens])
    for speed, chunk, which in alike(state, side, table):
        seconds[which] = speed.prefills_seconds(new.astype(float), known.astype(float), chunk)[0]
    return seconds

"""Predicts the seconds of each stage of one attempt, for all candidates at once. Has no side
effects.

A prefill worker has two stages: its backlog, and the prompt itself. A decode worker has two stages:
the wait until it has room, and a decode step that includes the sequence.

A decode worker has room if all of these hold: a slot is free, the rank with the most free pages has
enough of them, there are pages for the expected growth of this router's sequences, the queue is
empty, and the step is within the TPOT bound. Slots and pages of sequences of lower priority count
as free, because the worker preempts these sequences.

A candidate may fetch cached KV from another worker, the holder (`worker/incoming_kv.py`). At most
two holders are considered: the prefill worker with the most cached tokens, and, if
`PlacementPolicy.fetch_from_decode` is set, the decode worker with the most cached tokens. A
candidate is charged the cheaper of two ways: compute all tokens that are not cached, or fetch KV
from a holder and compute the rest. A fetch starts after the steps already issued to both meshes,
and overlaps with the candidate's queue."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from jdisagg.costs.hardware import Link
from jdisagg.costs.speeds import Array, Speed
from jdisagg.plain import plain
from jdisagg.router.accounts import GROWTH_TOKENS, Work
from jdisagg.router.candidates import Candidates
from jdisagg.router.cluster_state import ClusterState, Flags, Side, Table
from jdisagg.router.decision import Decision, PlacementPolicy, PlacementQuery
from jdisagg.router.link_costs import Indices
from jdisagg.router.prefix_index import ByWorker

# Steps from the KV's arrival to the first token decoded from it. A busy mesh runs one step and has
# one more in its queue (worker/step_loop.py). On average, half of the first and all of the second
# must end before the KV is inserted. Another step, which was issued before, follows, and then the
# first step with the sequence. An idle mesh runs only the last of these.
STEPS_TO_JOIN = 3.5
STEPS_ALONE = 1.0
# Share of the time left by the TPOT bound that prefills may use. It is below 1 because some streams
# are delayed by more prefills than others.
PACED_SHARE = 0.9
LEAST_PACED_SHARE = 0.05  # least share of all time, if a step alone takes nearly the whole bound
_NOWHERE, _NOTHING, _NO_FLAG = np.empty(0, np.intp), np.empty(0), np.zeros(1, bool)


@plain
class Holder:
    """A worker from which prefill workers may fetch cached KV.

    Attributes:
        issued_seconds: Seconds until the commands that were already issued to the worker's mesh are
            done.
    """

    row: int
    tokens: int
    issued_seconds: float
    decodes: bool = False


@plain
class PrefillCosts:
    """Predicted costs of the prefill workers `rows`, in seconds, one entry per worker.

    Attributes:
        queue: Seconds until the worker's earlier prompts are computed.
        spared: Prefill seconds that cached or fetched tokens save.
        known: Indices of the workers that have tokens of the prompt cached, and the number of
            cached tokens of each.
        fetches: For each worker, the index in `holders` of the worker from which it fetches KV, or
            -1 if it fetches none. None if no worker fetches.
    """

    rows: Indices
    queue: Array
    prefill: Array
    spared: Array
    chunks: Array
    known: tuple[Indices, Array]
    holders: tuple[Holder, ...] = ()
    fetches: Indices | None = None

    def few(self, places: Indices) -> "PrefillCosts":
        return PrefillCosts(
            self.rows.take(places),
            self.queue.take(places),
            self.prefill.take(places),
            self.spared.take(places),
            self.chunks.take(places),
            (_NOWHERE, _NOTHING),
            self.holders,
            None if self.fetches is None else self.fetches.take(places),
        )


@plain
class DecodeCosts:
    """Predicted costs of the decode workers `rows`, one entry per worker.

    Attributes:
        queue: Seconds until the worker has room for the sequence.
        step: Seconds of a decode step that includes the sequence.
    """

    rows: Indices
    queue: Array
    step: Array
    busy: Flags
    room: bool = False

    @property
    def join(self) -> Array:
        return np.where(self.busy, STEPS_TO_JOIN, STEPS_ALONE) * self.step

    def join_of(self, which: int) -> float:
        return (STEPS_TO_JOIN if self.busy[which] else STEPS_ALONE) * float(self.step[which])


@plain
class LocalCosts:
    """Predicted costs of decode workers if they compute the prompt themselves, one entry per
    worker.

    Attributes:
        costs: Costs of the prefill. If sequences are running, each chunk is followed by one of
            their decode steps.
        lost: Seconds of the prefill chunks without the decode steps. The running streams are
            delayed by this time.
        longest: Longest time in seconds that a running stream waits for a token during the prefill.
        paced: Seconds until running streams have recovered from the delay that the worker's last
            prompt caused.
    """

    costs: PrefillCosts
    lost: Array
    lacking: Array
    longest: Array
    paced: Array


def prefills_of(state: ClusterState, some: Candidates, query: PlacementQuery) -> PrefillCosts:
    side, rows, table = some.side, some.rows, some.table
    tokens = table["queued_tokens"] + table["own_tokens"]
    pairs = table["queued_pairs"] + table["own_pairs"]
    if query.yielding:
        rest = np.maximum(0.0, tokens - yielding_at(state, rows, query)[3])
        pairs, tokens = pairs * rest / np.maximum(1.0, tokens), rest
    if side.speed is not None and side.chunk_tokens is not None and len(rows):
        per_token, per_pair = side.speed.backlog_rates(side.chunk_tokens)
        queue = tokens * per_token + pairs * per_pair
        zeros = side.zeros if rows is side.rows else np.zeros(len(rows))
        prefill = zeros + side.speed.prefill_seconds(query.work.tokens, 0, side.chunk_tokens)
        chunks = zeros + _chunks(query.work.tokens, side.chunk_tokens)
    else:
        queue, prefill, chunks = np.empty(len(rows)), np.empty(len(rows)), np.empty(len(rows))
        for speed, chunk, which in alike(state, side, table):
            per_token, per_pair = speed.backlog_rates(chunk)
            queue[which] = tokens[which] * per_token + pairs[which] * per_pair
            prefill[which] = speed.prefill_seconds(query.work.tokens, 0, chunk)
            chunks[which] = _chunks(query.work.tokens, chunk)
    if side.several_ranks:
        queue = queue / table["ranks"]
    at, cached = known_at(state, rows, query)
    spared = np.zeros(len(rows))
    if len(at):
        holding, cold = table.take(at), prefill[at]
        for speed, chunk, which in alike(state, side, holding):
            prefill[at[which]] = speed.prefills_seconds(
                query.work.tokens - cached[which], cached[which], chunk
            )
        spared[at] = cold - prefill[at]
    if query.coming:
        _spare_coming(state, some, query, (prefill, spared), (at, cached))
    return PrefillCosts(rows, queue, prefill, spared, chunks, (at, cached))


def _spare_coming(
    state: ClusterState,
    some: Candidates,
    query: PlacementQuery,
    costs: tuple[Array, Array],
    known: tuple[Indices, Array],
) -> None:
    prefill, spared = costs
    cached = np.zeros(len(some))
    cached[known[0]] = known[1]
    at, coming = _tokens_at(state, some.rows, query.coming, query.most_known)
    more = np.flatnonzero(coming > cached[at])
    at, coming = at[more], coming[more]
    for speed, chunk, which in alike(state, some.side, some.table.take(at)) if len(at) else ():
        places, tokens = at[which], coming[which]
        seconds = speed.prefills_seconds(query.work.tokens - tokens, tokens, chunk)
        spared[places] += prefill[places] - seconds
        prefill[places] = seconds


def decodes_of(
    state: ClusterState, some: Candidates, query: PlacementQuery, policy: PlacementPolicy
) -> DecodeCosts:
    side, rows, table, work = some.side, some.rows, some.table, query.work
    ranks = table["ranks"] if side.several_ranks else 1
    ours, waiting = table["own_sequences"], table["waiting"]
    here = table["running"] + ours
    busy = here > 0
    step = _step_seconds(state, side, table, work, ranks)
    page = (
        max(1.0, side.page_size)
        if side.page_size is not None
        else np.maximum(1.0, table["page_size"])
    )
    total, own_pages = table["total_pages"], table["own_pages"]
    used = total - table["free_pages"] + own_pages
    now_short = (
        _pages(work, page, GROWTH_TOKENS) - table["best_free_pages"] + _each(own_pages, ranks)
    )
    committed, staying = np.maximum(used, table["committed_pages"]), here
    slow = step > policy.tpot_slo_seconds if policy.tpot_slo_seconds < np.inf else _NO_FLAG
    if query.yielding:
        yielding = yielding_at(state, rows, query)
        waiting = np.maximum(0.0, waiting - yielding[2])
        committed *= 1.0 - np.minimum(1.0, yielding[0] / np.maximum(1.0, here))
        now_short -= _each(yielding[1], ranks)
        staying = here - yielding[0]
        slow = slow & (yielding[0] < work.children)
    later_short = committed + _pages(work, page, work.expected_tokens) - total
    room = side.room if rows is side.rows else side.room.take(side.rows.searchsorted(rows))
    slots_short = staying + work.children - room
    shortest = np.maximum(np.maximum(now_short, later_short), slots_short)
    late = np.count_nonzero(slow) or np.count_nonzero(waiting)
    if not late and np.maximum.reduce(shortest, initial=0.0) <= 0:
        zeros = side.zeros if rows is side.rows else np.zeros(len(rows))
        return DecodeCosts(rows, zeros, step, busy, room=True)
    # Pages that the end of a sequence frees now, and those that it would have used later.
    each = np.maximum(1.0, used / np.maximum(1.0, here))
    later_each = np.maximum(1.0, committed / np.maximum(1.0, staying))
    leaving = np.maximum(now_short / each, later_short / later_each)
    leaving = np.maximum(leaving, slots_short) + waiting
    if np.count_nonzero(slow):
        leaving = np.where(slow & (leaving < 1.0), 1.0, leaving)
    # An empty worker never gets more room, and refuses requests that need more than it has.
    waits = (leaving > 0) & (here + waiting > 0)
    queue = np.zeros(len(rows))
    if np.count_nonzero(waits):
        running = np.maximum(1.0, np.minimum(here, table["slots"]))
        queue = np.where(waits, np.ceil(leaving) * query.typical_tokens * step / running, queue)
    return DecodeCosts(rows, queue, step, busy)


def _step_seconds(
    state: ClusterState, side: Side, table: Table, work: Work, ranks: Array | int
) -> Array:
    sequences = table["best_sequences"] + _each(table["own_sequences"], ranks) + work.children
    contexts = (
        table["best_contexts"] + _each(table["own_contexts"], ranks) + work.children * work.tokens
    )
    sequences = np.maximum(sequences, table["most_sequences"])
    contexts = np.maximum(contexts, table["most_contexts"])
    # More sequences than slots wait for a slot, and are in no step.
    slots = _each(table["slots"], ranks)
    if np.count_nonzero(sequences > slots):
        stepped = np.minimum(1.0, np.maximum(1.0, slots) / sequences)
        sequences, contexts = stepped * sequences, stepped * contexts
    if side.speed is not None and len(sequences):
        return side.speed.step_seconds(sequences, contexts)
    step = np.empty(len(sequences))
    for speed, _, which in alike(state, side, table, chunks=False):
        step[which] = speed.step_seconds(sequences[which], contexts[which])
    return step


def transfers_of(
    state: ClusterState,
    prefills: Indices,
    decodes: Indices,
    query: PlacementQuery,
    far: Link,
    places: Indices | None = None,
) -> Array:
    """Returns the seconds to transfer the KV that each decode worker lacks, over the best link of
    each pair. The shape is [prefill workers, decode workers]. `places` are the indices of the
    prefill workers in `state.prefill`, if they are known."""
    missing: Array | float = float(query.work.tokens)
    at, cached = _tokens_at(state, decodes, query.cached, query.work.tokens)
    if len(at):
        missing = np.full(len(decodes), missing)
        missing[at] -= cached
    every = state.decode.rows
    there = slice(None) if decodes is every else every.searchsorted(decodes)
    if places is None:
        places = state.prefill.rows.searchsorted(prefills)
    return state.link_costs(far).seconds(places, there, missing)


def too_far(
    state: ClusterState,
    prefills: PrefillCosts,
    decodes: Table,
    query: PlacementQuery,
    policy: PlacementPolicy,
) -> Flags:
    """Returns a mask [prefill workers, decode workers] of pairs to avoid. The two workers are in
    different racks, and the prompt has too few uncached tokens to be computed in another rack."""
    unknown = np.full(len(prefills.rows), float(query.work.tokens))
    at, known = known_at(state, prefills.rows, query)
    unknown[at] -= known
    apart = state.table["rack"].take(prefills.rows)[:, None] != decodes["rack"]
    return apart & (unknown < policy.far_prefill_tokens)[:, None]


def most_computed(table: Table, whole: bool = False) -> Array:
    """Returns the largest number of prompt tokens that each decode worker computes itself. Mixed
    workers have no limit. Workers with --append_tokens compute at most one chunk, and none if
    `whole` is set (log-probabilities of the prompt are requested). Other workers compute none."""
    able = table.flag("can_prefill") & (not whole)
    appended = np.where(able, table["chunk_tokens"], 0.0)
    return np.where(table.flag("mixed"), np.inf, appended)


def local_prefills(
    state: ClusterState, some: Candidates, decodes: DecodeCosts, query: PlacementQuery, now: float
) -> LocalCosts:
    alone, table = prefills_of(state, some, query), some.table
    lacking = np.full(len(decodes.rows), float(query.work.tokens))
    at, cached = alone.known
    lacking[at] -= cached
    chunk_tokens = table["chunk_tokens"]
    chunks = np.ceil(lacking / np.where(chunk_tokens > 0, chunk_tokens, lacking))
    turns = np.where(decodes.busy, chunks * decodes.step, 0.0)
    paced = np.where(decodes.busy, table["paced_until"] - now, 0.0)
    queue = np.maximum(alone.queue, paced)
    costs = replace(alone, queue=queue, prefill=alone.prefill + turns, chunks=chunks)
    longest = alone.prefill / chunks + decodes.step
    return LocalCosts(costs, alone.prefill, lacking, longest, paced)


def paced_until(
    state: ClusterState,
    query: PlacementQuery,
    decision: Decision,
    policy: PlacementPolicy,
    now: float,
) -> float | None:
    """Returns the earliest start time of a mixed worker's next prompt after this decision, or None
    if it may start at any time.

    While a mesh computes a prompt, its running streams get no tokens. Decode steps alone keep the
    TPOT bound (see `decodes_of`). Steps and prefills together keep the bound if prefills take at
    most the share `1 - step / tpot_slo_seconds` of the time. Each prompt therefore moves
    `paced_until` forward by the prompt's prefill seconds divided by that share. Until then the next
    prompt waits at the router, which can still reorder or refuse it. Prompts of all dp ranks count,
    because all ranks wait while one computes."""
    row, bound = state.row(decision.decode), policy.tpot_slo_seconds
    if decision.prefill is not None or bound == math.inf or row is None:
        return None
    chunk_tokens, before = (
        int(state.table["chunk_tokens"][row]),
        float(state.table["paced_until"][row]),
    )
    speed = state.speeds[int(state.table["speed"][row])]
    seconds = speed.prefill_seconds(
        query.work.tokens - decision.cached_tokens, decision.cached_tokens, chunk_tokens
    )
    part = max(LEAST_PACED_SHARE, PACED_SHARE * (1.0 - decision.terms.step / bound))
    return max(before, now) + seconds / part


def yielding_at(state: ClusterState, rows: Indices, query: PlacementQuery) -> Array:
    found = np.zeros((4, len(rows)))
    for at, row in enumerate(rows):
        if (load := query.yielding.get(state.name(int(row)))) is not None:
            found[:, at] = load
    return found


def known_to(worker: str, query: PlacementQuery) -> int:
    return min(query.cached.get(worker, 0), query.most_known)


def known_at(state: ClusterState, rows: Indices, query: PlacementQuery) -> tuple[Indices, Array]:
    """Returns the indices, in ascending `rows`, of the workers that have prompt tokens cached, and
    the number of tokens that each of them need not compute."""
    return _tokens_at(state, rows, query.cached, query.most_known)


def _tokens_at(
    state: ClusterState, rows: Indices, cached: Mapping[str, int], most: int
) -> tuple[Indices, Array]:
    if not cached or not len(rows):
        return _NOWHERE, _NOTHING
    if isinstance(cached, ByWorker):
        wanted, tokens = state.rows_of(cached.roster), cached.counts
    else:
        wanted = np.fromiter(map(state.row_of, cached), np.intp, len(cached))
        tokens = np.fromiter(cached.values(), np.int64, len(cached))
    places = np.minimum(rows.searchsorted(wanted), len(rows) - 1)
    here = np.flatnonzero((rows.take(places) == wanted) & (tokens > 0))
    known = np.minimum(tokens.take(here), most)
    return places.take(here), known.astype(np.float64)


def _pages(work: Work, page: Array | float, growth_tokens: int) -> Array | float:
    grown = work.tokens + min(growth_tokens, work.expected_tokens)
    if isinstance(page, float):
        alike = math.ceil(work.tokens / page)
        return float(alike + work.children * (math.ceil(grown / page) - alike))
    shared = np.ceil(work.tokens / page)
    return shared + work.children * (np.ceil(grown / page) - shared)


def _chunks(tokens: int, chunk_tokens: int) -> int:
    return -(-tokens // chunk_tokens) if chunk_tokens else 1


def _each(column: Array, ranks: Array | int) -> Array:
    return column if isinstance(ranks, int) else column / ranks


def alike(
    state: ClusterState, side: Side, table: Table, chunks: bool = True
) -> list[tuple[Speed, int, Indices | slice]]:
    """Groups the workers in `table` by speed and, if `chunks` is set, by chunk size. Returns
    (speed, chunk size, indices of the workers) of each group."""
    if not len(table):
        return []
    if side.speed is not None and (not chunks or side.chunk_tokens is not None):
        return [(side.speed, side.chunk_tokens or 0, slice(None))]
    keys = table.codes("speed") << 32
    if chunks:
        keys += table.codes("chunk_tokens")
    return [
        (state.speeds[key >> 32], int(key & 0xFFFFFFFF), np.flatnonzero(keys == key))
        for key in np.unique(keys)
    ]


# Number of chunks or steps that a busy mesh has been issued already. KV is read or written after
# these.
CHUNKS_ISSUED = STEPS_ISSUED = 2


def with_fetches(
    state: ClusterState,
    some: Candidates,
    costs: PrefillCosts,
    others: Candidates,
    decodes: DecodeCosts,
    query: PlacementQuery,
    policy: PlacementPolicy,
) -> PrefillCosts:
    queue = np.maximum(0.0, costs.queue)
    waiting = np.minimum(queue, _issued(state, some))
    holders = _prefill_holders(costs, waiting, some.trusted)
    if policy.fetch_from_decode:
        holders += _decode_holders(state, decodes, others.trusted, query)
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
        computing = _computing(state, some, query, holder)
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


def _prefill_holders(
    costs: PrefillCosts, waiting: Array, trusted: Flags | None
) -> tuple[Holder, ...]:
    at, known = _asked(costs.known, trusted)
    if not len(at) or len(costs.rows) < 2:
        return ()
    tokens = known.max()
    most = np.sort(at[known == tokens])  # independent of the order of reports
    place = int(most[costs.queue[most].argmin()])
    return (Holder(int(costs.rows[place]), int(tokens), float(waiting[place])),)


def _decode_holders(
    state: ClusterState, costs: DecodeCosts, trusted: Flags | None, query: PlacementQuery
) -> tuple[Holder, ...]:
    at, known = _asked(known_at(state, costs.rows, query), trusted)
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


def _issued(state: ClusterState, some: Candidates) -> Array:
    seconds = np.empty(len(some))
    for speed, chunk, which in alike(state, some.side, some.table):
        seconds[which] = CHUNKS_ISSUED * speed.backlog_rates(chunk)[0] * chunk
    return seconds


def _computing(
    state: ClusterState, some: Candidates, query: PlacementQuery, holder: Holder
) -> Array:
    seconds = np.empty(len(some))
    new, known = np.array([query.work.tokens - holder.tokens]), np.array([holder.tokens])
    for speed, chunk, which in alike(state, some.side, some.table):
        seconds[which] = speed.prefills_seconds(new.astype(float), known.astype(float), chunk)[0]
    return seconds

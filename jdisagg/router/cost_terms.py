"""The predicted seconds of every candidate for one attempt, as columns: what placement chooses
from.

For prefill workers: how long their backlog takes, and the prompt itself. For decode workers: how
long until they have room, and a step with the sequence in it. For pairs: how long the KV takes
beyond the prefill. Pure arithmetic on the snapshot; chooses nothing.

Room at a decode worker is a slot, pages now on its best rank, pages for the expected growth of all
that this router has there, nobody waiting in front, and a step within the bound. Where one is
missing, sequences must leave first: they do so at the rate of Little's law, running / (mean length
x step)."""

import math
from dataclasses import replace

import numpy as np

from jdisagg.costs.hardware import Link
from jdisagg.costs.speeds import Array, Speed
from jdisagg.plain import plain
from jdisagg.router.accounts import GROWTH_TOKENS, Work
from jdisagg.router.cluster_state import ClusterState, Flags, Side, Table
from jdisagg.router.decision import Decision, PlacementPolicy, PlacementQuery
from jdisagg.router.link_costs import Indices
from jdisagg.router.prefix_index import ByWorker

# From the KV's arrival to the first token that is decoded from it, in steps. The loop of a mesh at
# work has a step under way and one issued behind it (worker/step_loop.py): half of the one and the
# other pass until the KV is inserted; one more, issued before that was known; then the sequence's
# own. Where nothing runs there is its own alone.
STEPS_TO_JOIN = 3.5
STEPS_ALONE = 1.0
# Share of the time left by the bound that prefills may use: some streams meet more prefills than
# others.
PACED_SHARE = 0.9
LEAST_PACED_SHARE = 0.05  # of all time, where a step alone takes nearly the whole bound
_NOWHERE, _NOTHING, _NO_FLAG = np.empty(0, np.intp), np.empty(0), np.zeros(1, bool)


@plain
class Holder:
    """A worker that prefill workers may fetch from, in row `row` of the snapshot: how much it knows
    of the prompt, and seconds until what its mesh has issued is done. `decodes`: it is a decode
    worker."""

    row: int
    tokens: int
    issued_seconds: float
    decodes: bool = False


@plain
class PrefillCosts:
    """Of prefill workers `rows`: the backlog's seconds, the prompt's own, and how many it need not
    compute, for it knows or fetches some (`spared`). `known`: places of those that know some of it,
    and how much. `fetches`: from which of the `holders` each fetches, -1: from none; None: nobody
    does."""

    rows: Indices
    queue: Array
    prefill: Array
    spared: Array
    chunks: Array
    known: tuple[Indices, Array]
    holders: tuple[Holder, ...] = ()
    fetches: Indices | None = None

    def few(self, places: Indices) -> "PrefillCosts":
        """Of workers at these places, among which `known` is not told."""
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
    """Of decode workers `rows`: seconds until there is room, and of a step then; whether anything
    runs there that would notice. `room`: there is some everywhere, so that no queue is."""

    rows: Indices
    queue: Array
    step: Array
    busy: Flags
    room: bool = False

    @property
    def join(self) -> Array:
        """Seconds from the KV's arrival to the first token that is decoded from it."""
        return np.where(self.busy, STEPS_TO_JOIN, STEPS_ALONE) * self.step

    def join_of(self, which: int) -> float:
        """The same of one of them."""
        return (STEPS_TO_JOIN if self.busy[which] else STEPS_ALONE) * float(self.step[which])


@plain
class LocalCosts:
    """Of decode workers that compute the prompt themselves: `costs`, in which chunks take turns
    with steps; seconds that the chunks alone take, and streams lose (`lost`); tokens that each is
    `lacking`; the `longest` that a running stream then waits for a token; until when what was
    computed there lately leaves no time for it, beside streams that run (`paced`, seconds from
    now)."""

    costs: PrefillCosts
    lost: Array
    lacking: Array
    longest: Array
    paced: Array


def prefills_of(
    state: ClusterState, side: Side, rows: Indices, table: Table, query: PlacementQuery
) -> PrefillCosts:
    """Of workers `rows`, some or all of `side`."""
    tokens = table["queued_tokens"] + table["own_tokens"]
    pairs = table["queued_pairs"] + table["own_pairs"]
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
        some, cold = table.take(at), prefill[at]
        for speed, chunk, which in alike(state, side, some):
            prefill[at[which]] = speed.prefills_seconds(
                query.work.tokens - cached[which], cached[which], chunk
            )
        spared[at] = cold - prefill[at]
    return PrefillCosts(rows, queue, prefill, spared, chunks, (at, cached))


def decodes_of(
    state: ClusterState,
    side: Side,
    rows: Indices,
    table: Table,
    query: PlacementQuery,
    policy: PlacementPolicy,
) -> DecodeCosts:
    """Of workers `rows`, some or all of `side`."""
    work = query.work
    ranks = table["ranks"] if side.several_ranks else 1
    ours, waiting = table["own_sequences"], table["waiting"]
    here = table["running"] + ours
    busy = here > 0
    sequences = table["best_sequences"] + _each(ours, ranks) + work.children
    contexts = (
        table["best_contexts"] + _each(table["own_contexts"], ranks) + work.children * work.tokens
    )
    sequences, contexts = (
        np.maximum(sequences, table["most_sequences"]),
        np.maximum(contexts, table["most_contexts"]),
    )
    if side.speed is not None and len(rows):
        step = side.speed.step_seconds(sequences, contexts)
    else:
        step = np.empty(len(rows))
        for speed, _, which in alike(state, side, table, chunks=False):
            step[which] = speed.step_seconds(sequences[which], contexts[which])
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
    later_short = (
        np.maximum(used, table["committed_pages"])
        + _pages(work, page, work.expected_tokens)
        - total
    )
    slots_short = (
        here
        + work.children
        - (side.room if rows is side.rows else side.room.take(side.rows.searchsorted(rows)))
    )
    later_short = _each(later_short, ranks)
    slow = step > policy.tpot_slo_seconds if policy.tpot_slo_seconds < np.inf else _NO_FLAG
    shortest = np.maximum(np.maximum(now_short, later_short), slots_short)
    late = np.count_nonzero(slow) or np.count_nonzero(waiting)
    if not late and np.maximum.reduce(shortest, initial=0.0) <= 0:
        zeros = side.zeros if rows is side.rows else np.zeros(len(rows))
        return DecodeCosts(rows, zeros, step, busy, room=True)
    some = np.maximum(1.0, here)
    each = np.maximum(1.0, used / some)
    leaving = np.maximum(np.maximum(now_short, later_short) / each, slots_short) + waiting
    if np.count_nonzero(slow):
        leaving = np.where(slow & (leaving < 1.0), 1.0, leaving)
    # An empty worker has all the room that it will ever have: it says itself what it cannot do.
    waits = (leaving > 0) & (here + waiting > 0)
    queue = np.zeros(len(rows))
    if np.count_nonzero(waits):
        queue = np.where(waits, np.ceil(leaving) * query.typical_tokens * step / some, queue)
    return DecodeCosts(rows, queue, step, busy)


def transfers_of(
    state: ClusterState,
    prefills: Indices,
    decodes: Indices,
    query: PlacementQuery,
    far: Link,
    places: Indices | None = None,
) -> Array:
    """Seconds of moving what the decode side lacks, [prefill workers, decode workers]: by the
    closest that they have in common. `places`: of the prefill workers among all of them, where
    that is known."""
    missing: Array | float = float(query.work.tokens)
    at, cached = known_at(state, decodes, query)
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
    """Pairs [prefill workers, decode workers] that share no rack, for a prompt that is too short
    for that."""
    unknown = np.full(len(prefills.rows), float(query.work.tokens))
    at, known = known_at(state, prefills.rows, query)
    unknown[at] -= known
    apart = state.table["rack"].take(prefills.rows)[:, None] != decodes["rack"]
    return apart & (unknown < policy.far_prefill_tokens)[:, None]


def exposed(transfer: Array, prefill: Array, chunks: Array) -> Array:
    """What of a transfer remains when the prefill ends: chunks that are done travel while the next
    ones compute."""
    if not np.count_nonzero(chunks != 1.0):
        return transfer
    last = transfer / chunks
    return np.maximum(last, transfer - prefill * (1.0 - 1.0 / chunks))


def most_computed(table: Table, whole: bool = False) -> Array:
    """Tokens of a prompt that decode workers compute themselves: without bound where they prefill
    for all, one chunk where they append to what they keep (none of one that is wanted `whole`), 0
    where they cannot."""
    able = table.flag("can_prefill") & (not whole)
    appended = np.where(able, table["chunk_tokens"], 0.0)
    return np.where(table.flag("mixed"), np.inf, appended)


def local_prefills(
    state: ClusterState,
    side: Side,
    decodes: DecodeCosts,
    table: Table,
    query: PlacementQuery,
    now: float,
) -> LocalCosts:
    """Prefilling on the decode workers themselves: each chunk takes turns with a step."""
    alone = prefills_of(state, side, decodes.rows, table, query)
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
    """Returns from when on a mixed worker may get its next prompt, or None if nothing bounds it.

    No running stream of a mesh gets a token while the mesh computes a prompt. Steps alone keep the
    bound (see `decodes_of`). Steps and prefills together keep it while prefills take at most the
    share of time `1 - step / tpot_slo_seconds`. Each prompt therefore moves `paced_until` forward
    by its own seconds divided by that share, and the next prompt waits at the router until then,
    where it can still be ordered or refused. All dp ranks wait for the rank that computes.
    """
    row, bound = state.row(decision.decode), policy.tpot_slo_seconds
    if decision.prefill is not None or decision.terms is None or bound == math.inf or row is None:
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


def known_to(worker: str, query: PlacementQuery) -> int:
    """Positions. One at least is left to compute."""
    return min(query.cached.get(worker, 0), query.work.tokens - 1)


def known_at(state: ClusterState, rows: Indices, query: PlacementQuery) -> tuple[Indices, Array]:
    """Of workers that know some: places among `rows`, which ascend, and positions known there. One
    position at least is left to compute."""
    cached = query.cached
    if not cached or not len(rows):
        return _NOWHERE, _NOTHING
    if isinstance(cached, ByWorker):
        wanted, tokens = state.rows_of(cached.roster), cached.counts
    else:
        wanted = np.fromiter(map(state.row_of, cached), np.intp, len(cached))
        tokens = np.fromiter(cached.values(), np.int64, len(cached))
    places = np.minimum(rows.searchsorted(wanted), len(rows) - 1)
    here = np.flatnonzero((rows.take(places) == wanted) & (tokens > 0))
    known = np.minimum(tokens.take(here), query.work.tokens - 1)
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
    """Of each dp rank."""
    return column if isinstance(ranks, int) else column / ranks


def alike(
    state: ClusterState, side: Side, table: Table, chunks: bool = True
) -> list[tuple[Speed, int, Indices | slice]]:
    """Workers of one speed (and one chunk) together: mostly that is all of them. `table`: of some
    of `side`, or of all."""
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

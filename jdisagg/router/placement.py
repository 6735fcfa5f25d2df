"""Chooses the workers of an attempt: the pair with the least predicted time to the request's end.
If no worker can start the request now, the result states the reason. Has no side effects.

`decide` evaluates every worker once, in vectorized form. It then evaluates pairs of all decode
workers and those few prefill workers with the earliest first token. It minimizes time to first
token + hand-off gap + remaining tokens x predicted seconds of a decode step. A first token after
its time limit and a step beyond the TPOT bound add penalties that exceed any predicted time.

Raises UnavailableError when no worker of a required role takes requests."""

from dataclasses import replace

import numpy as np

from jdisagg.costs.speeds import Array, PriceSource, Seconds, exposed_seconds
from jdisagg.plain import plain
from jdisagg.router.accounts import Work
from jdisagg.router.candidates import (
    BARRED,
    FAILED,
    Candidates,
    apart,
    broken_pairs,
    candidates,
    no_worker,
    usable,
)
from jdisagg.router.cluster_state import ClusterState
from jdisagg.router.cost_terms import (
    DecodeCosts,
    LocalCosts,
    PrefillCosts,
    decodes_of,
    known_at,
    known_to,
    local_prefills,
    most_computed,
    prefills_of,
    too_far,
    transfers_of,
    with_fetches,
)
from jdisagg.router.decision import (
    CostTerms,
    Decision,
    Deferred,
    PlacementOutcome,
    PlacementPolicy,
    PlacementQuery,
    Refusal,
)
from jdisagg.router.predictor import NO_CORRECTIONS
from jdisagg.spending import retry_after

MOST_PREFILLS = 6  # prefill workers for which pairs are evaluated
# Penalties of pairs (s): larger than any prediction, smaller than the penalties of workers.
LATE, FAR = 1e4, 1e5
NO_WORK = Work(1)
# Extra weight of each prefill second that a cached or fetched prefix saves, because it is also
# saved for the requests behind this one. Without it an idle worker takes a prompt from a lightly
# loaded worker that has it cached, computes it again, and caches a copy in place of other blocks.
WORTH_TO_OTHERS = 1.0


@plain
class Weighed:
    """Predicted costs of all possible choices, in seconds.

    Attributes:
        pairs: Time to the request's end for each pair [prefill workers, decode workers], minus
            `spared`.
        spared: For each prefill worker, the prefill seconds that other requests save if this worker
            computes the prompt, because its cached prefix is used.
        local: Costs of computing the prompt on the decode workers, or None if no decode worker can
            prefill.
        alone: Time to the request's end if the decode worker also prefills (inf: not possible).
    """

    prefills: PrefillCosts
    decodes: DecodeCosts
    transfer: Array
    pairs: Array
    spared: Array
    local: LocalCosts | None
    alone: Array


def decide(
    state: ClusterState, query: PlacementQuery, now: float, policy: PlacementPolicy
) -> PlacementOutcome:
    """Chooses the workers of an attempt.

    Returns:
        A `Decision`, a `Deferred` if the request must wait at the router, or a `Refusal` if its
        first token would come after its time limit.

    Raises:
        UnavailableError: No worker of a needed role takes requests.
    """
    prefills, decodes = candidates(state, query, now, policy)
    weighed = weigh(state, prefills, decodes, query, now, policy)
    decision = _choose(state, weighed, decodes, query, policy)
    if decision.prefill is None:
        decision = _with_source(state, decision, prefills, decodes, query, policy)
    if query.session_workers and (again := sorted(query.session_workers & decision.workers)):
        reason = f"{decision.reason}; the session's last turn was on {' and '.join(again)}"
        decision = replace(decision, reason=reason)
    # Assumed times can rank workers. They neither refuse nor defer a request.
    if query.under_way or PriceSource.ASSUMED in price_sources(state, decision):
        return decision
    return _admitted(state, decision, weighed, query, policy)


def price_sources(state: ClusterState, decision: Decision) -> set[PriceSource]:
    """Returns where the predicted times of the workers of a decision come from."""
    return {state.description(name).kind.source for name in decision.workers}


def weigh(
    state: ClusterState,
    prefills: Candidates,
    decodes: Candidates,
    query: PlacementQuery,
    now: float,
    policy: PlacementPolicy,
) -> Weighed:
    every = prefills_of(state, prefills, query)
    side = decodes_of(state, decodes, query, policy)
    if policy.peer_fetch and query.cached and len(prefills):
        every = with_fetches(state, prefills, every, decodes, side, query, policy)
    against, places = prefills.penalties, None
    spared = WORTH_TO_OTHERS * every.spared
    if len(prefills) > MOST_PREFILLS:
        seconds = every.queue + every.prefill - spared
        if against is not None:
            seconds = seconds + against
        few = seconds.argsort(kind="stable")[:MOST_PREFILLS]
        few.sort()
        places = few if prefills.rows is prefills.side.rows else None
        every, spared = every.few(few), spared.take(few)
        against = None if against is None else against.take(few)
    transfer = transfers_of(state, every.rows, decodes.rows, query, policy.far, places)
    if np.count_nonzero(every.chunks != 1.0):
        transfer = exposed_seconds(transfer, every.prefill[:, None], every.chunks[:, None])
    rest = max(0, query.work.expected_tokens - 1) * side.step
    if (penalties := decodes.penalties) is not None:
        rest = rest + penalties
    ttft = _ttft(every, side, query, policy)
    after = side.join + rest
    if query.prefill_only:
        transfer, after = np.zeros_like(transfer), np.zeros(len(decodes))
    elif not policy.decode_first:
        after = after + side.queue
    pairs = ttft + transfer + after[None, :] - spared[:, None]
    if against is not None:
        pairs = pairs + against[:, None]
    if policy.far_prefill_tokens and not query.prefill_only:
        pairs = pairs + np.where(too_far(state, every, decodes.table, query, policy), FAR, 0.0)
    late = ttft + query.age_seconds > query.limit_seconds
    if np.count_nonzero(late):
        pairs += np.where(late, LATE, 0.0)
    if query.broken and not query.prefill_only:
        pairs = pairs + broken_pairs(state, query, every.rows, decodes.rows)
    if (unlike := apart(state, every.rows, decodes.rows)) is not None:
        pairs = np.where(unlike, np.inf, pairs)
    if decodes.side.mixed:
        pairs[:, decodes.table.flag("mixed")] = np.inf
    local, alone = None, np.full(len(decodes), np.inf)
    if decodes.side.can_prefill and decodes.table.flag("can_prefill").any():
        local, alone = _weigh_alone(state, side, decodes, query, now, policy, rest)
    return Weighed(every, side, transfer, pairs, spared, local, alone)


def _ttft(
    prefills: PrefillCosts, decodes: DecodeCosts, query: PlacementQuery, policy: PlacementPolicy
) -> Array:
    """The array has shape [prefill workers, 1] if the time does not depend on the decode worker."""
    if decodes.room or query.prefill_only or not policy.decode_first:
        ttft = (np.maximum(prefills.queue, 0.0) + prefills.prefill)[:, None]
    else:
        waits = np.maximum(prefills.queue[:, None], decodes.queue[None, :])
        ttft = waits + prefills.prefill[:, None]
    corrections = query.corrections
    if corrections is NO_CORRECTIONS:
        return ttft
    corrected = _corrected(ttft, corrections.prefill)
    if prefills.fetches is None:
        return corrected
    fetched = _corrected(ttft, corrections.fetch)
    return np.where(prefills.fetches[:, None] >= 0, fetched, corrected)


def _corrected(seconds: Seconds, correction: tuple[float, float]) -> Seconds:
    return correction[0] + correction[1] * seconds


def _weigh_alone(
    state: ClusterState,
    side: DecodeCosts,
    decodes: Candidates,
    query: PlacementQuery,
    now: float,
    policy: PlacementPolicy,
    rest: Array,
) -> tuple[LocalCosts, Array]:
    """Running streams stall while the prompt is computed, and the lost time is charged to this
    request. Where prefill workers exist, a decode worker computes at most one chunk."""
    local = local_prefills(state, decodes, side, query, now)
    costs = local.costs
    ttft = np.maximum(costs.queue, side.queue) + costs.prefill
    ttft = _corrected(ttft, query.corrections.append)
    alone = ttft + side.step + rest + np.where(side.busy, local.lost, 0.0)
    alone += np.where(ttft + query.age_seconds > query.limit_seconds, LATE, 0.0)
    unhurt = ~side.busy | ((local.longest <= policy.tpot_slo_seconds) & (local.paced <= 0))
    fits = local.lacking <= most_computed(decodes.table, query.whole)
    return local, np.where(decodes.table.flag("mixed") | (fits & unhurt), alone, np.inf)


def _choose(
    state: ClusterState,
    weighed: Weighed,
    decodes: Candidates,
    query: PlacementQuery,
    policy: PlacementPolicy,
) -> Decision:
    paired = _pair(state, weighed, decodes, query, policy)
    alone = _alone(state, weighed, decodes, query, policy)
    if alone is None:
        if paired is None:
            raise no_worker(state, state.prefill, "prefill")
        return _said(state, paired[0], weighed, decodes, query, policy)
    if paired is None:
        return alone[0]
    (pair, pair_cost), (local, local_cost) = paired, alone
    mixed = bool(state.table.flag("mixed")[state.row(local.decode)])
    at = int(decodes.rows.searchsorted(state.row_of(local.decode)))
    gain = 0.0
    if not mixed and (weighed.decodes.busy[at] or 2 * local.cached_tokens < query.work.tokens):
        # The margin covers two losses that the predicted cost omits: the delay of the worker's
        # other streams, and that prefill workers will not have a mostly new prompt cached.
        gain = policy.local_gain * (pair.ttft_seconds + pair.handoff_gap_seconds)
    if weighed.local and local.cached_tokens > max(pair.cached_tokens, pair.peer_tokens):
        local_cost -= WORTH_TO_OTHERS * float(weighed.local.costs.spared[at])
    if local_cost + gain < pair_cost:
        less = _ms(pair_cost - local_cost)
        reason = f"{local.reason}; {less} less in total than {pair.prefill} and {pair.decode}"
        return replace(local, reason=reason)
    more = local_cost + gain - pair_cost
    reason = f"{pair.reason}; on {local.decode} alone it would cost {_ms(more)} more"
    margin = ", required gain included (routing.local_gain)"
    return replace(pair, reason=reason + margin if gain else reason)


def _said(
    state: ClusterState,
    pair: Decision,
    weighed: Weighed,
    decodes: Candidates,
    query: PlacementQuery,
    policy: PlacementPolicy,
) -> Decision:
    if not pair.decode:
        return pair
    row = state.row_of(pair.decode)
    if weighed.local is not None and state.table.flag("can_prefill")[row]:
        at, local = int(decodes.rows.searchsorted(row)), weighed.local
        lacking, longest = float(local.lacking[at]), float(local.longest[at])
        most = float(state.table["chunk_tokens"][row])
        if query.whole:
            why = "does not compute log-probabilities of prompts"
        elif lacking > most:
            why = (
                f"would have to compute {lacking:.0f} tokens, more than --append_tokens={most:.0f}"
            )
        elif longest > policy.tpot_slo_seconds:
            why = f"does not compute it: its streams would wait {_ms(longest)} for a token"
        else:
            why = (
                f"has just computed a prompt, and may compute one in {_ms(float(local.paced[at]))}"
            )
        return replace(pair, reason=f"{pair.reason}; {pair.decode} {why}")
    speed = state.speeds[int(state.table["speed"][row])]
    busy = bool(state.table["running"][row] + state.table["own_sequences"][row] > 0)
    prefill = speed.prefill_seconds(query.work.tokens) * (2 if busy else 1) + (
        pair.terms.step if busy else 0.0
    )
    apart = pair.ttft_seconds + pair.handoff_gap_seconds
    if pair.terms.decode_queue + prefill + pair.terms.step > (1.0 - policy.local_gain) * apart:
        return pair
    return replace(
        pair, reason=f"{pair.reason}; {pair.decode} alone would be cheaper, but cannot prefill"
    )


def _pair(
    state: ClusterState,
    weighed: Weighed,
    decodes: Candidates,
    query: PlacementQuery,
    policy: PlacementPolicy,
) -> tuple[Decision, float] | None:
    if not weighed.pairs.size:
        return None
    best = int(weighed.pairs.argmin())
    if query.session_workers:
        best = _of_session(state, weighed, decodes, query, best, policy.session_gain)
    which, other = divmod(best, weighed.pairs.shape[1])
    cost = float(weighed.pairs[which, other] + weighed.spared[which])
    if cost == np.inf:
        return None
    prefills, side = weighed.prefills, weighed.decodes
    terms = CostTerms(float(prefills.queue[which]), float(prefills.prefill[which]))
    prefill, decode = state.name(int(prefills.rows[which])), ""
    if not query.prefill_only:
        decode = state.name(int(decodes.rows[other]))
        terms = replace(
            terms,
            transfer=float(weighed.transfer[which, other]),
            decode_queue=float(side.queue[other]),
            step=float(side.step[other]),
        )
    cached, held = known_to(prefill, query), known_to(decode, query)
    source = -1 if prefills.fetches is None else int(prefills.fetches[which])
    kind = "prefix" if cached or held or source >= 0 else "seconds"
    first, gap = terms.prefill_queue, terms.transfer + (side.join_of(other) if decode else 0.0)
    if policy.decode_first:
        first = max(first, terms.decode_queue)
    else:
        gap += terms.decode_queue
    corrections = query.corrections
    ttft = _corrected(
        first + terms.prefill, corrections.fetch if source >= 0 else corrections.prefill
    )
    found = _decision(prefill, decode, decodes, other, terms, ttft, gap, kind, cached)
    if source >= 0:
        holder = prefills.holders[source]
        found = _fetching(found, state.name(holder.row), holder.tokens)
    return found, cost


def _of_session(
    state: ClusterState,
    weighed: Weighed,
    decodes: Candidates,
    query: PlacementQuery,
    best: int,
    gain: float,
) -> int:
    """Returns the index of the pair with the least cost, where each worker of the session's last
    turn makes up for half of the part `gain` of the best pair's time to first token and
    hand-off."""
    prefills, side, pairs = weighed.prefills, weighed.decodes, weighed.pairs
    which, other = divmod(best, pairs.shape[1])
    seconds = prefills.queue[which] + prefills.prefill[which] + weighed.transfer[which, other]
    rows = [*map(state.row_of, query.session_workers)]
    again = np.isin(prefills.rows, rows)[:, None] * 0.5 + np.isin(decodes.rows, rows) * 0.5
    return int((pairs - gain * float(seconds + side.step[other]) * again).argmin())


def _fetching(decision: Decision, peer: str, tokens: int) -> Decision:
    reason = f"{decision.reason}; it fetches {tokens - decision.cached_tokens} tokens from {peer}"
    return replace(decision, reason=reason, peer=peer, peer_tokens=tokens)


def _alone(
    state: ClusterState,
    weighed: Weighed,
    decodes: Candidates,
    query: PlacementQuery,
    policy: PlacementPolicy,
) -> tuple[Decision, float] | None:
    if weighed.local is None:
        return None
    local, side = weighed.local.costs, weighed.decodes
    other = int(np.argmin(weighed.alone))
    if query.session_workers:
        rows = [*map(state.row_of, query.session_workers)]
        seconds = float(local.queue[other] + local.prefill[other] + side.step[other])
        again = np.isin(decodes.rows, rows)
        other = int(np.argmin(weighed.alone - policy.session_gain * seconds * again))
    cost = float(weighed.alone[other])
    if cost == np.inf:
        return None
    terms = CostTerms(
        float(local.queue[other]),
        float(local.prefill[other]),
        0.0,
        float(side.queue[other]),
        float(side.step[other]),
    )
    decode = state.name(int(decodes.rows[other]))
    kind = "mixed" if decodes.table.flag("mixed")[other] else "local"
    ttft = _corrected(terms.uncorrected_ttft, query.corrections.append)
    found = (None, decode, decodes, other, terms, ttft, terms.step, kind, known_to(decode, query))
    return _decision(*found), cost


def _decision(
    prefill: str | None,
    decode: str,
    decodes: Candidates,
    at: int,
    terms: CostTerms,
    ttft: float,
    gap: float,
    kind: str,
    cached: int,
) -> Decision:
    who = f"{prefill} and {decode}" if prefill and decode else f"{prefill or decode} alone"
    reason = (
        f"{who}: predicted first token in {_ms(ttft)}{_known(cached)}, hand-off {_ms(gap)}, decode"
        f" step {_ms(terms.step)}"
    )
    context = int(decodes.table["context_tokens"][at])
    return Decision(prefill, decode, context, reason, kind, terms, ttft, gap, terms.step, cached)


def _admitted(
    state: ClusterState,
    decision: Decision,
    weighed: Weighed,
    query: PlacementQuery,
    policy: PlacementPolicy,
) -> PlacementOutcome:
    """Returns the decision if the request can start now and its first token is predicted within its
    time limit. If not, returns a refusal or a deferral. A worker that was chosen for its cached
    prefix may have a queue while other workers have none. Such a queue does not defer the
    request."""
    ttft = query.age_seconds + query.ahead_seconds + decision.ttft_seconds
    if ttft > query.limit_seconds:
        reason = (
            f"the first token is predicted {ttft:.3g} s after arrival, and"
            f" {query.limit_seconds:.3g} s is the limit; {decision.reason}"
        )
        return Refusal(reason, retry_after(ttft - query.limit_seconds))
    if decision.terms.decode_queue > 0 and (policy.decode_first or decision.prefill is None):
        expected = _ms(decision.terms.decode_queue)
        return Deferred(f"no decode worker has room; the next is expected in {expected}", True)
    queue = decision.terms.prefill_queue
    if decision.prefill is not None and decision.cached_tokens:
        queue = min(queue, float(weighed.prefills.queue.min()))
    hold = policy.hold_seconds
    if queue > hold and queue > _most_queued_seconds(state, weighed, decision, hold):
        return Deferred(f"every prefill worker has at least {_ms(queue)} of queued work")
    return decision


def _most_queued_seconds(
    state: ClusterState, weighed: Weighed, decision: Decision, hold_seconds: float
) -> float:
    row = state.row_of(decision.prefill or decision.decode)
    ranks = float(state.table["ranks"][row])
    if ranks <= 1.0 or (decision.prefill is None and not state.table.flag("mixed")[row]):
        return hold_seconds
    if decision.prefill is None and weighed.local is not None:
        paced = weighed.local.paced[int(weighed.decodes.rows.searchsorted(row))]
        if decision.terms.prefill_queue <= paced:
            return hold_seconds
    tokens = int(state.table["chunk_tokens"][row])
    prompt = decision.terms.prefill
    speed = state.speeds[int(state.table["speed"][row])]
    chunk = speed.prefill_seconds(tokens, 0, tokens) if tokens else prompt
    return most_queued_seconds(hold_seconds, ranks, chunk, prompt)


def most_queued_seconds(
    hold_seconds: float, ranks: float, chunk_seconds: float, prompt_seconds: float
) -> float:
    """Returns how much queued work of a worker does not yet hold a prompt back.

    A worker's queue is a mean over its dp ranks, and contains a running chunk until it ends. A
    chunk takes as long as the rank with the most tokens, and later prompts cannot join it. With
    several ranks, the running chunk and the next one are therefore allowed in addition to
    `hold_seconds`, and `hold_seconds` counts as at least one more chunk. Otherwise chunks would be
    issued before each rank has its share. Prompts longer than this get a rank each."""
    if ranks <= 1.0:
        return hold_seconds
    alike = prompt_seconds * (1.0 - 1.0 / ranks)
    return max(hold_seconds, chunk_seconds) + max(2.0 * chunk_seconds, alike)


def _with_source(
    state: ClusterState,
    decision: Decision,
    prefills: Candidates,
    decodes: Candidates,
    query: PlacementQuery,
    policy: PlacementPolicy,
) -> Decision:
    """A decode worker is chosen only if it has more tokens cached than any prefill worker."""
    found, found_tokens = -1, decision.cached_tokens
    kinds = (prefills, decodes) if policy.fetch_from_decode else (prefills,)
    for some in kinds if policy.peer_fetch else ():
        at, tokens = known_at(state, some.rows, query)
        tokens = np.where(some.against[at] < BARRED, tokens, 0.0)
        most = int(tokens.max(initial=0.0))
        if most > found_tokens:
            # The lowest row, so that the order of reports does not matter.
            found, found_tokens = int(some.rows[at[tokens == most].min()]), most
    return decision if found < 0 else _fetching(decision, state.name(found), found_tokens)


def _known(tokens: int) -> str:
    return f" with {tokens} tokens cached" if tokens else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def another_prefill(
    state: ClusterState,
    avoid: frozenset[str],
    now: float,
    policy: PlacementPolicy,
    decode: str = "",
    broken: frozenset[tuple[str, str]] = frozenset(),
    unfit: frozenset[str] = frozenset(),
) -> str:
    """Returns another prefill worker for a prompt whose prefill worker failed. `decode` is its
    decode worker. A worker in `avoid` or `unfit`, or one that forms a pair of `broken` with
    `decode`, is chosen only if no other worker is available."""
    query = PlacementQuery(NO_WORK, avoid=avoid, broken=broken, resuming=True, unfit=unfit)
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

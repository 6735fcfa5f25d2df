"""The placer: gives the router's pure decision functions their inputs and applies the results.

`router/placement.decide` refuses, places or defers a new request. Requests that were placed before
(retried, preempted, resumed) bypass the queue. If no worker of a needed role accepts requests, all
requests wait until one returns, provided that a `Membership` maintains the snapshot.

Each attempt is charged to its workers: the snapshot counts the attempt's work until the workers'
statuses include it."""

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from jdisagg.clock import Clock
from jdisagg.config import RoutingConfig
from jdisagg.costs.speeds import PriceSource
from jdisagg.dispatch.admission_queue import AdmissionQueue
from jdisagg.dispatch.routing_status import (
    PastDecision,
    RoutingStatus,
    WaitingRequest,
    WorkerAccount,
)
from jdisagg.errors import NoWorkerError, OverloadedError
from jdisagg.messages.ports import Child
from jdisagg.plain import plain
from jdisagg.request import Request
from jdisagg.router.accounts import Accounts, Charges, Work
from jdisagg.router.admission import Lateness, Quotas, limit_seconds
from jdisagg.router.candidates import Breakers, candidates
from jdisagg.router.cost_terms import most_computed, paced_until
from jdisagg.router.decision import (
    NO_ROUTER_EVENTS,
    Affinity,
    Decision,
    Deferred,
    Known,
    PlacementPolicy,
    PlacementQuery,
    PromptBlocks,
    Refusal,
    RouterEvents,
)
from jdisagg.router.placement import NO_WORK, another_decode, another_prefill, decide, price_sources
from jdisagg.router.predictor import NO_CORRECTIONS, LearnedCorrections, LearnedLengths
from jdisagg.router.unreported import NOBODY, ComingPrefixes, SessionWorkers
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, Timeouts
from jdisagg.spending import Spending
from jdisagg.telemetry import Counters

OUTPUT_COST = 2.0  # cost of an output token in prompt tokens, as in VTC (Sheng et al., 2024)
KEPT_DECISIONS = 256
SHOWN_WAITING = 64  # waiting requests that a status lists


def rules_of(config: RoutingConfig, timeouts: Timeouts = DEFAULT_TIMEOUTS) -> PlacementPolicy:
    slo = config.tpot_slo_seconds
    return PlacementPolicy(
        tpot_slo_seconds=math.inf if slo is None else slo,
        hold_seconds=config.hold_seconds,
        local_gain=config.local_gain,
        suspect_seconds=timeouts.membership.suspect_seconds,
        gone_seconds=timeouts.membership.gone_seconds,
        peer_fetch=bool(config.peer_fetch),
        fetch_from_decode=config.fetch_from_decode,
        far_prefill_tokens=config.far_prefill_tokens,
    )


@dataclass(frozen=True, slots=True)
class PlacerSettings:
    """Settings of a router's placer.

    Args:
        policy: Placement policy, or None to derive it from `routing`.
    """

    routing: RoutingConfig = field(default_factory=RoutingConfig)
    policy: PlacementPolicy | None = None
    affinity: Affinity | None = None
    events: RouterEvents = NO_ROUTER_EVENTS
    spending: Spending | None = None


@plain
class PlacementRequest:
    """An attempt that needs workers. `arrived_at` and `deadline` are the arrival and the deadline
    of the request. `avoid` has the names of workers that failed the request, and `unfit` of those
    that cannot serve it. `under_way` means that the request was placed or resumed before."""

    request: Request
    children: tuple[Child, ...]
    arrived_at: float
    deadline: float
    avoid: frozenset[str] = frozenset()
    under_way: bool = False
    unfit: frozenset[str] = frozenset()


@plain
class _Sized:
    asked: PlacementRequest
    work: Work
    known: Known
    blocks: PromptBlocks = PromptBlocks()
    cost: float = 0.0  # tokens of the tenant's quota that it pays


def _nobody_knows() -> Mapping[str, int]:
    return {}


@dataclass(slots=True, eq=False)
class _RecentDecision:
    at: float
    waited_seconds: float
    prompt_tokens: int
    answer: Decision | Refusal
    request_id: str
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None

    @property
    def predicted_ttft_seconds(self) -> float | None:
        if isinstance(self.answer, Refusal):
            return None
        return self.waited_seconds + self.answer.ttft_seconds

    def past(self, now: float) -> PastDecision:
        answer, age = self.answer, now - self.at
        if isinstance(answer, Refusal):
            return PastDecision(
                age,
                f"refused: {answer.kind}",
                answer.reason,
                "",
                "",
                self.prompt_tokens,
                request_id=self.request_id,
            )
        return PastDecision(
            age,
            answer.kind,
            answer.reason,
            answer.prefill or "",
            answer.decode,
            self.prompt_tokens,
            self.predicted_ttft_seconds,
            answer.tpot_seconds,
            self.ttft_seconds,
            self.tpot_seconds,
            self.request_id,
        )


class PlacementHandle:
    """The placement of one attempt: the decision, and the work that is charged to the workers. The
    attempt reports its progress to this object. All methods are idempotent."""

    def __init__(
        self,
        decision: Decision,
        placed: Charges,
        placer: "Placer",
        entry: _RecentDecision,
        coming: int = 0,
        paid: tuple[str, float] = ("", 0.0),  # tenant and tokens
    ) -> None:
        self.decision = decision
        self._paid: tuple[str, float] | None = paid
        self._coming = coming
        self._prefilled = self._credited = False
        self._placed = placed
        self._placer = placer
        self._entry = entry

    def prefill_sent(self) -> None:
        self._placed.prefill_sent(self._placer.now())

    def prefill_at(self, worker: str) -> None:
        self._placed.prefill_at(worker)

    def moved(self, placed: Charges) -> None:
        """Records that the running sequences migrated to the worker that `placed` charges."""
        self._placed.end()
        self._placed = placed
        self._placer.changed()

    def prefilled(self) -> None:
        """The workers are not yet marked as successful, because failover may have replaced the
        prefill worker and the KV transfer may still fail."""
        self._prefilled = True
        self._placer.due.discard(self)
        self._placed.prefilled()
        self._placer.coming.computed(self._coming, self._placer.now())
        self._placer.changed()

    def handed_over(self, prefill: str | None, decode: str) -> None:
        """Records that `decode` generated a token from KV that `prefill` computed. `prefill` is
        None if `decode` computed the KV itself."""
        self._placer.events.handed_over(prefill, decode)
        if prefill:
            self._placer.pairs.succeeded((prefill, decode))
        self.worked({prefill or decode, decode})

    def lost(self, prefill: str, decode: str) -> None:
        self._placer.pair_failed(prefill, decode)

    def worked(self, workers: Iterable[str]) -> None:
        """Resets the circuit breakers of workers that completed their part of the attempt."""
        self._credited = True
        for worker in workers:
            self._placer.succeeded(worker)

    def measured_ttft(self, seconds: float) -> None:
        self._entry.ttft_seconds = seconds
        if self._entry.predicted_ttft_seconds is not None:
            self._placer.measured_ttft(self.decision, self._entry.predicted_ttft_seconds, seconds)
            self._placer.learn(self.decision, seconds - self._entry.waited_seconds)

    def measured_tpot(self, seconds: float) -> None:
        """Called once, when the request ended."""
        self._entry.tpot_seconds = seconds
        self._placer.events.measured("tpot", self.decision.tpot_seconds, seconds)

    def refused(self) -> None:
        """Gives the tenant back what it paid for a request that its workers refused."""
        if self._paid is not None:
            self._placer.quotas.give_back(*self._paid)
            self._paid = None

    def end(self, failed: Iterable[str] = ()) -> None:
        """Ends the attempt and counts a failure of each worker in `failed`. If the prompt was
        prefilled and `worked` was not called, calls it for the other workers. A second call would
        be wrong, because the end of a long answer does not show a worker's present state."""
        self._placed.end()
        self._placer.due.discard(self)
        self._placer.coming.ended(self._coming)
        failed = frozenset(failed)
        decision = self.decision
        if self._prefilled and not self._credited:
            self.worked(decision.workers - failed)
        for worker in failed:
            self._placer.failed(worker)
        self._placer.changed()


class Placer:
    """Places attempts on workers.

    Args:
        refresh: Function that updates the snapshot before each decision. None if a membership
            updates it.
    """

    def __init__(
        self,
        accounts: Accounts,
        settings: PlacerSettings,
        clock: Clock,
        counters: Counters,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        refresh: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        config = settings.routing
        self.accounts = accounts
        self.events = settings.events
        self._rules = settings.policy or rules_of(config, timeouts)
        self._affinity = settings.affinity
        self.coming = ComingPrefixes()
        self.lengths = LearnedLengths()
        self.due: set[PlacementHandle] = set()  # attempts without a first token
        self._config = config
        self._clock = clock
        self._counters = counters
        self._refresh = refresh
        self.quotas = Quotas(config.quotas(), config.quota_burst_seconds, settings.spending)
        life, backoff = accounts.state.life, timeouts.request.breaker
        self._breakers = Breakers[tuple[str]](life, backoff=backoff)
        # The decode worker has tried each block of a failed transfer several times.
        self.pairs = Breakers[tuple[str, str]](life, most_failures=1, backoff=backoff)
        self.waits = refresh is None
        self._absent_look_seconds = timeouts.request.absent_look_seconds
        self._returning: list[tuple[PlacementRequest, float]] = []  # each with its time of return
        self._deferred = Deferred("")  # the latest
        self._queue: AdmissionQueue[_Sized, PlacementHandle] = AdmissionQueue(
            config.weights(), clock, timeouts.request, self._try, self._renew
        )
        self._sessions = SessionWorkers()
        self._lateness = Lateness()
        self._corrections = LearnedCorrections()
        self._entries: deque[_RecentDecision] = deque(maxlen=KEPT_DECISIONS)
        accounts.subscribe(self.changed)

    def now(self) -> float:
        return self._clock.now()

    @property
    def waiting(self) -> int:
        return len(self._queue) + len(self._returning)

    def status(self) -> RoutingStatus:
        now = self.now()
        past = tuple(entry.past(now) for entry in reversed(self._entries))
        accounts = _accounts(self.accounts, now, self._corrections.current is not NO_CORRECTIONS)
        return RoutingStatus(self.waiting, past, tuple(accounts), self._waiting_requests(now))

    def _waiting_requests(self, now: float) -> tuple[WaitingRequest, ...]:
        again = [(asked, now - since) for asked, since in self._returning]
        queued = [
            (sized.asked, now - sized.asked.arrived_at)
            for sized in self._queue.first(SHOWN_WAITING)
        ]
        return tuple(
            WaitingRequest(asked.request.request_id, place, seconds, self._deferred.reason)
            for place, (asked, seconds) in enumerate((*again, *queued)[:SHOWN_WAITING], 1)
        )

    async def place(self, asked: PlacementRequest) -> PlacementHandle:
        """Waits until workers are free for the attempt, and returns its placement.

        Raises:
            OverloadedError: The request is refused.
            NoWorkerError: No worker of a needed role takes requests, and none can return.
        """
        await self._renew()
        request = asked.request
        # Prompt log-probabilities require that the whole prompt is computed.
        whole = request.sampling.prompt_logprobs is not None
        # An empty index is falsy, but it may have the prompt when the request is placed.
        affinity = None if whole else self._affinity
        if accepted := asked.children[0].accepted:  # they are prefilled again
            request = replace(request, prompt_token_ids=request.prompt_token_ids + accepted)
        known = _nobody_knows if affinity is None else affinity.known(request)
        blocks = PromptBlocks() if affinity is None else affinity.prompt_blocks(request)
        work = self._work(asked.request, asked.children)
        if asked.under_way:
            return await self._place_again(_Sized(asked, work, known, blocks))
        cost = work.tokens + OUTPUT_COST * work.children * work.expected_tokens
        sized = _Sized(asked, work, known, blocks, cost)
        self._take_quota(request.tenant, cost)
        try:
            due = asked.arrived_at + self._limit(asked)
            passes = request.prefill_only and self._deferred.for_room
            ahead, beside_queue = 0.0, not (passes or self._queue.overtakes(request.priority))
            if beside_queue:
                ahead = self._queue.seconds_ahead(request.tenant, cost, due, request.priority)
            handle = self._try(sized, ahead, beside_queue)
            if handle is not None:
                return handle
            self._counters.add("requests_held")
            return await self._queue.wait(sized, request.tenant, cost, due, request.priority)
        except BaseException:  # a refused, cancelled or failed request is not charged
            self.quotas.give_back(request.tenant, cost)
            raise

    def most_computed(self, decode: str) -> float:
        state = self.accounts.state
        row = state.row(decode)
        return math.inf if row is None else float(most_computed(state.table)[row])

    def life(self, worker: str) -> int:
        return self.accounts.state.life(worker)

    def weights(self, worker: str) -> str:
        return self.accounts.state.weights(worker)

    async def another_prefill(
        self, avoid: frozenset[str], decode: str, unfit: frozenset[str]
    ) -> str:
        """Returns another prefill worker for a sequence on `decode`. Raises NoWorkerError."""
        await self._renew()
        state, now = self.accounts.state, self.now()
        broken = self.pairs.barred(now)
        return another_prefill(state, avoid, now, self._rules, decode, broken, unfit)

    async def another_decode(
        self, avoid: frozenset[str], origin: str, request: Request, children: tuple[Child, ...]
    ) -> tuple[str, Charges]:
        """Returns another decode worker for running sequences of `origin`, and its charges. Raises
        NoWorkerError."""
        await self._renew()
        state, now, work = self.accounts.state, self.now(), self._work(request, children)
        worker = another_decode(state, avoid, now, self._rules, origin)
        work = replace(work, cached_tokens=work.tokens)  # it computes none of them
        return worker, self.accounts.place(None, worker, work, now)

    def ended(self, request: Request, output_tokens: int) -> None:
        if not request.prefill_only:  # its one token tells nothing of the length of answers
            self.lengths.observe(request.tenant, len(request.prompt_token_ids), output_tokens)

    def measured_ttft(self, decision: Decision, predicted_seconds: float, seconds: float) -> None:
        """The error of an assumed time is no lateness, because it would delay all workers."""
        if PriceSource.ASSUMED not in price_sources(self.accounts.state, decision):
            self._lateness.observe(seconds - predicted_seconds, self.now())
        self.events.measured("ttft", predicted_seconds, seconds)

    def learn(self, decision: Decision, seconds: float) -> None:
        """Does nothing unless both workers measured their times. Corrections apply to all workers,
        so the error of an assumed or described one must not change predictions of others."""
        predicted = decision.terms.uncorrected_ttft
        measured = price_sources(self.accounts.state, decision) == {PriceSource.MEASURED}
        if measured and seconds > 0 and predicted > 0:
            self._corrections.observe(decision.way, predicted, seconds)

    def changed(self) -> None:
        self._queue.changed()

    # ---- breakers

    def failed(self, worker: str) -> None:
        self.accounts.state.bar(worker, self._breakers.failed((worker,), self.now()))

    def succeeded(self, worker: str) -> None:
        if self._breakers.succeeded((worker,)):
            self.accounts.state.bar(worker, 0.0)

    def pair_failed(self, prefill: str, decode: str) -> None:
        self._counters.add("pairs_failed")
        self.pairs.failed((prefill, decode), self.now())

    # ---- one decision

    async def _place_again(self, sized: _Sized) -> PlacementHandle:
        handle = self._try(sized)
        if handle is not None:
            return handle
        entry = sized.asked, self.now()
        self._returning.append(entry)
        try:
            while handle is None:
                await self._clock.sleep(self._absent_look_seconds)
                handle = self._try(sized)
            return handle
        finally:
            self._returning = [other for other in self._returning if other is not entry]

    def missing(self) -> NoWorkerError | None:
        try:
            candidates(self.accounts.state, PlacementQuery(NO_WORK), self.now(), self._rules)
        except NoWorkerError as error:
            return self._expecting(error)
        return None

    def _expecting(self, error: NoWorkerError) -> NoWorkerError:
        absences, now = self.accounts.absences, self.now()
        expected = absences.expected_seconds(error.role, now)
        away = absences.away_seconds(error.role, now)
        error.retry_after_seconds = expected
        since = "" if away is None else f"; the last one left {away:.0f} s ago"
        error.message += f"{since}; expected in about {expected:.0f} s"
        return error

    def _try(
        self, sized: _Sized, ahead_seconds: float = 0.0, beside_queue: bool = False
    ) -> PlacementHandle | None:
        """If `beside_queue` is set, other requests already wait and must not be overtaken. The
        request is then not placed even if workers are free."""
        now = self.now()
        query = self._ask(sized, now, ahead_seconds)
        try:
            answer = decide(self.accounts.state, query, now, self._rules)
            if isinstance(answer, Refusal) and not self.due:
                # Refused requests give no outcomes, so that a delay that is over could otherwise
                # cause refusals forever. One request at a time tries the uncorrected prediction.
                query = replace(query, corrections=NO_CORRECTIONS)
                answer = decide(self.accounts.state, query, now, self._rules)
        except NoWorkerError as error:
            too_late = not query.under_way and query.age_seconds > query.limit_seconds
            if not self.waits or too_late:
                raise self._expecting(error) from None
            self._queue.absent = True
            answer = Deferred(self._expecting(error).message)
        if isinstance(answer, Deferred):
            self._deferred = answer
            return None
        if beside_queue and not isinstance(answer, Refusal):
            self.changed()  # the requests in the queue may fit, too
            return None
        self.events.answered(query, now, answer)
        if isinstance(answer, Refusal):
            self._counters.add("rejections", cause=answer.kind)
            self._remember(sized, query, answer, now)
            raise OverloadedError(answer.reason, retry_after_seconds=answer.retry_after_seconds)
        return self._charge(sized, query, answer, now)

    def _work(self, request: Request, children: tuple[Child, ...]) -> Work:
        accepted = len(children[0].accepted)
        prompt = len(request.prompt_token_ids)
        expected = self.lengths.predict(request.tenant, prompt, request.sampling.max_tokens)
        if request.hints is not None and request.hints.answer_tokens:
            expected = min(request.hints.answer_tokens, request.sampling.max_tokens)
        return Work(prompt + accepted, 0, len(children), max(1, expected - accepted))

    def _limit(self, asked: PlacementRequest) -> float:
        return limit_seconds(self._config.ttft_slo_seconds, asked.deadline - asked.arrived_at)

    def _ask(self, sized: _Sized, now: float, ahead_seconds: float) -> PlacementQuery:
        asked, adapter = sized.asked, sized.asked.request.adapter
        limit = self._limit(asked)
        return PlacementQuery(
            sized.work,
            sized.known(),
            asked.avoid,
            asked.under_way,
            any([child.accepted for child in asked.children]),
            now - asked.arrived_at,
            ahead_seconds + self._lateness.seconds(now, limit),
            limit,
            self.lengths.typical_tokens,
            asked.request.sampling.prompt_logprobs is not None,
            self._corrections.current,
            self.pairs.barred(now),
            self.coming.known(sized.blocks, now),
            {} if adapter is None else self.accounts.state.adapter_loads(adapter.digest),
            self.accounts.state.yielding(asked.request.priority),
            sized.blocks.block_tokens or 1,
            NOBODY if asked.request.hints is None else self._sessions.of(asked.request),
            asked.unfit,
            asked.request.prefill_only,
        )

    def _charge(
        self, sized: _Sized, query: PlacementQuery, decision: Decision, now: float
    ) -> PlacementHandle:
        self._counters.add("placements", reason=decision.kind)
        for worker in decision.workers:
            if until := self._breakers.placed((worker,), now):
                self.accounts.state.bar(worker, until)
        if decision.prefill and decision.decode:
            self.pairs.placed((decision.prefill, decision.decode), now)
        until = paced_until(self.accounts.state, query, decision, self._rules, now)
        if until is not None:
            self.accounts.state.pace(decision.decode, until)
        computes = decision.prefill or decision.decode
        coming = min(query.coming.get(computes, 0), query.most_known)
        cached = max(decision.cached_tokens, decision.peer_tokens, coming)
        work = replace(query.work, cached_tokens=cached)
        if sized.asked.request.hints is not None:
            self._sessions.placed(sized.asked.request, decision.workers)
        placed = self.accounts.place(decision.prefill, decision.decode, work, now)
        # Only on these workers do prompts wait for each other's blocks.
        table, row = self.accounts.state.table, self.accounts.state.row_of(decision.decode)
        waits = decision.prefill is not None or bool(table.flag("mixed")[row])
        key = self.coming.placed(sized.blocks, computes) if waits and sized.blocks.names else 0
        entry = self._remember(sized, query, decision, now)
        paid = sized.asked.request.tenant, sized.cost
        handle = PlacementHandle(decision, placed, self, entry, key, paid)
        self.due.add(handle)
        return handle

    def _remember(
        self, sized: _Sized, query: PlacementQuery, answer: Decision | Refusal, now: float
    ) -> _RecentDecision:
        name = sized.asked.request.request_id
        entry = _RecentDecision(now, query.age_seconds, query.work.tokens, answer, name)
        self._entries.append(entry)
        return entry

    def _take_quota(self, tenant: str, cost: float) -> None:
        try:
            self.quotas.take(tenant, cost, self.now())
        except OverloadedError:
            self._counters.add("rejections", cause="quota")
            raise

    async def _renew(self) -> None:
        if self._refresh is not None:
            await self._refresh()


def _accounts(accounts: Accounts, now: float, learned: bool) -> Iterable[WorkerAccount]:
    table = accounts.state.table
    for row, name in enumerate(accounts.state):
        barred = max(0.0, float(table["barred_until"][row]) - now)
        attempts, tokens, pages, committed = (
            int(table[column][row])
            for column in ("open", "own_tokens", "own_pages", "committed_pages")
        )
        prices = accounts.state.description(name).kind.source
        text = "learned" if learned and prices is PriceSource.MEASURED else prices.value
        yield WorkerAccount(name, attempts, tokens, pages, committed, barred, text)

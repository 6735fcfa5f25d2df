"""Placing legs: the effects around the router's pure decisions. One for each request path.

A new request is refused, placed or held by `router/placement.decide`, on the snapshot that `Accounts` keeps. What is held waits here, in
the order of `router/fairness.py`, and is asked for again whenever something has changed: a worker spoke, a prompt was prefilled, a leg
ended. Nobody overtakes the head of that order, so that a large request is not starved by small ones. A request that can no longer come in
time is refused when its turn comes. Legs under way (retried, preempted, resumed) pass by the queue.

What a leg's workers did comes back through its `Placement`: it ends the leg's charges and tells the breakers. Statuses are either
handed to the accounts as they come (a roster), or asked for before each decision (`refresh`).
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from jdisagg.clock import Clock
from jdisagg.config import RoutingConfig
from jdisagg.dispatch.ports import Child
from jdisagg.dispatch.recent_decisions import KEPT, Entry, status_of
from jdisagg.dispatch.routing_status import RoutingStatus
from jdisagg.errors import OverloadedError
from jdisagg.plain import plain
from jdisagg.request import Request
from jdisagg.router.accounts import Accounts, Placed, Work
from jdisagg.router.admission import Drain, Lateness, Quotas, limit_seconds
from jdisagg.router.affinity import PrefixAffinity
from jdisagg.router.breaker import Breaker
from jdisagg.router.cluster_state import ClusterState
from jdisagg.router.decision import Answer, Ask, Decision, Hold, Refusal, Rules
from jdisagg.router.fairness import FairQueue, Ticket
from jdisagg.router.hardware import link
from jdisagg.router.pacing import paced_until
from jdisagg.router.placement import another_decode, another_prefill, decide
from jdisagg.router.predictor import LearnedLengths, LengthPredictor, MaxTokens
from jdisagg.telemetry import Counters

LOOK_SECONDS = 0.05  # how often those that wait are looked at when nothing says that anything changed
PAUSE_SECONDS = 0.002  # changes within so short a time are looked at together
OUTPUT_COST = 2.0  # of a token of the answer, in tokens of a prompt (VTC)

OnAnswer = Callable[[ClusterState, Ask, float, Rules, Answer], None]


def rules_of(config: RoutingConfig) -> Rules:
    slo = config.tpot_slo_seconds
    return Rules(
        tpot_slo_seconds=float("inf") if slo is None else slo,
        hold_seconds=config.hold_seconds,
        local_gain=config.local_gain,
        far=link(config.far_link),
    )


@plain
class Seeking:
    """A leg that looks for its workers. `arrived_at`, `deadline`: of its request. `under_way`: its request was let in before."""

    request: Request
    children: tuple[Child, ...]
    arrived_at: float
    deadline: float
    avoid: frozenset[str] = frozenset()
    under_way: bool = False


@dataclass(slots=True, eq=False)
class _Waiting:
    seeking: Seeking
    work: Work
    hashes: Sequence[int]
    answer: "asyncio.Future[Placement]"


class Placement:
    """A decision, and how it fares: whoever runs the leg says what happened. Each may be said twice."""

    def __init__(self, decision: Decision, placed: Placed, placing: "Placing", entry: Entry) -> None:
        self.decision = decision
        self._prefilled = self._credited = False
        self._placed = placed
        self._placing = placing
        self._entry = entry

    def prefill_sent(self) -> None:
        """The prompt is at the worker that computes it."""
        self._placed.prefill_sent(self._placing.now())

    def prefilled(self) -> None:
        """Its first token is known. Who computed it, and whether the KV arrives, is not: a success of nobody's yet."""
        self._prefilled = True
        self._placed.prefilled()
        self._placing.changed()

    def handed_over(self, prefill: str | None, decode: str) -> None:
        """A token was decoded from the KV that `prefill` computed (None: the decode worker itself)."""
        self._placing.on_handed_over(prefill, decode)
        self.worked({prefill or decode, decode})

    def worked(self, workers: Iterable[str]) -> None:
        """These have done for the leg all that it asks of them."""
        self._credited = True
        for worker in workers:
            self._placing.succeeded(worker)

    def measured_ttft(self, seconds: float) -> None:
        """The request's first token came so long after it arrived."""
        self._entry.ttft_seconds = seconds
        if self._entry.predicted_ttft_seconds is not None:
            self._placing.measured_ttft(self._entry.predicted_ttft_seconds, seconds)

    def measured_tpot(self, seconds: float) -> None:
        """The request ended; so long a token after the first."""
        self._entry.tpot_seconds = seconds
        if self.decision.tpot_seconds is not None:
            self._placing.on_measured("tpot", self.decision.tpot_seconds, seconds)

    def end(self, failed: Iterable[str] = ()) -> None:
        """Nothing of it is at its workers any more; these let it down. Where a prompt was prefilled the others did what they should, and
        are credited with it unless they were at the time: the end of a long answer says nothing of a worker now."""
        self._placed.end()
        failed = frozenset(failed)
        if self._prefilled and not self._credited:
            self.worked({self.decision.prefill or self.decision.decode, self.decision.decode} - failed)
        for worker in failed:
            self._placing.failed(worker)
        self._placing.changed()


class Placing:
    """`accounts` hold the snapshot. `affinity`: how many positions of a request each worker knows already. `on_answer` hears of every
    decision and refusal, with the snapshot it was made on; `on_measured` of "ttft" or "tpot", predicted and actual; `on_handed_over` of
    each pair whose KV made the trip, once a leg (no prefill worker: the decode worker computed it)."""

    def __init__(
        self,
        accounts: Accounts,
        config: RoutingConfig,
        clock: Clock,
        counters: Counters,
        refresh: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.accounts = accounts
        self.rules = rules_of(config)
        self.affinity: PrefixAffinity | None = None
        self.predictor: LengthPredictor = MaxTokens() if config.output_quantile is None else LearnedLengths(config.output_quantile)
        self.on_answer: OnAnswer | None = None
        self.on_measured: Callable[[str, float, float], None] = lambda what, predicted, actual: None
        self.on_handed_over: Callable[[str | None, str], None] = lambda prefill, decode: None
        self._config = config
        self._clock = clock
        self._counters = counters
        self._refresh = refresh
        self._quotas = Quotas(config.quotas(), config.quota_burst_seconds)
        self._breakers: dict[str, tuple[int, Breaker]] = {}
        self._queue = FairQueue(config.weights())
        self._waiting: dict[int, _Waiting] = {}
        self._drain = Drain()
        self._lateness = Lateness()
        self._last_key = 0
        self._entries: deque[Entry] = deque(maxlen=KEPT)
        self._news = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        accounts.on_news = self.changed

    def now(self) -> float:
        return self._clock.now()

    @property
    def waiting(self) -> int:
        """Requests that wait here for workers."""
        return len(self._queue)

    def status(self) -> RoutingStatus:
        """The last decisions, and what was sent to whom."""
        return status_of(self._entries, self.accounts, self.waiting, self.now())

    async def place(self, seeking: Seeking) -> Placement:
        """Waits until there are workers for it. Raises OverloadedError where it is refused, UnavailableError where there are none."""
        await self._renew()
        work, now = self._work(seeking), self.now()
        hashes = self.affinity.hashes(seeking.request) if self.affinity else ()
        if seeking.under_way:
            return self._take(self._ask(seeking, work, hashes, now), now)
        request, cost = seeking.request, work.tokens + OUTPUT_COST * work.children * work.expected_tokens
        self._take_quota(request.tenant, cost, now)
        try:
            return await self._let_in(seeking, work, hashes, cost, now)
        except BaseException:  # refused, given up or failed: it used nothing
            self._quotas.give_back(request.tenant, cost)
            raise

    async def _let_in(self, seeking: Seeking, work: Work, hashes: Sequence[int], cost: float, now: float) -> Placement:
        request = seeking.request
        due = seeking.arrived_at + self._limit(seeking)
        ahead = self._drain.seconds(self._queue.ahead(request.tenant, cost, due, request.priority)) if self._queue else 0.0
        ask = self._ask(seeking, work, hashes, now, ahead)
        answer = self._decide(ask, now)
        if isinstance(answer, Refusal):
            raise self._refused(ask, answer, now)
        if isinstance(answer, Decision):
            if not self._queue:
                return self._placed(ask, answer, now)
            self._news.set()  # there may be room for those in front, too
        return await self._wait(seeking, work, hashes, cost, due)

    async def another_prefill(self, avoid: frozenset[str]) -> str:
        await self._renew()
        return another_prefill(self.accounts.state, avoid, self.now(), self.rules)

    async def another_decode(self, avoid: frozenset[str]) -> str:
        await self._renew()
        return another_decode(self.accounts.state, avoid, self.now(), self.rules)

    def ended(self, request: Request, output_tokens: int) -> None:
        """A child came to its own end after so many tokens."""
        self.predictor.observe(request.tenant, len(request.prompt_token_ids), output_tokens)

    def measured_ttft(self, predicted_seconds: float, seconds: float) -> None:
        self._lateness.observe(seconds - predicted_seconds, self.now())
        self.on_measured("ttft", predicted_seconds, seconds)

    def changed(self) -> None:
        """There may be room."""
        if self._waiting:
            self._news.set()

    def failed(self, worker: str) -> None:
        state = self.accounts.state
        breaker = self._breaker(worker)
        if breaker is None:
            self._breakers = {name: kept for name, kept in self._breakers.items() if kept[0] == state.life(name)}
            if worker not in state:
                return
            breaker = Breaker()
            self._breakers[worker] = state.life(worker), breaker
        breaker.failed(self.now())
        self.accounts.bar(worker, breaker.barred_until)

    def succeeded(self, worker: str) -> None:
        if self._breakers.pop(worker, None) is not None:
            self.accounts.bar(worker, 0.0)

    def _breaker(self, worker: str) -> Breaker | None:
        """Of the process that bears the name now; none while nothing has failed."""
        life, breaker = self._breakers.get(worker, (-1, None))
        return breaker if life == self.accounts.state.life(worker) else None

    # ---- one leg

    def _work(self, seeking: Seeking) -> Work:
        request, accepted = seeking.request, len(seeking.children[0].accepted)
        prompt = len(request.prompt_token_ids)
        expected = self.predictor.predict(request.tenant, prompt, request.sampling.max_tokens)
        return Work(prompt + accepted, 0, len(seeking.children), max(1, expected - accepted))

    def _limit(self, seeking: Seeking) -> float:
        return limit_seconds(self._config.ttft_slo_seconds, seeking.deadline - seeking.arrived_at)

    def _ask(self, seeking: Seeking, work: Work, hashes: Sequence[int], now: float, ahead_seconds: float = 0.0) -> Ask:
        limit = self._limit(seeking)
        return Ask(
            work,
            self.affinity.matches(hashes) if self.affinity else {},
            seeking.avoid,
            seeking.under_way,
            any(child.accepted for child in seeking.children),
            now - seeking.arrived_at,
            ahead_seconds + self._lateness.seconds(now, limit),
            limit,
            self.predictor.typical_tokens,
        )

    def _decide(self, ask: Ask, now: float) -> Answer:
        answer = decide(self.accounts.state, ask, now, self.rules)
        if self.on_answer is not None and not isinstance(answer, Hold):  # what is held is asked for again and again
            self.on_answer(self.accounts.state, ask, now, self.rules, answer)
        return answer

    def _take(self, ask: Ask, now: float) -> Placement:
        answer = self._decide(ask, now)
        assert isinstance(answer, Decision), "what is under way is neither held nor refused"
        return self._placed(ask, answer, now)

    def _placed(self, ask: Ask, decision: Decision, now: float) -> Placement:
        self._counters.add("placements", reason=decision.kind)
        for worker in (decision.prefill, decision.decode) if self._breakers else ():
            breaker = self._breaker(worker) if worker is not None else None
            if breaker is not None and worker is not None:
                breaker.placed(now)
                self.accounts.bar(worker, breaker.barred_until)
        until = paced_until(self.accounts.state, ask, decision, self.rules, now)
        if until is not None:
            self.accounts.pace(decision.decode, until)
        work = Work(ask.work.tokens, decision.cached_tokens, ask.work.children, ask.work.expected_tokens)
        placed = self.accounts.place(decision.prefill, decision.decode, work, now)
        return Placement(decision, placed, self, self._remember(ask, decision, now))

    def _remember(self, ask: Ask, answer: Decision | Refusal, now: float) -> Entry:
        entry = Entry(now, ask.age_seconds, ask.work.tokens, answer)
        self._entries.append(entry)
        return entry

    def _refused(self, ask: Ask, refusal: Refusal, now: float) -> OverloadedError:
        self._counters.add("rejections", cause=refusal.kind)
        self._remember(ask, refusal, now)
        return OverloadedError(refusal.reason, retry_after_seconds=refusal.retry_after_seconds)

    def _take_quota(self, tenant: str, cost: float, now: float) -> None:
        try:
            self._quotas.take(tenant, cost, now)
        except OverloadedError:
            self._counters.add("rejections", cause="quota")
            raise

    async def _renew(self) -> None:
        if self._refresh is not None:
            await self._refresh()

    # ---- those that wait

    async def _wait(self, seeking: Seeking, work: Work, hashes: Sequence[int], cost: float, due: float) -> Placement:
        self._last_key += 1
        key, request = self._last_key, seeking.request
        waiting = self._waiting[key] = _Waiting(seeking, work, hashes, asyncio.get_running_loop().create_future())
        self._queue.add(Ticket(key, request.tenant, due, cost, request.priority))
        self._counters.add("requests_held")
        if self._serving is None:
            self._drain.busy(self.now())
            self._serving = asyncio.create_task(self._serve())
        try:
            return await asyncio.shield(waiting.answer)
        except asyncio.CancelledError:
            if waiting.answer.done() and waiting.answer.exception() is None:
                waiting.answer.result().end()  # placed at the very moment at which it was given up
            raise
        finally:
            self._queue.remove(key)
            del self._waiting[key]
            self._news.set()

    async def _serve(self) -> None:
        """Runs while anybody waits."""
        try:
            while self._waiting:
                await self._renew()
                self._news.clear()  # what was asked for is no news
                self._serve_heads()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._news.wait()
                        await asyncio.sleep(PAUSE_SECONDS)
        except Exception as error:  # nobody waits for what never comes
            for waiting in self._waiting.values():
                if not waiting.answer.done():
                    _tell(waiting, error)
        finally:
            self._serving = None
            self._drain.idle(self.now())

    def _serve_heads(self) -> None:
        while (ticket := self._queue.head()) is not None:
            waiting, now = self._waiting[ticket.key], self.now()
            ask = self._ask(waiting.seeking, waiting.work, waiting.hashes, now)
            try:
                answer = self._decide(ask, now)
            except Exception as error:  # whatever it is, whoever waits must hear of it
                self._queue.remove(ticket.key)
                _tell(waiting, error)
                continue
            if isinstance(answer, Hold):
                return
            if isinstance(answer, Refusal):
                self._queue.remove(ticket.key)
                _tell(waiting, self._refused(ask, answer, now))
                continue
            self._queue.serve()
            self._drain.served(ticket.cost, now)
            waiting.answer.set_result(self._placed(ask, answer, now))


def _tell(waiting: _Waiting, error: Exception) -> None:
    waiting.answer.set_exception(error)
    waiting.answer.exception()  # whoever gave up meanwhile does not ask for it

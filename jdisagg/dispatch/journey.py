"""One request under way: its children, the legs that carry them, its deadline, and what to do about each fact that a leg posts.

A leg that was preempted or whose worker failed is followed by another, for the children that are not at their end, with the
tokens accepted so far. Preemptions are no failures; they are counted and always go on. Failures of each child are bounded by
`limits.max_attempts`, and the workers that failed are avoided while there are others. An overloaded worker refuses a
fresh request to the client; one under way waits for it within its deadline.

A client that comes back (`request.resumption`) brings the accepted tokens itself; attempt numbers begin higher each time it does, so that
what an earlier router left running is superseded.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from jdisagg.clock import Clock, unended
from jdisagg.config import LimitsConfig
from jdisagg.dispatch.child_stream import ChildStream, NewTextStream
from jdisagg.dispatch.leg import Leg
from jdisagg.dispatch.mailbox import Mailbox
from jdisagg.dispatch.placing import Placement, Placing, Seeking
from jdisagg.dispatch.ports import Child
from jdisagg.dispatch.timing import Stopwatch
from jdisagg.dispatch.trip import CLOSE_SECONDS, Cluster, DeadlinePassed, Fact, LegEnded, Preempted, Retried, Tokens, Trip, Waited
from jdisagg.errors import DeadlineExceededError, OverloadedError, UnavailableError
from jdisagg.request import Request, StreamEvent, Usage
from jdisagg.telemetry import Counters

FIRST_BACKOFF_SECONDS = 0.02
MAX_BACKOFF_SECONDS = 1.0
RESUMPTION_BITS = 20


class Journey:
    """`first_token` is called once, with the instant of the first token of all."""

    def __init__(
        self,
        request: Request,
        cluster: Cluster,
        new_text: NewTextStream,
        limits: LimitsConfig,
        clock: Clock,
        new_id: Callable[[], int],
        placing: Placing,
        first_token: Callable[[float], None],
        counters: Counters,
    ) -> None:
        self.saw_token = False
        resumption, request = request.resumption, replace(request, resumption=None) if request.resumption else request
        self._request = request
        self._limits = limits
        self._clock = clock
        self._placing = placing
        self._first_token = first_token
        self._counters = counters
        self._seconds = request.deadline_seconds or limits.default_deadline_seconds
        self._watch = Stopwatch(clock.now())
        self._deadline = self._watch.started_at + self._seconds
        self._attempt = (resumption.number if resumption else 0) << RESUMPTION_BITS
        self._placements = 0  # while there is none it is as fresh as when it came, however often it has asked
        self._resumed = resumption is not None
        self._first_placement: Placement | None = None
        self._as_planned = not self._resumed  # one leg serves it all, with the workers that were chosen for it
        self._failures: Counter[int] = Counter()
        self._avoid: frozenset[str] = frozenset()
        self._cause: UnavailableError | None = None
        self._context_tokens = 0
        self._facts: Mailbox[Fact] = Mailbox()
        self._legs: dict[Leg, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._children = {index: ChildStream(request, index, new_text(request)) for index in range(request.sampling.n)}
        self._had = resumption.children if resumption else ()
        self._unfinished = set(self._children)
        self._trip = Trip(
            cluster=cluster,
            request=request,
            new_id=new_id,
            now=clock.now,
            arrived_at=self._watch.started_at,
            deadline=self._deadline,
            post=self._post,
            next_attempt=self._next_attempt,
            choose_prefill=self._choose_prefill,
            choose_decode=self._choose_decode,
        )

    @property
    def unfinished(self) -> bool:
        return bool(self._unfinished)

    async def begin(self) -> None:
        """Starts the first leg, and one timer for the whole request: one for each token would cost more than the token."""
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._facts.put_nowait, DeadlinePassed())
        for index, child in enumerate(self._had):
            await self._children[index].resume(child)
        self._had = ()
        self._unfinished = {index for index, child in self._children.items() if child.finish is None}
        self._go_on(list(self._children.values()), delay_seconds=0.0)

    def next_fact(self) -> Awaitable[Fact]:
        """Waits for what comes next; the deadline is a fact too."""
        return self._facts.get()

    def take(self, fact: Fact) -> StreamEvent | None:
        """What the client gets of it, if anything. Starts the legs that follow; raises what ends the request."""
        match fact:
            case Tokens():
                return self._take_tokens(fact)
            case Preempted(child):
                self._as_planned = False
                self._watch.preemptions += 1
                self._counters.add("preemptions")
                if self._children[child].finish is None:
                    self._go((self._children[child].child,), delay_seconds=0.0)
            case LegEnded(leg, error):
                assert isinstance(leg, Leg)
                self._take_end(leg, error)
            case DeadlinePassed():
                raise self._too_late()
            case Waited() | Retried():
                raise AssertionError("these are counted when they are posted")
        return None

    async def close(self) -> None:
        """Cancels what still runs, on all workers, and waits until it is said."""
        if self._timer is not None:
            self._timer.cancel()
        tasks = [*self._legs.values(), *self._closing]
        for leg, task in self._legs.items():
            if not leg.over:
                task.cancel()
        for task in await unended(tasks, 2 * CLOSE_SECONDS):
            task.cancel()
        # Journey and trip know each other; without this they would wait for the garbage collector, prompt and all.
        self._legs.clear()
        self._facts.clear()
        del self._trip

    def _post(self, fact: Fact) -> None:
        """Facts that only count are taken at once: waking whoever waits for the next would cost more than all the rest of them."""
        match fact:
            case Waited(seconds):
                self._watch.queue_seconds += seconds
            case Retried(cause):
                self._as_planned = False
                self._counters.add(cause)
            case Tokens():
                self._watch.kv_bytes_moved += fact.kv_bytes_moved
                self._watch.exposed_transfer_seconds += fact.exposed_transfer_seconds
                if fact.token_ids:
                    self._facts.put_nowait(fact)
            case _:
                self._facts.put_nowait(fact)

    def _take_tokens(self, fact: Tokens) -> StreamEvent | None:
        now, stream = self._clock.now(), self._children[fact.child]
        event = stream.accept(fact.first_index, fact.token_ids, fact.logprobs, self._context_tokens)
        if event is None:
            return None
        self._watch.tokens(fact.child, len(event.token_ids), now)
        if not self.saw_token:
            self.saw_token = True
            self._first_token(now)
            if self._first_placement and self._as_planned:
                self._first_placement.measured_ttft(now - self._watch.started_at)
        if event.finish_reason is not None:
            self._unfinished.discard(fact.child)
            self._end_child(fact.child)
            self._placing.ended(self._request, len(stream.accepted))
            if not self.unfinished:
                tokens = sum(len(child.accepted) for child in self._children.values())
                usage = Usage(len(self._request.prompt_token_ids), tokens)
                event = replace(event, usage=usage, timings=self._watch.timings(now))
                if self._first_placement and self._as_planned and event.timings and tokens > len(self._children):
                    self._first_placement.measured_tpot(event.timings.tpot_seconds)
        return event

    def _end_child(self, index: int) -> None:
        """Its leg need not go on for it: a leg without open children is cancelled, which closes both sides."""
        for leg, task in self._legs.items():
            if index in leg.open:
                if leg.open == {index}:
                    leg.open.clear()
                    if index not in leg.ended_by_worker:
                        task.cancel()
                else:
                    closing = asyncio.create_task(leg.end_child(index))
                    self._closing.add(closing)
                    closing.add_done_callback(self._closing.discard)

    def _take_end(self, leg: Leg, error: Exception | None) -> None:
        self._legs.pop(leg, None)
        alive = [self._children[child.index] for child in leg.children if child.index in leg.open]
        alive = [stream for stream in alive if stream.finish is None]
        if not alive:
            return
        if error is None:
            error = UnavailableError("a worker ended a stream without saying why")
        if leg.placed:
            self._as_planned = False
        if leg.placed and isinstance(error, UnavailableError):
            self._cause = error
        delay_seconds = self._delay_before_retry(error, [stream.index for stream in alive], bool(leg.refused - self._avoid))
        self._avoid |= leg.failed | leg.refused
        self._go_on(alive, delay_seconds)

    def _go_on(self, streams: Iterable[ChildStream], delay_seconds: float) -> None:
        """Children that have nothing yet go together and share the prompt; each of the others goes alone."""
        streams = [stream for stream in streams if stream.finish is None]
        together = tuple(stream.child for stream in streams if not stream.accepted)
        if together:
            self._go(together, delay_seconds)
        for stream in streams:
            if stream.accepted:
                self._go((stream.child,), delay_seconds)

    def _delay_before_retry(self, error: Exception, children: list[int], refused: bool) -> float:
        """How long to wait before another leg of `children`; raises `error` when there is to be none. Counted by child: one death may end
        the legs of many. `refused`: a worker has no room for such a request that others, not asked yet, may have."""
        if isinstance(error, DeadlineExceededError):
            raise self._too_late() from error
        if isinstance(error, OverloadedError) and (self._resumed or self._placements > 1):
            self._counters.add("waits_for_overloaded_workers")
            return min(error.retry_after_seconds or MAX_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)
        if not isinstance(error, UnavailableError) and not refused:
            raise error
        self._failures.update(children)
        self._counters.add("legs_failed")
        failures = max(self._failures[child] for child in children)
        if failures >= self._limits.max_attempts:
            raise error if refused else self._cause or error  # what a worker said tells more than that none is left
        return 0.0 if refused else min(FIRST_BACKOFF_SECONDS * 2 ** (failures - 1), MAX_BACKOFF_SECONDS)

    def _go(self, children: tuple[Child, ...], delay_seconds: float) -> None:
        leg = Leg(self._trip, children, self._next_attempt())
        self._legs[leg] = asyncio.create_task(self._run(leg, delay_seconds))

    async def _run(self, leg: Leg, delay_seconds: float) -> None:
        try:
            if delay_seconds:
                await self._clock.sleep(delay_seconds)
            asked_at = self._clock.now()
            placement = await self._placing.place(self._seeking(leg))
            self._watch.queue_seconds += self._clock.now() - asked_at
            self._placements += 1
            self._first_placement = self._first_placement or placement
            self._context_tokens = placement.decision.context_tokens
            try:
                await leg.run(placement.decision, placement)
            finally:
                placement.end(leg.failed)
        except Exception as error:
            self._facts.put_nowait(LegEnded(leg, error))
        else:
            self._facts.put_nowait(LegEnded(leg, None))

    def _next_attempt(self) -> int:
        self._attempt += 1
        return self._attempt

    def _seeking(self, leg: Leg) -> Seeking:
        under_way = self._resumed or self._placements > 0
        return Seeking(self._request, leg.children, self._watch.started_at, self._deadline, self._avoid, under_way)

    async def _choose_prefill(self, avoid: frozenset[str]) -> str:
        return await self._placing.another_prefill(avoid | self._avoid)

    async def _choose_decode(self, avoid: frozenset[str]) -> str:
        return await self._placing.another_decode(avoid | self._avoid)

    def _too_late(self) -> DeadlineExceededError:
        tokens = sum(len(child.accepted) for child in self._children.values())
        return DeadlineExceededError(
            f"request {self._request.request_id!r}: its {self._seconds:g} s passed after {tokens} tokens; "
            "ask for fewer tokens or give it more time"
        )

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

from jdisagg.clock import Clock
from jdisagg.config import LimitsConfig
from jdisagg.dispatch.child_stream import ChildStream, NewTextStream
from jdisagg.dispatch.leg import Leg
from jdisagg.dispatch.ports import Child, WorkerStatus
from jdisagg.dispatch.timing import Stopwatch
from jdisagg.dispatch.trip import CLOSE_SECONDS, Cluster, DeadlinePassed, Fact, LegEnded, Preempted, Retried, Tokens, Trip, Waited
from jdisagg.errors import DeadlineExceededError, OverloadedError, UnavailableError
from jdisagg.request import Request, StreamEvent, Usage
from jdisagg.router.cluster_state import ClusterState
from jdisagg.router.placement import another_decode, another_prefill, place
from jdisagg.telemetry import Counters

FIRST_BACKOFF_SECONDS = 0.02
MAX_BACKOFF_SECONDS = 1.0
RESUMPTION_BITS = 20


class Journey:
    """`first_token` is called once, with the instant of the first token of all. `placed` counts the legs at each worker,
    of all requests."""

    def __init__(
        self,
        request: Request,
        cluster: Cluster,
        new_text: NewTextStream,
        limits: LimitsConfig,
        clock: Clock,
        new_id: Callable[[], int],
        statuses: Callable[[], Awaitable[tuple[WorkerStatus, ...]]],
        first_token: Callable[[float], None],
        counters: Counters,
        placed: Counter[str],
    ) -> None:
        self.saw_token = False
        resumption, request = request.resumption, replace(request, resumption=None)
        self._request = request
        self._limits = limits
        self._clock = clock
        self._statuses = statuses
        self._first_token = first_token
        self._counters = counters
        self._seconds = request.deadline_seconds or limits.default_deadline_seconds
        self._watch = Stopwatch(clock.now())
        self._deadline = self._watch.started_at + self._seconds
        self._attempt = (resumption.number if resumption else 0) << RESUMPTION_BITS
        self._first_attempt = self._attempt + 1
        self._placed = placed
        self._failures: Counter[int] = Counter()
        self._avoid: frozenset[str] = frozenset()
        self._cause: UnavailableError | None = None
        self._context_tokens = 0
        self._facts: asyncio.Queue[Fact] = asyncio.Queue()
        self._legs: dict[Leg, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._children = {index: ChildStream(request, index, new_text(request)) for index in range(request.sampling.n)}
        for index, child in enumerate(resumption.children if resumption else ()):
            self._children[index].resume(child)
        self._trip = Trip(
            cluster=cluster,
            request=request,
            new_id=new_id,
            now=clock.now,
            arrived_at=self._watch.started_at,
            deadline=self._deadline,
            post=self._facts.put_nowait,
            next_attempt=self._next_attempt,
            choose_prefill=self._choose_prefill,
            choose_decode=self._choose_decode,
        )

    @property
    def unfinished(self) -> bool:
        return any(child.finish is None for child in self._children.values())

    def begin(self) -> None:
        """Starts the first leg, and one timer for the whole request: one for each token would cost more than the token."""
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._facts.put_nowait, DeadlinePassed())
        self._go_on(list(self._children.values()), delay_seconds=0.0)

    async def next_fact(self) -> Fact:
        """Waits for what comes next; the deadline is a fact too."""
        return await self._facts.get()

    def take(self, fact: Fact) -> StreamEvent | None:
        """What the client gets of it, if anything. Starts the legs that follow; raises what ends the request."""
        match fact:
            case Waited(seconds):
                self._watch.queue_seconds += seconds
            case Tokens():
                return self._take_tokens(fact)
            case Preempted(child):
                self._watch.preemptions += 1
                self._counters.add("preemptions")
                if self._children[child].finish is None:
                    self._go((self._children[child].child,), delay_seconds=0.0)
            case Retried(cause):
                self._counters.add(cause)
            case LegEnded(leg, error):
                assert isinstance(leg, Leg)
                self._take_end(leg, error)
            case DeadlinePassed():
                raise self._too_late()
        return None

    async def close(self) -> None:
        """Cancels what still runs, on all workers, and waits until it is said."""
        if self._timer is not None:
            self._timer.cancel()
        tasks = [*self._legs.values(), *self._closing]
        for task in self._legs.values():
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2 * CLOSE_SECONDS)

    def _take_tokens(self, fact: Tokens) -> StreamEvent | None:
        now, stream = self._clock.now(), self._children[fact.child]
        self._watch.kv_bytes_moved += fact.kv_bytes_moved
        self._watch.exposed_transfer_seconds += fact.exposed_transfer_seconds
        event = stream.accept(fact.first_index, fact.token_ids, fact.logprobs, self._context_tokens)
        if event is None:
            return None
        self._watch.tokens(fact.child, len(event.token_ids), now)
        if not self.saw_token:
            self.saw_token = True
            self._first_token(now)
        if event.finish_reason is not None:
            self._end_child(fact.child)
            if not self.unfinished:
                tokens = sum(len(child.accepted) for child in self._children.values())
                usage = Usage(len(self._request.prompt_token_ids), tokens)
                event = replace(event, usage=usage, timings=self._watch.timings(now))
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
        if leg.placed and isinstance(error, UnavailableError):
            self._cause = error
        delay_seconds = self._delay_before_retry(error, [stream.index for stream in alive])
        self._avoid |= leg.failed
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

    def _delay_before_retry(self, error: Exception, children: list[int]) -> float:
        """How long to wait before another leg of `children`; raises `error` when there is to be none. Counted by child: one death may end
        the legs of many."""
        if isinstance(error, DeadlineExceededError):
            raise self._too_late() from error
        if isinstance(error, OverloadedError) and (self._attempt > self._first_attempt or self._first_attempt > 1):
            self._counters.add("waits_for_overloaded_workers")
            return min(error.retry_after_seconds or MAX_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)
        if not isinstance(error, UnavailableError):
            raise error
        self._failures.update(children)
        self._counters.add("legs_failed")
        failures = max(self._failures[child] for child in children)
        if failures >= self._limits.max_attempts:
            raise self._cause or error  # what a worker said tells more than that none is left
        return min(FIRST_BACKOFF_SECONDS * 2 ** (failures - 1), MAX_BACKOFF_SECONDS)

    def _go(self, children: tuple[Child, ...], delay_seconds: float) -> None:
        leg = Leg(self._trip, children, self._next_attempt())
        self._legs[leg] = asyncio.create_task(self._run(leg, delay_seconds))

    async def _run(self, leg: Leg, delay_seconds: float) -> None:
        try:
            if delay_seconds:
                await self._clock.sleep(delay_seconds)
            resuming = any(child.accepted for child in leg.children)
            placement = place(await self._cluster_now(), self._avoid, resuming)
            self._context_tokens = placement.context_tokens
            workers = [name for name in (placement.prefill, placement.decode) if name is not None]
            self._placed.update(workers)
            try:
                await leg.run(placement)
            finally:
                self._placed.subtract(workers)
        except Exception as error:
            self._facts.put_nowait(LegEnded(leg, error))
        else:
            self._facts.put_nowait(LegEnded(leg, None))

    def _next_attempt(self) -> int:
        self._attempt += 1
        return self._attempt

    async def _cluster_now(self) -> ClusterState:
        return ClusterState.of(await self._statuses(), self._placed)

    async def _choose_prefill(self, avoid: frozenset[str]) -> str:
        return another_prefill(await self._cluster_now(), avoid | self._avoid)

    async def _choose_decode(self, avoid: frozenset[str]) -> str:
        return another_decode(await self._cluster_now(), avoid | self._avoid)

    def _too_late(self) -> DeadlineExceededError:
        tokens = sum(len(child.accepted) for child in self._children.values())
        return DeadlineExceededError(
            f"request {self._request.request_id!r}: its {self._seconds:g} s passed after {tokens} tokens; "
            "ask for fewer tokens or give it more time"
        )

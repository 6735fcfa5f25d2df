"""The state of one request under way: its children with their accepted tokens, its deadline, what
was tried, and its timings.

Accepted tokens exist here alone. `accept` is the one filter through which tokens of workers come
to the client: each is taken exactly once and in order, whichever worker, attempt or message brings
it. What is accepted is what a re-prefill forces. Knows no workers and decides nothing about them.

Invariants: a token that was accepted is never accepted again; none is left out (`DeliveryError`,
a bug of our own); nothing follows the end of a child."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from jdisagg.clock import Clock, unended
from jdisagg.dispatch.placer import PlacementHandle
from jdisagg.dispatch.token_stream import TextDelta
from jdisagg.errors import DeadlineExceededError, UnavailableError
from jdisagg.mailbox import Mailbox
from jdisagg.messages.ports import Child
from jdisagg.prompt_logprobs import PromptLogprobs
from jdisagg.request import (
    CachedTokens,
    FinishReason,
    Request,
    StreamEvent,
    Timings,
    TokenLogprobs,
    Usage,
)

REPLAYED_TOKENS = 64  # at once, when a stream is resumed
RESUMPTION_BITS = 20  # attempts of a request between two resumptions of it by its client


class DeliveryError(AssertionError):
    """A worker left a token out."""


class TextStream(Protocol):
    """What `dispatch/token_stream.py` offers: text of tokens, as far as it is certain. Held-back
    text may still complete a stop string when it is given out at the end."""

    @property
    def stopped(self) -> bool: ...
    def push(self, token_ids: tuple[int, ...]) -> TextDelta: ...
    def finish(self) -> str: ...


NewTextStream = Callable[[Request], TextStream]


class RunningAttempt(Protocol):
    """An attempt is `over` when its workers have ended all of its children."""

    @property
    def over(self) -> bool: ...

    async def tell_suspended(self) -> None: ...


@dataclass(slots=True, eq=False)
class ChildRun:
    """One of the request's n streams. `resumed_tokens`: of `accepted`, those that the client
    brought. Instants are those of tokens that came since."""

    text: TextStream
    accepted: list[int]
    finish: FinishReason | None = None
    resumed_tokens: int = 0
    first_at: float | None = None
    second_at: float | None = None
    latest_at: float = 0.0

    def count(self, tokens: int, now: float) -> None:
        if self.first_at is None:
            self.first_at = now
        if self.second_at is None and len(self.accepted) - self.resumed_tokens > 1:
            self.second_at = now
        self.latest_at = now


class RequestRun:
    """One request under way.

    A client that comes back (`request.resumption`) brings the accepted tokens itself. Attempt
    numbers begin higher each time it does, so that what an earlier router left running is
    superseded."""

    def __init__(
        self,
        request: Request,
        new_text: NewTextStream,
        clock: Clock,
        default_deadline_seconds: float,
    ) -> None:
        resumption = request.resumption
        self.request = replace(request, resumption=None) if resumption else request
        self.resumed = resumption is not None
        self.seconds = request.deadline_seconds or default_deadline_seconds
        self.arrived_at = clock.now()
        self.deadline = self.arrived_at + self.seconds
        self.children = [ChildRun(new_text(self.request), []) for _ in range(request.sampling.n)]
        self.context_tokens = 0
        # what was tried
        self.attempts: dict[RunningAttempt, asyncio.Task[None]] = {}
        self.placements = 0
        self.first_placement: PlacementHandle | None = None
        self.failures: Counter[int] = Counter()
        self.avoid: frozenset[str] = frozenset()
        self.cause: UnavailableError | None = None
        self.as_planned = not self.resumed  # by one attempt at the workers chosen for it
        # timings
        self.first_token_at: float | None = None
        self.queue_seconds = 0.0
        self.kv_bytes_moved = 0
        self.exposed_transfer_seconds = 0.0
        self.preemptions = 0
        self._cached: CachedTokens | None = None
        self._had = resumption.children if resumption else ()
        # they come with the first event, so who has had one has them
        self._prompt_logprobs: PromptLogprobs | None = None
        if any(had.token_ids or had.finish_reason for had in self._had):
            self._ask_no_more_of_prompt()
        self._attempt = (resumption.number if resumption else 0) << RESUMPTION_BITS
        self._clock = clock
        self._events: Mailbox[StreamEvent | Exception] = Mailbox()
        self._unfinished = len(self.children)
        self._closing: set[asyncio.Task[None]] = set()
        self._timer = asyncio.get_running_loop().call_later(self.seconds, self._end_by_deadline)
        self.closed = False
        # for how long workers keep the KV of a suspended one; None: it is not
        self.keep_seconds: float | None = None
        self.suspensions = 0  # changes of that
        self.awake = asyncio.Event()
        self.awake.set()

    def suspend(self, keep_seconds: float | None) -> None:
        """No attempt begins until it goes on (None)."""
        self.keep_seconds, self.as_planned = keep_seconds, False
        self.suspensions += 1
        if keep_seconds is None:
            self.awake.set()
        else:
            self.awake.clear()

    @property
    def suspensions_known_anew(self) -> int:
        """Of its suspensions, those that a worker to which it is new need not be told."""
        return self.suspensions - (self.keep_seconds is not None)

    # ---- time

    def remaining_seconds(self) -> float:
        return max(1e-3, self.deadline - self._clock.now())

    def age_seconds(self) -> float:
        return self._clock.now() - self.arrived_at

    def too_late(self) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"request {self.request.request_id!r}: its {self.seconds:g} s passed after"
            f" {self.output_tokens} tokens; ask for fewer tokens or give it more time"
        )

    # ---- children

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output_tokens(self) -> int:
        return sum(len(child.accepted) for child in self.children)

    @property
    def open_children(self) -> list[int]:
        return [index for index, child in enumerate(self.children) if child.finish is None]

    def as_child(self, index: int) -> Child:
        """The child as workers need it: with the tokens that a re-prefill forces."""
        return Child(index, tuple(self.children[index].accepted))

    def groups(self, children: Iterable[int]) -> list[tuple[int, ...]]:
        """How these go on: those that have nothing yet together, as they share the prompt; each of
        the others alone."""
        children = list(children)
        together = tuple(index for index in children if not self.children[index].accepted)
        alone = [(index,) for index in children if self.children[index].accepted]
        return [together, *alone] if together else alone

    @property
    def under_way(self) -> bool:
        """While it was not placed it is as fresh as when it came, however often it has asked."""
        return self.resumed or self.placements > 0

    def placed(self, placement: PlacementHandle, waited_seconds: float) -> None:
        self.placements += 1
        self.queue_seconds += waited_seconds
        self.first_placement = self.first_placement or placement
        self.context_tokens = placement.decision.context_tokens

    def note_cached(self, tokens: CachedTokens) -> None:
        """So much of the prompt's KV was known when it was prefilled. What later attempts find,
        which begin where this one failed, does not count."""
        if self._cached is None:
            self._cached = tokens

    def next_attempt(self) -> int:
        self._attempt += 1
        return self._attempt

    async def resume(self) -> None:
        """Takes what the client has already: the text goes on where it was (rule 9), an end is not
        reported again. A long text takes its time, and others have their turn meanwhile."""
        for child, had in zip(self.children, self._had, strict=False):
            for first in range(0, len(had.token_ids), REPLAYED_TOKENS):
                child.text.push(had.token_ids[first : first + REPLAYED_TOKENS])
                await asyncio.sleep(0)
            child.accepted += had.token_ids
            child.resumed_tokens = len(had.token_ids)
            child.finish = had.finish_reason
        self._had = ()
        self._unfinished = len(self.open_children)

    def accept_prompt(self, logprobs: PromptLogprobs | None) -> None:
        """Takes the prompt's log-probabilities, once and whole; they go with the next event. What
        is asked of workers from now on is tokens alone."""
        wanted = self.request.sampling.prompt_logprobs is not None
        if logprobs is not None and wanted and len(logprobs) + 1 == self.prompt_tokens:
            self._prompt_logprobs = logprobs
            self._ask_no_more_of_prompt()

    def _ask_no_more_of_prompt(self) -> None:
        sampling = replace(self.request.sampling, prompt_logprobs=None)
        self.request = replace(self.request, sampling=sampling)

    def accept(
        self,
        index: int,
        first_index: int,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
    ) -> None:
        """Takes what is new of tokens `first_index`.. of a child, up to its end; what the client
        gets of it is its next event."""
        child = self.children[index]
        seen = len(child.accepted) - first_index
        if seen > 0:
            first_index += seen
            token_ids, logprobs = token_ids[seen:], logprobs[seen:]
        if child.finish is not None or not token_ids:
            return
        if seen < 0:
            raise DeliveryError(
                f"request {self.request.request_id!r}, child {index}: token {first_index} came,"
                f" {len(child.accepted)} was next"
            )
        count, child.finish = self.request.end_among(first_index, token_ids, self.context_tokens)
        # The stop id itself is not delivered.
        kept = token_ids[: count - (child.finish is FinishReason.STOP)]
        text = ""
        if kept:
            delta = child.text.push(kept)
            text = delta.text
            if delta.stopped:
                kept = kept[: delta.tokens_kept]
                child.finish = FinishReason.STOP
        if child.finish is not None:
            text += child.text.finish()
            if child.text.stopped:
                child.finish = FinishReason.STOP
        child.accepted += kept
        if not kept and not text and child.finish is None:
            return
        now = self._clock.now()
        if self.first_token_at is None:
            self.first_token_at = now
        if kept:
            child.count(len(kept), now)
        usage = timings = None
        if child.finish is not None:
            self._unfinished -= 1
            if not self._unfinished:
                cached = self._cached or CachedTokens()
                usage = Usage(
                    self.prompt_tokens, self.output_tokens, cached.total, cached_by_tier=cached
                )
                timings = self.timings(now)
        event = StreamEvent(
            index, first_index, kept, text, logprobs[: len(kept)], child.finish, usage, timings
        )
        if self._prompt_logprobs is not None:
            event = replace(event, prompt_logprobs=self._prompt_logprobs)
            self._prompt_logprobs = None
        self._events.put_nowait(event)

    # ---- what the client gets

    @property
    def has_more(self) -> bool:
        """Whether there is an event to come."""
        return self._unfinished > 0 or bool(self._events)

    async def next_event(self) -> StreamEvent:
        """Raises what ended the request."""
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event

    def fail(self, error: Exception) -> None:
        """The request ends with this error, after what was accepted before."""
        self._events.put_nowait(error)

    def timings(self, now: float) -> Timings:
        decoded = [child for child in self.children if child.first_at is not None]
        followers = sum(len(child.accepted) - child.resumed_tokens - 1 for child in decoded)
        decoding = sum(child.latest_at - (child.first_at or 0.0) for child in decoded)
        gaps = [
            child.second_at - (child.first_at or 0.0)
            for child in decoded
            if child.second_at is not None
        ]
        first = self.first_token_at
        return Timings(
            queue_seconds=self.queue_seconds,
            ttft_seconds=0.0 if first is None else first - self.arrived_at,
            tpot_seconds=decoding / followers if followers else 0.0,
            handoff_gap_seconds=max(gaps, default=0.0),
            total_seconds=now - self.arrived_at,
            kv_bytes_moved=self.kv_bytes_moved,
            preemptions=self.preemptions,
            exposed_transfer_seconds=self.exposed_transfer_seconds,
        )

    # ---- the end

    def clean_up(self, call: asyncio.Task[None]) -> None:
        """A call beside the attempts that `close` waits for."""
        self._closing.add(call)
        call.add_done_callback(self._closing.discard)

    async def close(self, seconds: float) -> None:
        """Cancels the attempts that are not over, and waits until they have freed what they hold
        at their workers; so long at the most."""
        self.closed = True
        self._timer.cancel()
        tasks = [*self.attempts.values(), *self._closing]
        for attempt, task in self.attempts.items():
            if not attempt.over:
                task.cancel()
        self.attempts.clear()
        for task in await unended(tasks, seconds):
            task.cancel()

    def _end_by_deadline(self) -> None:
        """One timer for the whole request: one for each token would cost more than the token."""
        self.fail(self.too_late())

"""State of one running request: its children with their accepted tokens, its deadline, its attempts
and its timings.

Accepted tokens are stored only in this module. All tokens from workers pass through `accept`, which
accepts each token exactly once and in order.

Invariants: no token is accepted twice. No token is skipped; if a worker skips one, `DeliveryError`
reports the bug. No token is accepted after the end of its child."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from jdisagg.clock import Clock, Mailbox, unended
from jdisagg.dispatch.placer import PlacementHandle
from jdisagg.dispatch.token_stream import TextDelta
from jdisagg.errors import DeadlineExceededError, UnavailableError
from jdisagg.messages.ports import Child
from jdisagg.messages.weights import version_of
from jdisagg.prompt.logprobs import PromptLogprobs
from jdisagg.request import (
    CachedTokens,
    FinishReason,
    Request,
    StreamEvent,
    Timings,
    TokenLogprobs,
    Usage,
)

REPLAYED_TOKENS = 64  # tokens replayed at a resumption before other tasks get a turn
RESUMPTION_BITS = 20  # 2**bits attempt numbers between two resumptions by the client


class DeliveryError(AssertionError):
    """A worker skipped a token of a child, which is a bug."""


class TextStream(Protocol):
    """Incremental detokenizer (`dispatch/token_stream.py`). `push` returns the text that later
    tokens cannot change and holds back the rest. `finish` returns the text that was held back,
    which may still complete a stop string. `stop_string` is the stop string that ended the output,
    or ""."""

    @property
    def stop_string(self) -> str: ...
    def push(self, token_ids: tuple[int, ...]) -> TextDelta: ...
    def finish(self) -> str: ...


NewTextStream = Callable[[Request], TextStream]


class RunningAttempt(Protocol):
    """An attempt of the request. `over` is True if workers have reported the end of all its
    children."""

    @property
    def over(self) -> bool: ...

    def suspend(self) -> None:
        """Called before the attempt is cancelled, if a later one will go on."""
        ...


@dataclass(slots=True, eq=False)
class ChildRun:
    """One of the request's n parallel samples. `resumed_tokens` is the number of accepted tokens
    that the client already had when it resumed the stream. Times are recorded for later tokens
    only. `aside_seconds` is the time that the sequence has spent without pages since it was first
    preempted for a request of higher priority (None: never). If it is without pages now,
    `aside_since` is when this began."""

    text: TextStream
    accepted: list[int]
    finish: FinishReason | None = None
    resumed_tokens: int = 0
    first_at: float | None = None
    second_at: float | None = None
    latest_at: float = 0.0
    aside_seconds: float | None = None
    aside_since: float | None = None

    def preempted(self, yielded: bool, now: float) -> None:
        if yielded and self.aside_seconds is None:
            self.aside_seconds = 0.0
        if self.aside_seconds is not None and self.aside_since is None:
            self.aside_since = now

    def aside(self, now: float) -> float | None:
        if self.aside_seconds is None or self.aside_since is None:
            return self.aside_seconds
        return self.aside_seconds + now - self.aside_since

    def count(self, now: float) -> None:
        if self.first_at is None:
            self.first_at = now
        if self.second_at is None and len(self.accepted) - self.resumed_tokens > 1:
            self.second_at = now
        self.latest_at = now
        self.aside_seconds, self.aside_since = self.aside(now), None


class RequestRun:
    """One running request.

    If a client resumes a stream, it sends the tokens that it has (`request.resumption`). Each
    resumption starts with a higher attempt number, so that workers end the attempts of the earlier
    stream."""

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
        self.missing: Callable[[], Exception | None] = lambda: None
        self.children = [ChildRun(new_text(self.request), []) for _ in range(request.sampling.n)]
        self.context_tokens = 0
        # Attempts.
        self.attempts: dict[RunningAttempt, asyncio.Task[None]] = {}
        self.placements = 0
        self.placing = 0  # attempts that wait for workers
        self.unreached = 0  # number of attempts in a row that no worker received
        self.first_placement: PlacementHandle | None = None
        self.failures: dict[int, int] = {}  # by child
        self.failed: set[tuple[str, int]] = set()  # workers that failed, with their registrations
        self.unfit: frozenset[str] = frozenset()  # workers that cannot serve the request
        self.cause: UnavailableError | None = None
        self.as_planned = not self.resumed  # whether one attempt has sufficed so far
        # Timings.
        self.first_token_at: float | None = None
        self.queue_seconds = 0.0
        self.kv_bytes_moved = 0
        self.exposed_transfer_seconds = 0.0
        self.preemptions = 0
        self._weights: dict[str, int] = {}  # accepted tokens by the weights' version
        self._cached: CachedTokens | None = None
        self._block_tokens = 0
        self._had = resumption.children if resumption else ()
        # Sent with the first event, so any client that has received an event has them.
        self._prompt_logprobs: PromptLogprobs | None = None
        if any([had.token_ids or had.finish_reason for had in self._had]):
            self._ask_no_more_of_prompt()
        self._attempt = (resumption.number if resumption else 0) << RESUMPTION_BITS
        self._clock = clock
        self._events: Mailbox[StreamEvent | Exception] = Mailbox()
        self._unfinished = len(self.children)
        self._closing: set[asyncio.Task[None]] = set()
        self._timer = asyncio.get_running_loop().call_later(self.seconds, self._end_by_deadline)
        self.closed = False
        self.awake = asyncio.Event()
        self.awake.set()

    def suspend(self) -> "list[asyncio.Task[None]]":
        """Cancels the attempts that are not over, and returns their tasks. Later attempts begin
        when `awake` is set."""
        self.as_planned = False
        self.awake.clear()
        running = [attempt for attempt in self.attempts if not attempt.over]
        tasks = [self.attempts.pop(attempt) for attempt in running]
        for attempt, task in zip(running, tasks, strict=True):
            attempt.suspend()
            task.cancel()
            self.clean_up(task)
        return tasks

    # ---- time

    def remaining_seconds(self) -> float:
        return max(1e-3, self.deadline - self._clock.now())

    def age_seconds(self) -> float:
        return self._clock.now() - self.arrived_at

    def too_late(self) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"request {self.request.request_id!r}: its deadline of {self.seconds:g} s passed after"
            f" {self.output_tokens} tokens; request fewer tokens or set a longer deadline"
        )

    # ---- children

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output_tokens(self) -> int:
        return sum([len(child.accepted) for child in self.children])

    @property
    def open_children(self) -> list[int]:
        return [index for index, child in enumerate(self.children) if child.finish is None]

    def as_child(self, index: int) -> Child:
        """The worker prefills the accepted tokens again."""
        return Child(index, tuple(self.children[index].accepted))

    def groups(self, children: Iterable[int]) -> list[tuple[int, ...]]:
        """Groups children into attempts. Children without accepted tokens form one group, because
        they need only the prompt's KV. Each other child is a group of its own."""
        children = list(children)
        if len(children) == 1:
            return [tuple(children)]
        together = tuple(index for index in children if not self.children[index].accepted)
        alone = [(index,) for index in children if self.children[index].accepted]
        return [together, *alone] if together else alone

    @property
    def under_way(self) -> bool:
        return self.resumed or self.placements > 0

    def placed(self, placement: PlacementHandle, waited_seconds: float) -> None:
        self.placements += 1
        self.queue_seconds += waited_seconds
        self.first_placement = self.first_placement or placement
        self.context_tokens = placement.decision.context_tokens

    def note_cached(self, tokens: CachedTokens, block_tokens: int) -> None:
        """Records the number of prompt tokens that the first prefill found in the cache. The
        numbers of later attempts are ignored, because they include KV that the first attempt
        computed. `block_tokens`: length of the decode worker's cached blocks, or 0."""
        if self._cached is None:
            self._cached, self._block_tokens = tokens, block_tokens

    def avoid(self, life: Callable[[str], int]) -> frozenset[str]:
        """Returns the workers that failed and have not registered again. `life` is a function that
        returns the number of a worker's present registration."""
        return frozenset([worker for worker, failed in self.failed if failed == life(worker)])

    def next_attempt(self) -> int:
        self._attempt += 1
        return self._attempt

    async def resume(self) -> None:
        """Replays the tokens that the client already has. Neither their text nor the end of a child
        that had ended is sent again. Other tasks run between blocks of tokens."""
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
        """Stores the prompt's log-probabilities, or its hidden state, if they are complete. They
        are sent with the next event, and later attempts do not request them."""
        if logprobs is None:
            return
        wanted = self.request.sampling.prompt_logprobs is not None
        whole = wanted and len(logprobs) + 1 == self.prompt_tokens
        if logprobs.hidden if self.request.pooling else whole:
            self._prompt_logprobs = logprobs
            self._ask_no_more_of_prompt()

    def _ask_no_more_of_prompt(self) -> None:
        sampling = replace(self.request.sampling, prompt_logprobs=None)
        self.request = replace(self.request, sampling=sampling, pooling="")

    def accept(
        self,
        index: int,
        first_index: int,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        weights: str = "",
    ) -> None:
        """Accepts the tokens that are new, up to the end of the child, and queues them as an event
        for the client. `first_index` is the index of `token_ids[0]` in the child's answer.
        `weights` is the identity of the weights that generated the tokens."""
        child = self.children[index]
        seen = len(child.accepted) - first_index
        if seen > 0:
            first_index += seen
            token_ids, logprobs = token_ids[seen:], logprobs[seen:]
        if child.finish is not None or not token_ids:
            return
        if seen < 0:
            raise DeliveryError(
                f"request {self.request.request_id!r}, child {index}: token {first_index} arrived,"
                f" but {len(child.accepted)} was next"
            )
        count, child.finish = self.request.end_among(first_index, token_ids, self.context_tokens)
        # The stop id itself is not delivered.
        kept = token_ids[: count - (child.finish is FinishReason.STOP)]
        ended_by = token_ids[len(kept)] if child.finish is FinishReason.STOP else None
        text = ""
        if kept:
            delta = child.text.push(kept)
            text = delta.text
            if delta.stopped:
                kept = kept[: delta.tokens_kept]
                child.finish = FinishReason.STOP
        if child.finish is not None:
            text += child.text.finish()
            if child.text.stop_string:
                child.finish = FinishReason.STOP
        child.accepted += kept
        if weights or self._weights:
            self._weights[weights] = self._weights.get(weights, 0) + len(kept)
        if not kept and not text and child.finish is None:
            return
        now = self._clock.now()
        if self.first_token_at is None:
            self.first_token_at = now
        if kept:
            child.count(now)
        usage = timings = None
        if child.finish is not None:
            self._unfinished -= 1
            if not self._unfinished:
                usage, timings = self._usage(), self.timings(now)
        event = StreamEvent(
            index, first_index, kept, text, logprobs[: len(kept)], child.finish, usage, timings
        )
        if child.text.stop_string:
            event = replace(event, stop_string=child.text.stop_string)
        elif ended_by in self.request.sampling.stop_token_ids:
            event = replace(event, stop_token=ended_by)
        if self._prompt_logprobs is not None:
            event = replace(event, prompt_logprobs=self._prompt_logprobs)
            self._prompt_logprobs = None
        self._events.put_nowait(event)

    def _usage(self) -> Usage:
        cached = self._cached or CachedTokens()
        return Usage(
            self.prompt_tokens,
            self.output_tokens,
            cached.total,
            cached_by_tier=cached,
            weights=self._weights_used(),
            created_tokens=self._created_tokens(cached.total),
        )

    def _created_tokens(self, cached_tokens: int) -> int:
        hints, block = self.request.hints, self._block_tokens
        if hints is None or hints.retention is None or not block:
            return 0
        retained = min(hints.retained_tokens or self.prompt_tokens, self.prompt_tokens)
        return max(0, retained // block * block - cached_tokens)

    def _weights_used(self) -> tuple[tuple[str, int], ...]:
        first = self.output_tokens - sum(self._weights.values())
        used: dict[str, int] = {"": first} if first and self._weights else {}
        for identity, count in self._weights.items():
            version = version_of(identity)
            used[version] = used.get(version, 0) + count
        return tuple([(version, count) for version, count in used.items() if count])

    # ---- events

    @property
    def has_more(self) -> bool:
        return self._unfinished > 0 or bool(self._events)

    async def next_event(self) -> StreamEvent:
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event

    def fail(self, error: Exception) -> None:
        self._events.put_nowait(error)

    def timings(self, now: float) -> Timings:
        decoded = [child for child in self.children if child.first_at is not None]
        followers = sum([len(child.accepted) - child.resumed_tokens - 1 for child in decoded])
        decoding = sum([child.latest_at - (child.first_at or 0.0) for child in decoded])
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
        self._closing.add(call)
        call.add_done_callback(self._closing.discard)

    async def close(self, seconds: float) -> None:
        """Cancels the attempts that are not over. Waits for at most `seconds` until they have freed
        their resources at the workers."""
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
        """Called by one timer per request, because a timer per token would cost too much."""
        self.fail((self.missing() if self.placing else None) or self.too_late())

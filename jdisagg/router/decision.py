"""Input and output of placement, as plain data. The router, decision logs and the simulator use
it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jdisagg.costs.hardware import LINKS, Link
from jdisagg.plain import plain
from jdisagg.request import Request
from jdisagg.router.accounts import Work
from jdisagg.router.predictor import NO_CORRECTIONS, Corrections, PromptWay
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS

# Function that returns how many of a prompt's tokens each worker has cached now. Workers without
# cached tokens are left out.
Known = Callable[[], Mapping[str, int]]


@plain
class PromptBlocks:
    """Hashes of a prompt's full blocks, and the number of tokens of a block. Each hash covers the
    block and all tokens before it."""

    names: Sequence[int] = ()
    block_tokens: int = 0


class Affinity(Protocol):
    """An index of cached blocks. It reports how many tokens of a prompt each worker has cached."""

    def known(self, request: Request) -> Known:
        """Hashes the prompt of a request once. Returns a function that looks up the number of
        cached tokens of each worker at the time of the call."""
        ...

    def prompt_blocks(self, request: Request) -> PromptBlocks:
        """Returns the blocks of a prompt. The result has no blocks if no worker has a prefix
        cache."""
        ...


@plain
class PlacementQuery:
    """One attempt for which workers must be chosen.

    Attributes:
        under_way: Whether the request was admitted before, because it is retried, was preempted or
            is resumed. Such a request is neither refused nor deferred.
        resuming: Whether the request has tokens already, so that draining workers may serve it.
        ahead_seconds: Seconds that the request is expected to wait further at this router.
        limit_seconds: Time limit of the first token, in seconds after the request's arrival.
        typical_tokens: Mean length of answers in tokens, from which the time until running
            sequences end is predicted.
        whole: Whether log-probabilities of the prompt are requested. If so, a decode worker does
            not compute the prompt: the XLA programs for prompt log-probabilities compile at first
            use, and running streams would wait for the compilation.
        broken: Pairs (prefill worker, decode worker) whose KV transfers failed recently. Such a
            pair is chosen only if there is no other way to serve the request.
        coming: Number of prompt tokens that each worker is computing for earlier prompts. These
            tokens will be cached when the worker reaches this prompt.
        loads: Seconds that each worker needs to load the request's adapter. Workers that have the
            adapter are left out.
        yielding: For each worker, its load of lower priority, which it would preempt for this
            attempt: numbers of sequences, pages, waiting requests and queued prompt tokens.
        block_tokens: Number of tokens of a cached block. 1 without a prefix cache.
        session_workers: Workers of the last turn of the request's session.
        unfit: Workers that cannot serve the request. One of them is chosen only if there are no
            others, not even workers to `avoid`, because these may have recovered.
        prefill_only: Whether a prefill worker answers alone, so that the request neither waits for
            a decode worker nor uses one.
    """

    work: Work
    cached: Mapping[str, int] = field(default_factory=dict)
    avoid: frozenset[str] = frozenset()
    under_way: bool = False
    resuming: bool = False
    age_seconds: float = 0.0
    ahead_seconds: float = 0.0
    limit_seconds: float = math.inf
    typical_tokens: float = 256.0
    whole: bool = False
    corrections: Corrections = NO_CORRECTIONS
    broken: frozenset[tuple[str, str]] = frozenset()
    coming: Mapping[str, int] = field(default_factory=dict)
    loads: Mapping[str, float] = field(default_factory=dict)
    yielding: Mapping[str, tuple[int, int, int, int]] = field(default_factory=dict)
    block_tokens: int = 1
    session_workers: frozenset[str] = frozenset()
    unfit: frozenset[str] = frozenset()
    prefill_only: bool = False

    @property
    def most_known(self) -> int:
        """Number of tokens that a worker need not compute if it has cached the whole prompt. The
        block of the last token must be computed."""
        return (self.work.tokens - 1) // self.block_tokens * self.block_tokens


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """Settings of placement.

    Attributes:
        tpot_slo_seconds: Longest predicted decode step of a chosen worker, in seconds (inf: no
            limit).
        hold_seconds: Seconds of queued work from which on a worker gets no more requests. For
            workers with several dp ranks the limit is at least three full chunks. Further requests
            wait at the router, which can still reorder them.
        local_gain: Required gain of prefill on a decode worker, if this worker has running streams
            or has cached less than half of the prompt. It is chosen only if it shortens the time to
            first token and hand-off by at least this fraction, compared with a pair of workers.
        far: Network link between workers in different racks.
        decode_first: Whether decode pages are reserved before the prefill starts. If so, waiting
            for pages delays the first token. If not, it delays the second.
        gone_seconds: Seconds without a heartbeat after which a worker gets no requests at all.
        session_gain: Largest part of the time to first token and hand-off that workers of the
            session's last turn may take longer than others and still be chosen.
        far_prefill_tokens: Prompts with fewer uncached tokens are prefilled in the decode worker's
            rack if possible.
    """

    tpot_slo_seconds: float = math.inf
    hold_seconds: float = 0.5
    local_gain: float = 0.1
    far: Link = LINKS["ethernet-25g"]
    decode_first: bool = True
    suspect_seconds: float = DEFAULT_TIMEOUTS.membership.suspect_seconds
    gone_seconds: float = DEFAULT_TIMEOUTS.membership.gone_seconds
    peer_fetch: bool = False
    fetch_from_decode: bool = False
    far_prefill_tokens: int = 0
    session_gain: float = 0.1


@plain
class CostTerms:
    """Predicted seconds of each stage: the prefill queue, the prefill, the part of the KV transfer
    that remains after the prefill, the wait for room at the decode worker, and one decode step that
    includes the sequence."""

    prefill_queue: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    decode_queue: float = 0.0
    step: float = 0.0

    @property
    def uncorrected_ttft(self) -> float:
        """Seconds to the first token before `Corrections` are applied, if decode pages are reserved
        first."""
        return max(self.prefill_queue, self.decode_queue) + self.prefill


@plain
class Decision:
    """The workers that placement chose for an attempt.

    Attributes:
        prefill: Prefill worker, or None if the decode worker computes the prompt.
        decode: Decode worker, or "" if the prefill worker answers alone.
        context_tokens: Largest context of the decode worker, in tokens.
        kind: Kind of the choice, from a small fixed set of labels for metrics.
        terms: Predicted seconds of each stage.
        peer: Worker from which the prefilling worker may fetch further cached KV, or "".
    """

    prefill: str | None
    decode: str
    context_tokens: int
    reason: str
    kind: str = "seconds"
    terms: CostTerms = CostTerms()
    ttft_seconds: float = 0.0
    handoff_gap_seconds: float = 0.0
    tpot_seconds: float = 0.0
    cached_tokens: int = 0
    peer: str = ""
    peer_tokens: int = 0

    @property
    def workers(self) -> frozenset[str]:
        return frozenset(filter(None, (self.prefill, self.decode)))

    @property
    def way(self) -> PromptWay:
        if self.prefill is None:
            return PromptWay.APPEND
        return PromptWay.FETCH if self.peer else PromptWay.PREFILL


@plain
class Deferred:
    """No worker can start the request now, so it waits at the router. `for_room`: whether it waits
    for a decode worker, so that a prefill-only request may start before it."""

    reason: str
    for_room: bool = False


@plain
class Refusal:
    """The request is refused, because its first token would miss its time limit. `kind` is the
    cause, from a small fixed set of labels."""

    reason: str
    retry_after_seconds: float
    kind: str = "ttft"


PlacementOutcome = Decision | Deferred | Refusal


class RouterEvents(Protocol):
    def answered(self, query: PlacementQuery, now: float, answer: PlacementOutcome) -> None:
        """Called when placement has placed or refused a request. A deferred request is reported
        only when it is finally placed or refused."""
        ...

    def measured(self, what: str, predicted: float, actual: float) -> None:
        """Called with the predicted and the measured seconds of `what`: "ttft" or "tpot"."""
        ...

    def handed_over(self, prefill: str | None, decode: str) -> None:
        """Called when an attempt decodes its first token from the KV that `prefill` computed.
        `prefill` is None if `decode` computed the KV itself."""
        ...


class NoRouterEvents:
    """Listener that ignores all events."""

    def answered(self, query: PlacementQuery, now: float, answer: PlacementOutcome) -> None: ...

    def measured(self, what: str, predicted: float, actual: float) -> None: ...

    def handed_over(self, prefill: str | None, decode: str) -> None: ...


class RouterEventsList:
    def __init__(self, *listeners: RouterEvents) -> None:
        self._listeners = listeners

    def answered(self, query: PlacementQuery, now: float, answer: PlacementOutcome) -> None:
        for listener in self._listeners:
            listener.answered(query, now, answer)

    def measured(self, what: str, predicted: float, actual: float) -> None:
        for listener in self._listeners:
            listener.measured(what, predicted, actual)

    def handed_over(self, prefill: str | None, decode: str) -> None:
        for listener in self._listeners:
            listener.handed_over(prefill, decode)


NO_ROUTER_EVENTS = NoRouterEvents()

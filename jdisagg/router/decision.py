"""Input and output of placement, as plain data for the live router, decision logs and simulator."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from jdisagg.costs.hardware import LINKS, Link
from jdisagg.plain import plain
from jdisagg.request import Request
from jdisagg.router.accounts import Work
from jdisagg.timeouts import DEFAULT_TIMEOUTS

# Returns how many of a prompt's tokens each worker has cached now; workers with 0 are absent.
Known = Callable[[], Mapping[str, int]]


class Affinity(Protocol):
    """Index that reports how much of a prompt each worker has cached."""

    def known(self, request: Request) -> Known:
        """Hashes the prompt once. Returns a function that reads the index anew at each call."""
        ...


@plain
class PlacementQuery:
    """One attempt to place.

    Attributes:
        cached: Number of the prompt's tokens that each worker has cached.
        avoid: Workers that failed this attempt.
        under_way: Whether the request was admitted before (retried, preempted, resumed). It is then
            neither refused nor deferred.
        resuming: Whether the request has tokens already, so that draining workers may serve it.
        age_seconds: Time since the request arrived.
        ahead_seconds: Expected further wait at this router.
        limit_seconds: Time after arrival by which the first token must come.
        typical_tokens: Mean length of answers, which determines how soon a sequence makes room.
        whole: Whether log-probabilities of the prompt are requested. Their programs compile at
            first use, and running streams of the same mesh would wait for the compilation.
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


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """Settings of placement.

    Attributes:
        tpot_slo_seconds: Longest predicted decode step of a placement (inf: no limit).
        hold_seconds: Seconds of queued work beyond which a worker gets no more. Further requests
            wait at the router, which can still reorder them.
        local_gain: Share by which prefill on the decode worker must shorten first token and
            hand-off to be chosen.
        far: Link between workers that share no rack.
        decode_first: Whether decode pages are reserved before the prefill starts. Waiting for them
            then delays the first token and not the second.
        suspect_seconds: Silence after which a worker gets no new requests.
        gone_seconds: Silence after which a worker gets no requests at all.
        peer_fetch: Whether prefill workers fetch cached KV from other prefill workers.
        fetch_from_decode: Whether they also fetch it from decode workers.
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


@plain
class CostTerms:
    """Predicted seconds of each stage: prefill queue, prefill, the part of the transfer after the
    prefill, the wait for room at the decode worker, and one decode step with the sequence in it."""

    prefill_queue: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    decode_queue: float = 0.0
    step: float = 0.0


@plain
class Decision:
    """The chosen workers.

    Attributes:
        prefill: Prefill worker, or None if the decode worker computes the prompt.
        context_tokens: Context limit of the decode worker.
        kind: Reason of the choice from a small fixed set, for metrics.
        terms: Predicted seconds of each stage, or None if the choice was by load.
        cached_tokens: Tokens that the prefilling worker has cached.
        peer: Worker from which the prefilling worker may fetch more, or "".
        peer_tokens: Tokens that `peer` has cached.
    """

    prefill: str | None
    decode: str
    context_tokens: int
    reason: str
    kind: str = "load"
    terms: CostTerms | None = None
    ttft_seconds: float | None = None
    handoff_gap_seconds: float | None = None
    tpot_seconds: float | None = None
    cached_tokens: int = 0
    peer: str = ""
    peer_tokens: int = 0


@plain
class Deferred:
    """No worker can start the request now, so it waits at the router."""

    reason: str


@plain
class Refusal:
    """The request is refused, because its first token would miss the limit. `kind`: Cause from a
    small fixed set."""

    reason: str
    retry_after_seconds: float
    kind: str = "ttft"


PlacementOutcome = Decision | Deferred | Refusal

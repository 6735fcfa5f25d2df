"""Input and output of placement: plain data, the same in the live router, in a decision log and in
the simulator."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from jdisagg.costs.hardware import LINKS, Link
from jdisagg.plain import plain
from jdisagg.request import Request
from jdisagg.router.accounts import Work
from jdisagg.timeouts import DEFAULT_TIMEOUTS

# Positions of a prompt that each worker has cached now; workers without any are absent.
Known = Callable[[], Mapping[str, int]]


class Affinity(Protocol):
    """Reports which workers have how much of a prompt cached."""

    def known(self, request: Request) -> Known:
        """Hashes the prompt once. The result reads the index again at each call."""
        ...


@plain
class PlacementQuery:
    """One attempt to place.

    Attributes:
        cached: Positions of the prompt that each worker has cached.
        avoid: Workers that failed this attempt.
        under_way: The request was admitted before (retried, preempted, resumed). It is then neither
            refused nor deferred.
        resuming: It has tokens already, so draining workers may serve it.
        age_seconds: Time since the request arrived.
        ahead_seconds: Expected further wait in this router.
        limit_seconds: Time after arrival by which the first token must come.
        typical_tokens: Mean length of answers, which determines how soon a sequence makes room.
        whole: Log-probabilities of the prompt are requested. Their programs compile at first use,
            and streams of the same mesh would wait for that.
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
        tpot_slo_seconds: Longest predicted decode step with which a sequence is placed (inf: none).
        hold_seconds: Queued work beyond which a worker gets no more. The rest waits at the router,
            where its order can still change.
        local_gain: Share of first token and hand-off by which prefill on the decode worker must be
            cheaper to be chosen.
        far: Link between workers that share no rack.
        decode_first: Decode pages are reserved before the prefill starts, so that waiting for them
            delays the first token and not the second.
        suspect_seconds: Silence after which a worker gets no new requests.
        gone_seconds: Silence after which a worker gets nothing.
        peer_fetch: Prefill workers fetch cached KV from other prefill workers.
        fetch_from_decode: They fetch it from decode workers, too.
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
        kind: Reason from a small fixed set, for metrics.
        terms: Predicted seconds, or None if the choice was by load.
        cached_tokens: Tokens that the prefilling worker has cached.
        peer: Worker from which it may fetch more, or "".
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
    """No worker can start it now. It waits at the router."""

    reason: str


@plain
class Refusal:
    """Its first token would miss the limit. `kind` is a cause from a small fixed set."""

    reason: str
    retry_after_seconds: float
    kind: str = "ttft"


PlacementOutcome = Decision | Deferred | Refusal

"""What placement is asked and what it answers: plain data, the same in the live router, in a
recording and in the simulator."""

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
    """What an attempt asks of placement. `cached`: positions of it that workers know already.
    `avoid`: workers that failed it. `under_way`: it was let in before (retried, preempted,
    resumed): then it is neither refused nor held. `resuming`: it has tokens already, so draining
    workers will do. `whole`: log-probabilities of all its tokens are wanted; the programs for that
    are compiled when they first are, which streams beside it would wait for.

    age_seconds: since the request arrived; ahead_seconds: what it would still wait in this router;
    limit_seconds: its first token must come within so long of its arrival. typical_tokens: what
    sequences generate on average, which says how soon one makes room."""

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
    """What an operator decides. tpot_slo_seconds: no sequence is placed where predicted steps would
    take longer (inf: no such bound). hold_seconds: a worker with more than this of queued work gets
    none on top, for what waits here can still be put in order. local_gain: by what part of first
    token and hand-off together prefilling on the decode worker must be cheaper to be chosen. far:
    the link between workers that share not even a rack. decode_first: pages for decoding are
    reserved before the prefill begins, so that waiting for them delays the first token and not the
    second. suspect_seconds, gone_seconds: silence after which a worker gets nothing new, or
    nothing. peer_fetch: prefill workers fetch what others know of a prompt; fetch_from_decode: what
    decode workers know, too. far_prefill_tokens: a prompt of which a prefill worker lacks fewer is
    not prefilled by it for a decode worker that shares no rack with it, while there is another."""

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
    """Predicted seconds: in the prefill queue, computing the prompt, moving its KV beyond that,
    waiting for room at the decode worker (before the prefill begins), and one decode step with the
    sequence in it."""

    prefill_queue: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    decode_queue: float = 0.0
    step: float = 0.0


@plain
class Decision:
    """`prefill` None: the decode worker prefills by itself. `context_tokens` is the decode worker's
    limit. `kind`: a reason of a small fixed set, for counting; `terms` None: chosen by load,
    nothing was predicted. `cached_tokens`: what the prefilling worker knows; `peer_tokens`: what
    worker `peer` knows, from which it may fetch the rest of that; "": from nobody."""

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
    """Nobody can begin with it now; it waits at the router."""

    reason: str


@plain
class Refusal:
    """It would miss its limit. `kind`: a cause of a small fixed set."""

    reason: str
    retry_after_seconds: float
    kind: str = "ttft"


PlacementOutcome = Decision | Deferred | Refusal

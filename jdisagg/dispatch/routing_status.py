"""Status of a router: its last decisions with reasons and outcomes, and the work that it has sent
to each worker."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PastDecision:
    """A decision that was made `age_seconds` ago.

    Attributes:
        prefill: Prefill worker, or "" if the decode worker computes the prompt.
        decode: Decode worker, or "" if the request was refused or the prefill worker answers alone.
        request_id: Id of the request. Not sent over gRPC.
    """

    age_seconds: float
    kind: str
    reason: str
    prefill: str
    decode: str
    prompt_tokens: int
    predicted_ttft_seconds: float | None = None
    predicted_step_seconds: float | None = None
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class WorkerAccount:
    """Work that this router has sent to a worker.

    Attributes:
        unseen_tokens: Number of prompt tokens that this router sent after the worker's last status,
            which does not include them yet.
        unseen_pages: Number of KV pages needed by attempts that the worker's last status does not
            include yet.
        committed_pages: Number of KV pages that all attempts at the worker are expected to need by
            their end.
        barred_seconds: Seconds for which the worker still gets no requests, because it failed.
        prices: Source of the predicted times of the worker: "given" (--hardware), "measured" (by
            the worker), "assumed" (neither is known) or "learned" (measured, and corrected by
            outcomes).
    """

    worker: str
    attempts: int
    unseen_tokens: int
    unseen_pages: int
    committed_pages: int
    barred_seconds: float
    prices: str = "assumed"


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that waits for workers.

    Attributes:
        position: Place in the order in which the requests will be placed, from 1.
        waited_seconds: Seconds since its arrival, or since its last attempt ended.
    """

    request_id: str
    position: int
    waited_seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class RoutingStatus:
    """Status of a router."""

    waiting: int = 0
    decisions: tuple[PastDecision, ...] = ()
    accounts: tuple[WorkerAccount, ...] = ()
    waiting_requests: tuple[WaitingRequest, ...] = ()

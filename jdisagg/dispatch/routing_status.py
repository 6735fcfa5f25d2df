"""Status of a router: its last decisions with reasons and outcomes, and its worker accounts.

Plain data for `GetStatus`, which clients read too. `dispatch.placer` makes it. What workers report
about themselves is in their own statuses."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PastDecision:
    """One decision, `age_seconds` ago.

    Attributes:
        prefill: "" if the decode worker computes the prompt.
        decode: "" if the request was refused.
        predicted_ttft_seconds: From the request's arrival, or None without a prediction.
        predicted_step_seconds: Of one decode step, or None without a prediction.
        ttft_seconds: Measured value, or None until known.
        tpot_seconds: Measured value, or None until known.
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


@dataclass(frozen=True, slots=True)
class WorkerAccount:
    """Work that this router has sent to a worker.

    Attributes:
        attempts: Attempts at the worker now.
        unseen_tokens: Their prompt tokens that its status cannot include yet.
        unseen_pages: Their pages that its status cannot include yet.
        committed_pages: Pages that all of them are expected to need.
        barred_seconds: Time for which the worker gets nothing, because it failed.
    """

    worker: str
    attempts: int
    unseen_tokens: int
    unseen_pages: int
    committed_pages: int
    barred_seconds: float


@dataclass(frozen=True, slots=True)
class RoutingStatus:
    """`waiting`: Requests that wait at the router for workers. `decisions`: Latest first."""

    waiting: int = 0
    decisions: tuple[PastDecision, ...] = ()
    accounts: tuple[WorkerAccount, ...] = ()

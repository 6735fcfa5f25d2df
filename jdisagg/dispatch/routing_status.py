"""Status of a router: its last decisions with reasons and outcomes, and its worker accounts.

Plain data for `GetStatus`, which clients read too. `dispatch.placer` builds it. The workers' own
reports are in `WorkerStatus`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PastDecision:
    """A decision that was made `age_seconds` ago.

    Attributes:
        prefill: Prefill worker, or "" if the decode worker computes the prompt.
        decode: Decode worker, or "" if the request was refused.
        predicted_ttft_seconds: Predicted time from the request's arrival to its first token, or
            None without a prediction.
        predicted_step_seconds: Predicted time of one decode step, or None without a prediction.
        ttft_seconds: Measured time to the first token, or None until it is known.
        tpot_seconds: Measured time per further token, or None until it is known.
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
        attempts: Attempts that run at the worker now.
        unseen_tokens: Prompt tokens of attempts sent after the worker's last status.
        unseen_pages: Pages of attempts sent after the worker's last status.
        committed_pages: Pages that all attempts are expected to need by their end.
        barred_seconds: Remaining time in which the worker gets no requests because it failed.
    """

    worker: str
    attempts: int
    unseen_tokens: int
    unseen_pages: int
    committed_pages: int
    barred_seconds: float


@dataclass(frozen=True, slots=True)
class RoutingStatus:
    """Status of a router. `waiting`: Requests that wait for workers. `decisions`: Recent decisions,
    latest first."""

    waiting: int = 0
    decisions: tuple[PastDecision, ...] = ()
    accounts: tuple[WorkerAccount, ...] = ()

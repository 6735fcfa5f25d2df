"""What a router says of itself: its last decisions with their reasons and what became of them, and
its own account of the workers.

Plain data for `GetStatus`, which clients read too: it knows nothing of the router that made it
(`dispatch.placer` does). The workers' own words are their statuses."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PastDecision:
    """`age_seconds` ago. `decode` "": it was refused; `prefill` "": the decode worker prefills by
    itself. Predicted seconds count from the request's arrival (step: of one decode step); they are
    None where nothing was predicted, and what was measured is None until it is."""

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
    """What this router has sent to a worker: attempts there now; prompt tokens and pages of them
    that its status cannot show yet; pages that all of them are expected to need; and for how long
    it gets nothing because it failed."""

    worker: str
    attempts: int
    unseen_tokens: int
    unseen_pages: int
    committed_pages: int
    barred_seconds: float


@dataclass(frozen=True, slots=True)
class RoutingStatus:
    """`waiting`: requests that wait at the router for workers. `decisions`: the latest first."""

    waiting: int = 0
    decisions: tuple[PastDecision, ...] = ()
    accounts: tuple[WorkerAccount, ...] = ()

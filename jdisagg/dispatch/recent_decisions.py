"""The last decisions of a router as they are kept, each to be completed by what comes of it; and
the status that is made of them."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from jdisagg.dispatch.routing_status import PastDecision, RoutingStatus, WorkerAccount
from jdisagg.router.accounts import Accounts
from jdisagg.router.decision import Decision, Refusal

KEPT = 256


@dataclass(slots=True, eq=False)
class RecentDecision:
    """One answer, to be completed by what comes of it."""

    at: float
    waited_seconds: float
    prompt_tokens: int
    answer: Decision | Refusal
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None

    @property
    def predicted_ttft_seconds(self) -> float | None:
        predicted = self.answer.ttft_seconds if isinstance(self.answer, Decision) else None
        return None if predicted is None else self.waited_seconds + predicted

    def past(self, now: float) -> PastDecision:
        answer, age = self.answer, now - self.at
        if isinstance(answer, Refusal):
            return PastDecision(
                age, f"refused: {answer.kind}", answer.reason, "", "", self.prompt_tokens
            )
        return PastDecision(
            age,
            answer.kind,
            answer.reason,
            answer.prefill or "",
            answer.decode,
            self.prompt_tokens,
            self.predicted_ttft_seconds,
            answer.tpot_seconds,
            self.ttft_seconds,
            self.tpot_seconds,
        )


def status_of(
    entries: "deque[RecentDecision]", accounts: Accounts, waiting: int, now: float
) -> RoutingStatus:
    return RoutingStatus(
        waiting,
        tuple(entry.past(now) for entry in reversed(entries)),
        tuple(_accounts(accounts, now)),
    )


def _accounts(accounts: Accounts, now: float) -> Iterable[WorkerAccount]:
    table = accounts.state.table
    for row, name in enumerate(accounts.state):
        barred = max(0.0, float(table["barred_until"][row]) - now)
        attempts, tokens, pages, committed = (
            int(table[column][row])
            for column in ("open", "own_tokens", "own_pages", "committed_pages")
        )
        yield WorkerAccount(name, attempts, tokens, pages, committed, barred)

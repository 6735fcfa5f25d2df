"""Accounts for work that this router has sent to workers but that the workers' statuses do not
include yet. The accounts are the `own_` columns of the snapshot (cluster_state.py).

An attempt's work is charged to its workers when it is placed. The charge ends with the first status
that the worker can have made after the call arrived (`settle_seconds`), because such a status
includes the work. When work ends, it is subtracted immediately, also from the worker's last status.

Invariant: when all placed attempts have ended, every `own_` column is zero."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from jdisagg.config import InstanceConfig
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.plain import plain
from jdisagg.router.absences import Absences
from jdisagg.router.cluster_state import COLUMNS, ClusterState
from jdisagg.scheduler.page_ledger import pages_for
from jdisagg.scheduler.prompts import causal_pairs
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS

# Growth that decode workers reserve beyond the prompt, unless they are told otherwise.
GROWTH_TOKENS = InstanceConfig().growth_tokens
_OPEN = ("open", 1)


@plain
class Work:
    """Size of an attempt.

    Attributes:
        tokens: Number of tokens that need KV: the prompt and the tokens accepted so far.
        cached_tokens: Number of these `tokens` that the prefilling worker has cached.
        children: Number of sequences that share the KV of these `tokens`.
    """

    tokens: int
    cached_tokens: int = 0
    children: int = 1
    expected_tokens: int = 0

    @property
    def new_tokens(self) -> int:
        return self.tokens - self.cached_tokens

    def pages(self, page_size: int, growth_tokens: int | None = None) -> int:
        """Returns the number of KV pages that all children hold together after each of them has
        generated `growth_tokens` tokens. None means `expected_tokens`."""
        grown = (
            self.expected_tokens
            if growth_tokens is None
            else min(growth_tokens, self.expected_tokens)
        )
        shared = pages_for(self.tokens, page_size)
        return shared + self.children * (pages_for(self.tokens + grown, page_size) - shared)


@dataclass(slots=True, eq=False)
class _Charge:
    worker: str
    life: int
    amounts: tuple[tuple[str, float], ...]
    sent_at: float | None
    shown: bool = False


class Accounts:
    """Maintains the `own_` columns of the snapshot `state`, which count work that no status
    includes yet. Statuses of workers must be passed to `heard` instead of `state.update`."""

    def __init__(
        self,
        state: ClusterState,
        settle_seconds: float = DEFAULT_TIMEOUTS.membership.settle_seconds,
    ) -> None:
        self.state = state
        self.absences = Absences()
        self._subscribers: list[Callable[[], None]] = []
        self._settle_seconds = settle_seconds
        self._fresh: dict[str, list[_Charge]] = {}

    def heard(self, status: WorkerStatus, now: float) -> None:
        self.state.update(status, now)
        self._show(status.name, now)
        for changed in self._subscribers:
            changed()

    def subscribe(self, changed: Callable[[], None]) -> None:
        self._subscribers.append(changed)

    def _show(self, worker: str, now: float) -> None:
        fresh = self._fresh.pop(worker, None)
        if not fresh:
            return
        told_by = now - self._settle_seconds
        still = []
        for charge in fresh:
            if charge.sent_at is None or charge.sent_at > told_by:
                still.append(charge)
            else:
                charge.shown = True
                self.discount(charge)
        if still:
            self._fresh[worker] = still

    def forget(self, name: str) -> None:
        self._fresh.pop(name, None)
        self.state.forget(name)

    def place(self, prefill: str | None, decode: str, work: Work, now: float) -> "Charges":
        """`prefill` is None if the decode worker computes the prompt. `decode` is "" if nothing is
        decoded."""
        return Charges(self, prefill, decode, work, now)

    def count(
        self, worker: str, amounts: tuple[tuple[str, float], ...], sent_at: float | None = None
    ) -> _Charge:
        """Adds amounts to a worker's row until `discount`."""
        charge = _Charge(worker, self.state.life(worker), amounts, sent_at)
        self._add(charge, 1)
        return charge

    def discount(self, charge: _Charge) -> None:
        self._add(charge, -1)

    def charge(
        self, worker: str, amounts: tuple[tuple[str, float], ...], sent_at: float | None
    ) -> _Charge:
        """Adds amounts to a worker's row until a status includes them, or until `settle`."""
        charge = self.count(worker, amounts, sent_at)
        if worker in self.state:
            self._fresh.setdefault(worker, []).append(charge)
        return charge

    def settle(self, charge: _Charge, said: tuple[tuple[str, float], ...]) -> None:
        """Ends a charge, because its work has ended. If the worker's last status already included
        the work, adds the (negative) amounts `said` to the status columns instead."""
        fresh = self._fresh.get(charge.worker, [])
        if charge in fresh:
            fresh.remove(charge)
            self.discount(charge)
        elif charge.shown and (row := self.state.row_in(charge.worker, charge.life)) is not None:
            cells = self.state.table.cells
            for column, amount in said:
                at = COLUMNS[column], row
                cells[at] = max(0.0, cells[at] + amount)

    def _add(self, charge: _Charge, sign: int) -> None:
        """Does nothing if the worker's registration at the time of the charge has ended."""
        row = self.state.row_in(charge.worker, charge.life)
        if row is not None:
            cells = self.state.table.cells
            for column, amount in charge.amounts:
                cells[COLUMNS[column], row] += sign * amount


class Charges:
    """The charges of one attempt, until it ends. All methods are idempotent."""

    def __init__(
        self, accounts: Accounts, prefill: str | None, decode: str, work: Work, now: float
    ) -> None:
        self._accounts, self._decode, self._work = accounts, decode, work
        row = accounts.state.row(decode)
        page_size = int(accounts.state.table["page_size"][row]) if row is not None else 0
        pages = work.pages(page_size, GROWTH_TOKENS) if page_size else 0
        held = (
            ("own_pages", pages),
            ("own_sequences", work.children),
            ("own_contexts", work.children * work.tokens),
        )
        self._held = accounts.charge(decode, held, now)
        committed = "committed_pages", float(work.pages(page_size)) if page_size else 0.0
        self._decoding = accounts.count(decode, (committed, _OPEN))
        self._compute_at(prefill or decode, work)
        self._open = True

    def _compute_at(self, worker: str, work: Work) -> None:
        pairs = causal_pairs(work.cached_tokens, work.tokens)
        queued = (("own_tokens", work.new_tokens), ("own_pairs", pairs))
        self._queued: _Charge | None = self._accounts.charge(worker, queued, None)
        self._computing = self._accounts.count(worker, () if worker == self._decode else (_OPEN,))

    def prefill_at(self, worker: str) -> None:
        """Charges another worker for the prompt, because the first one failed or does not compute
        it."""
        if self._open:
            self.prefilled()
            self._accounts.discount(self._computing)
            self._compute_at(worker, replace(self._work, cached_tokens=0))

    def prefill_sent(self, now: float) -> None:
        if self._queued is not None and self._queued.sent_at is None:
            self._queued.sent_at = now

    def prefilled(self) -> None:
        if self._queued is not None:
            (_, tokens), (_, pairs) = self._queued.amounts
            self._accounts.settle(
                self._queued, (("queued_tokens", -tokens), ("queued_pairs", -pairs))
            )
            self._queued = None

    def end(self) -> None:
        if not self._open:
            return
        self._open = False
        self.prefilled()
        (_, held), (_, sequences), (_, contexts) = self._held.amounts
        # Assume until the next status that the freed rank has the most room.
        left = (
            ("running", -sequences),
            ("best_sequences", -sequences),
            ("best_contexts", -contexts),
        )
        self._accounts.settle(self._held, (*left, ("best_free_pages", held), ("free_pages", held)))
        self._accounts.discount(self._decoding)
        self._accounts.discount(self._computing)

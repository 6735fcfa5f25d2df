"""Selects the workers that may serve an attempt, with a penalty in seconds for each. Has no side
effects.

Workers that are gone are never candidates. Draining workers and workers whose heartbeats are late
are candidates, with a penalty, only if the request has tokens already. Workers with an open circuit
breaker have a larger penalty. Workers that failed this request have a still larger one, and workers
that cannot serve it the largest."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from jdisagg.costs.speeds import Array
from jdisagg.errors import NoWorkerError
from jdisagg.plain import plain
from jdisagg.router.cluster_state import ClusterState, Flags, Side, Table
from jdisagg.router.decision import PlacementPolicy, PlacementQuery
from jdisagg.router.link_costs import Indices
from jdisagg.settings.timeouts import DEFAULT_TIMEOUTS, Backoff

# Penalties (s), each larger than any prediction.
DRAINING, BARRED, FAILED, UNFIT = 1e6, 1e7, 1e8, 1e9
# Penalty of a pair (s): larger than any prediction, smaller than the penalties of workers.
BROKEN = 5e5


@plain
class Candidates:
    """Workers of one `side` (prefill or decode) that may be chosen.

    Attributes:
        against: Penalty of each worker in seconds.
    """

    side: Side
    rows: Indices
    table: Table
    against: Array

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, which: Flags | Indices) -> "Candidates":
        places = np.arange(len(self))[which]
        return Candidates(
            self.side, self.rows[places], self.table.take(places), self.against[places]
        )

    @property
    def penalties(self) -> Array | None:
        """For each worker, its penalty. None if all are 0."""
        return None if self.against is self.side.zeros else self.against

    @property
    def trusted(self) -> Flags | None:
        return None if self.against is self.side.zeros else self.against < BARRED

    @property
    def load(self) -> Array:
        """Load of each worker: requests per decode slot, plus the fraction of KV pages in use."""
        table = self.table
        requests = np.maximum(table["running"] + table["waiting"], table["open"])
        pages = 1.0 - table["free_pages"] / np.maximum(1.0, table["total_pages"])
        return requests / np.maximum(1.0, table["slots"]) + pages


def candidates(
    state: ClusterState, query: PlacementQuery, now: float, policy: PlacementPolicy
) -> tuple[Candidates, Candidates]:
    """Returns the prefill and decode workers that may be chosen. Raises NoWorkerError if a needed
    role has none."""
    prefills = usable(state, state.prefill, query, now, policy)
    decodes = usable(state, state.decode, query, now, policy)
    prefills, decodes = with_partners(prefills, decodes)
    if not len(decodes):
        raise no_worker(state, state.decode, "decode")
    if not len(prefills) and not decodes.table.flag("can_prefill").any():
        raise no_worker(state, state.prefill, "prefill")
    return prefills, decodes


def usable(
    state: ClusterState, side: Side, query: PlacementQuery, now: float, policy: PlacementPolicy
) -> Candidates:
    rows, table = side.rows, side.table or state.table.take(side.span)
    particular = query.avoid or query.unfit or query.loads
    all_well = not (side.draining or particular) and now >= state.barred_until
    if all_well and not state.silent_for(now, min(policy.suspect_seconds, policy.gone_seconds)):
        return Candidates(side, rows, table, side.zeros)
    silent = now - table["heard_at"]
    leaving = table.flag("draining") | (silent > policy.suspect_seconds)
    out = (silent > policy.gone_seconds) | table.flag("asleep")
    if not query.resuming:
        out |= leaving
    if np.count_nonzero(out):
        left = np.flatnonzero(~out)
        rows, table, leaving = rows[left], table.take(left), leaving[left]
    against = np.zeros(len(rows))
    for which, seconds in ((leaving, DRAINING), (table["barred_until"] > now, BARRED)):
        if np.count_nonzero(which):
            against += np.where(which, seconds, 0.0)
    avoided, unfit = dict.fromkeys(query.avoid, FAILED), dict.fromkeys(query.unfit, UNFIT)
    for penalties in (avoided, unfit, query.loads):
        for name, seconds in penalties.items():
            against[rows == state.row_of(name)] += seconds
    return Candidates(side, rows, table, against)


def with_partners(prefills: Candidates, decodes: Candidates) -> tuple[Candidates, Candidates]:
    """Leaves out workers that can serve no request because of their weights: prefill workers if no
    decode worker has the same weights, and decode workers that can neither pair with a prefill
    worker nor compute prompts."""
    ours, theirs = prefills.side.weights, decodes.side.weights
    if (ours is not None and ours == theirs) or not len(prefills):
        return prefills, decodes
    able = decodes.table.flag("can_prefill") | decodes.table.flag("mixed")
    left = decodes.where(able | partnered(decodes, prefills))
    return prefills.where(partnered(prefills, decodes)), left


def partnered(some: Candidates, others: Candidates) -> Flags:
    return np.isin(some.table["weights"], others.table["weights"])


def apart(state: ClusterState, prefills: Indices, decodes: Indices) -> Flags | None:
    """Returns a mask [prefill workers, decode workers] of the pairs that cannot hand over KV,
    because their weights differ. Returns None if there are no such pairs."""
    if state.prefill.weights is not None and state.prefill.weights == state.decode.weights:
        return None
    weights = state.table["weights"]
    return weights[prefills][:, None] != weights[decodes][None, :]


def broken_pairs(
    state: ClusterState, query: PlacementQuery, prefills: Indices, decodes: Indices
) -> Array:
    against = np.zeros((len(prefills), len(decodes)))
    for prefill, decode in query.broken:
        here, there = prefills == state.row_of(prefill), decodes == state.row_of(decode)
        against[np.ix_(here, there)] = BROKEN
    return against


def no_worker(state: ClusterState, side: Side, kind: str) -> NoWorkerError:
    rows = side.rows

    def said(row: int) -> str:
        return f"{state.name(row)} ({_why_not(state.table, row)})"

    known = ", ".join(said(int(row)) for row in rows[:8]) or "none"
    more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
    error = NoWorkerError(
        f"no {kind} worker takes requests; known: {known}{more}", retry_after_seconds=1.0
    )
    error.role = "prefill" if side is state.prefill else "decode"
    return error


def _why_not(table: Table, row: int) -> str:
    if table.flag("asleep")[row]:
        return "asleep"
    return "draining" if table.flag("draining")[row] else "silent, avoided or of other weights"


FAILURES = 3


@dataclass(slots=True)
class Breaker:
    """A circuit breaker: a worker that fails repeatedly gets no requests for a while, and then one
    attempt as a probe. If the probe succeeds, the worker gets requests again.

    A breaker is closed until `most_failures` failures in a row. It is then open for a time that
    doubles with each opening up to a bound (`timeouts.Backoff`). Afterwards it is half open: the
    next attempt is the probe. The worker gets no other attempt until the probe's outcome is known
    or the back-off time has passed again. A success removes the breaker. Does no I/O; times are
    arguments."""

    backoff: Backoff = DEFAULT_TIMEOUTS.request.breaker
    failures: int = 0
    barred_until: float = 0.0
    opened: int = 0  # number of times in a row that the breaker opened
    most_failures: int = FAILURES  # failures in a row that open the breaker

    def failed(self, now: float) -> None:
        """Counts a failure of the worker. Does nothing while the breaker is open, because these are
        failures of attempts that were already running when it opened."""
        if now < self.barred_until and self.failures >= self.most_failures:
            return
        self.failures += 1
        if self.failures >= self.most_failures:
            self.opened += 1
            self.barred_until = now + self.backoff.seconds(self.opened)

    def placed(self, now: float) -> None:
        """Records that an attempt was placed on the worker. In the half-open state the attempt is
        the probe, so no other attempt is placed on the worker until its outcome is known."""
        if self.opened and now >= self.barred_until:
            self.failures = self.most_failures - 1
            self.barred_until = now + self.backoff.seconds(self.opened)


Names = TypeVar("Names", bound=tuple[str, ...])


class Breakers(Generic[Names]):
    """Circuit breakers of workers, or of pairs (prefill worker, decode worker) for transfers of KV.
    Keys are the workers' names. A breaker ends when one of its workers leaves or registers again.

    Args:
        life: Function that returns the number of a worker's present registration, or 0 if the
            worker is unknown.
    """

    def __init__(
        self,
        life: Callable[[str], int],
        most_failures: int = FAILURES,
        backoff: Backoff = DEFAULT_TIMEOUTS.request.breaker,
    ) -> None:
        self._life, self._most_failures, self._backoff = life, most_failures, backoff
        self._breakers: dict[Names, tuple[list[int], Breaker]] = {}

    def failed(self, names: Names, now: float) -> float:
        """Counts a failure. Returns the time until which no attempt should be placed there."""
        lives = self._lives(names)
        if not all(lives):
            return 0.0
        self._forget()
        new = Breaker(self._backoff, most_failures=self._most_failures)
        _, breaker = self._breakers.setdefault(names, (lives, new))
        breaker.failed(now)
        return breaker.barred_until

    def succeeded(self, names: Names) -> bool:
        """Removes the breaker. Returns whether there was one."""
        return self._breakers.pop(names, None) is not None

    def placed(self, names: Names, now: float) -> float:
        """Records that an attempt was placed there. Returns the same time as `failed`."""
        lives, breaker = self._breakers.get(names, ([], None))
        if breaker is None or lives != self._lives(names):
            return 0.0
        breaker.placed(now)
        return breaker.barred_until

    def barred(self, now: float) -> frozenset[Names]:
        """Returns the workers or pairs that should get no attempt now."""
        if not self._breakers:
            return frozenset()
        self._forget()
        return frozenset(
            [names for names, (_, breaker) in self._breakers.items() if now < breaker.barred_until]
        )

    def _lives(self, names: Names) -> list[int]:
        return [self._life(name) for name in names]

    def _forget(self) -> None:
        self._breakers = {
            names: kept for names, kept in self._breakers.items() if kept[0] == self._lives(names)
        }

"""The router's snapshot of the cluster: one row of numbers per worker, updated in place when a
worker reports or work is placed.

There are three kinds of columns: the worker's last status, its description (place, role, speed),
and the work that this router has sent and that no status includes yet (`own_`, maintained by
`accounts.py`).

If a column's name has no prefix, its value is the sum over a worker's dp ranks. `best_` columns
describe the rank with the most free pages, which takes the next sequence. `most_` columns describe
the fullest rank."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from jdisagg.costs.hardware import Link
from jdisagg.costs.speeds import ASSUMED, Array, Kind, Speed, speed_of
from jdisagg.messages.worker_status import WorkerRole, WorkerStatus
from jdisagg.router.link_costs import Indices, LinkCosts, LinkSide
from jdisagg.router.prefix_index import Roster

PARTS = ("rack", "host", "domain", "process")

# Columns from the status, then from the description, then the `own_` columns.
SAID = (
    *(
        "heard_at",
        "decodes",
        "mixed",
        "can_prefill",
        "draining",
        "ranks",
        "slots",
        "page_size",
        "context_tokens",
        "chunk_tokens",
        "asleep",
        "weights",
    ),
    *(
        "running",
        "waiting",
        "queued_tokens",
        "queued_pairs",
        "best_free_pages",
        "free_pages",
        "total_pages",
    ),
    *("best_sequences", "best_contexts", "most_sequences", "most_contexts"),
)
OWN = (
    "own_tokens",
    "own_pairs",
    "own_pages",
    "own_sequences",
    "own_contexts",
    "committed_pages",
    "open",
)
COLUMNS = {
    name: at
    for at, name in enumerate(
        (*SAID, *OWN, "speed", "spoke", "barred_until", "paced_until", *PARTS)
    )
}
HEARD_AT = COLUMNS["heard_at"]
# Values that rarely change, and values that change with each status.
FORM = slice(COLUMNS["decodes"], COLUMNS["weights"] + 1)
# Seconds to read and load an adapter of about 100 MB, and a penalty that exceeds all other terms.
ADAPTER_SECONDS, NO_SLOTS_SECONDS = 0.5, 1e5
FARES = slice(COLUMNS["running"], COLUMNS["most_contexts"] + 1)

Flags = npt.NDArray[np.bool_]


class Table:
    """Columns of numbers by name, with one entry per worker. Flags are 0 or 1. `speed` is an index
    into a list of speeds. The parts of a worker's place (rack, host, domain, process) are stored as
    integer codes."""

    def __init__(self, cells: Array) -> None:
        self.cells = cells
        self._views: dict[str, Array] = {}

    def __len__(self) -> int:
        return self.cells.shape[1]

    def __getitem__(self, column: str) -> Array:
        view = self._views.get(column)
        if view is None:
            view = self._views[column] = self.cells[COLUMNS[column]]
        return view

    def flag(self, column: str) -> Flags:
        return self.cells[COLUMNS[column]] != 0

    def codes(self, column: str) -> npt.NDArray[np.int64]:
        return self.cells[COLUMNS[column]].astype(np.int64)

    def take(self, which: "Indices | slice") -> "Table":
        return Table(
            self.cells[:, which] if isinstance(which, slice) else self.cells.take(which, axis=1)
        )


@dataclass(frozen=True, slots=True)
class Description:
    """The part of a worker's card that placement needs. `place` has the form of `WorkerCard.place`.
    `kind` determines the worker's speed. If `kind` has no hardware, the times in the worker's
    status do."""

    place: str = ""
    kind: Kind = ASSUMED


_UNDESCRIBED = Description()


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The workers of one kind (prefill only, or decode and mixed).

    Attributes:
        room: Number of sequences that each worker may hold. It is a little larger than the worker's
            number of decode slots, so that the next sequence is ready when a slot is freed
            (scheduler/reservations.py).
        speed, chunk_tokens, page_size, weights: The value that all workers have in common, or None
            if they differ.
        table: View of the workers' columns, or None if the rows are not contiguous.
    """

    rows: Indices
    span: Indices | slice
    table: Table | None
    room: Array
    zeros: Array
    speed: Speed | None
    chunk_tokens: int | None
    page_size: float | None
    mixed: bool
    can_prefill: bool
    several_ranks: bool
    draining: bool
    weights: float | None


class ClusterState:
    """The snapshot of all workers. `update` adds a worker when its first status arrives. `describe`
    sets a worker's description, before or after that status."""

    def __init__(self) -> None:
        self.table = Table(np.zeros((len(COLUMNS), 16)))
        self.speeds: list[Speed] = []
        self._names: list[str] = []
        self._rows: dict[str, int] = {}
        self._statuses: dict[str, WorkerStatus] = {}
        self._forms: dict[str, object] = {}
        self._descriptions: dict[str, Description] = {}
        self._kinds: dict[Kind, int] = {}
        self._lives: dict[str, int] = {}
        self._roster_rows: tuple[Roster, Indices] | None = None  # valid while the rows are the same
        self._last_life = 0
        # Valid until a worker is added, is removed or changes its description.
        self._sides: tuple[Side, Side] | None = None
        self._heard_since = -math.inf  # every worker was heard after this time
        self._least_priority = 0  # no worker reported a lower one
        self.barred_until = 0.0  # no worker is barred for longer
        # Link costs by indices of the senders and receivers in `_sides`, valid as long as these.
        self._link_costs: dict[tuple[int, int, Link], LinkCosts] = {}
        self._measured: dict[str, dict[str, tuple[float, float]]] = {}  # links, see `LinkCosts`

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def row(self, name: str) -> int | None:
        return self._rows.get(name)

    def row_in(self, name: str, life: int) -> int | None:
        """Returns the worker's row number. Returns None if its registration `life` has ended,
        because the worker was removed or has registered again."""
        return self._rows.get(name) if self._lives.get(name, 0) == life else None

    def row_of(self, name: str) -> int:
        return self._rows.get(name, -1)

    def rows_of(self, roster: Roster) -> Indices:
        if self._roster_rows is None or self._roster_rows[0] is not roster:
            rows = np.fromiter(map(self.row_of, roster.names), np.intp, len(roster.names))
            self._roster_rows = roster, rows
        return self._roster_rows[1]

    def life(self, name: str) -> int:
        """Returns a number that identifies the worker's registration, or 0 if the worker is
        unknown. A worker that was removed and returns has a new number."""
        return self._lives.get(name, 0)

    def name(self, row: int) -> str:
        return self._names[row]

    @property
    def prefill(self) -> Side:
        return self._both()[0]

    @property
    def decode(self) -> Side:
        return self._both()[1]

    def link_costs(self, far: Link) -> LinkCosts:
        """Returns the link costs from prefill to decode workers."""
        return self._costs_between(0, 1, far)

    def peer_costs(self, far: Link) -> LinkCosts:
        """Returns the link costs between prefill workers."""
        return self._costs_between(0, 0, far)

    def return_costs(self, far: Link) -> LinkCosts:
        """Returns the link costs from decode to prefill workers."""
        return self._costs_between(1, 0, far)

    def _costs_between(self, senders: int, receivers: int, far: Link) -> LinkCosts:
        key = senders, receivers, far
        costs = self._link_costs.get(key)
        if costs is None:
            ends = [self._ends(side) for side in self._both()]
            costs = self._link_costs[key] = LinkCosts(
                ends[senders], ends[receivers], self.speeds, far, self._measured
            )
        return costs

    def statuses(self) -> tuple[WorkerStatus, ...]:
        return tuple(self._statuses[name] for name in self._names)

    def without_images(self) -> frozenset[str]:
        return frozenset([one.name for one in self._statuses.values() if not one.images])

    def adapter_loads(self, digest: str) -> dict[str, float]:
        """Returns the seconds that each worker without this adapter needs to load it. For a worker
        without adapter slots the value is so high that the worker is chosen only as the last
        resort."""
        return {
            name: ADAPTER_SECONDS if status.adapter_slots else NO_SLOTS_SECONDS
            for name, status in self._statuses.items()
            if digest not in status.adapters
        }

    def yielding(self, priority: int) -> dict[str, tuple[int, int, int, int]]:
        found: dict[str, tuple[int, int, int, int]] = {}
        for name, status in self._statuses.items() if priority > self._least_priority else ():
            lower = [load for load in status.priorities if load.priority < priority]
            if lower:
                found[name] = (
                    sum([load.sequences for load in lower]),
                    sum([load.pages for load in lower]),
                    sum([load.waiting for load in lower]),
                    sum([load.queued_tokens for load in lower]),
                )
        return found

    def weights(self, name: str) -> str:
        status = self._statuses.get(name)
        return "" if status is None else status.weights

    def description(self, name: str) -> Description:
        return self._descriptions.get(name, _UNDESCRIBED)

    def describe(self, name: str, description: Description) -> None:
        status = self._statuses.get(name)
        self._descriptions[name] = _completed(description, status) if status else description
        row = self._rows.get(name)
        if row is not None:
            self._place(row, self._descriptions[name])

    def update(self, status: WorkerStatus, now: float) -> None:
        row = self._rows.get(status.name)
        if row is None:
            row = self._add(status.name)
        ranks, cells = max(1, len(status.total_pages)), self.table.cells
        form = _form(status)
        if self._forms.get(status.name) != form:
            self._forms[status.name] = form
            self._change_form()
            decodes, mixed = status.role is not WorkerRole.PREFILL, status.role is WorkerRole.MIXED
            cells[FORM, row] = (
                *(decodes, mixed, status.can_prefill),
                *(not status.serving, ranks, status.slots),
                *(status.page_size, status.context_tokens, status.chunk_tokens),
                *(status.asleep, _code(status.weights)),
            )
            cells[COLUMNS["spoke"], row] = True
        self._statuses[status.name] = status
        if status.priorities:
            self._least_priority = min(self._least_priority, status.priorities[0].priority)
        self._update_prices(status, row)
        free, sequences, contexts = status.free_pages, status.rank_sequences, status.rank_contexts
        best = free.index(max(free)) if len(free) > 1 else 0
        # Workers of older versions report only the total number of sequences.
        if len(sequences) != ranks or len(contexts) != ranks:
            sequences, contexts = (status.running / ranks,) * ranks, (0.0,) * ranks
        cells[HEARD_AT, row] = now
        cells[FARES, row] = (
            *(status.running, status.waiting, status.queued_tokens, status.queued_pairs),
            *(free[best] if free else 0, sum(free), sum(status.total_pages)),
            *(sequences[best], contexts[best], max(sequences), max(contexts)),
        )
        if now < self._heard_since:
            self._heard_since = now

    def _update_prices(self, status: WorkerStatus, row: int) -> None:
        description = self.description(status.name)
        completed = _completed(description, status)
        if completed is not description:
            self._descriptions[status.name] = completed
            self._place(row, completed)
        links = status.links if completed.kind.hardware is None else ()
        measured = {
            link.sender: (link.latency_seconds, link.byte_seconds)
            for link in links
            if link.sender in self._rows
        }
        if measured != self._measured.get(status.name, {}):
            self._measured[status.name] = measured
            self._link_costs.clear()

    def forget(self, name: str) -> None:
        """Removes a worker. Idempotent. Later workers get new row numbers, so callers must store
        names and not row numbers."""
        row = self._rows.pop(name, None)
        self._statuses.pop(name, None)
        self._forms.pop(name, None)
        self._lives.pop(name, None)
        self._descriptions.pop(name, None)
        self._measured.pop(name, None)
        for links in self._measured.values():
            links.pop(name, None)
        if row is None:
            return
        count = len(self._names)
        cells = self.table.cells
        cells[:, row : count - 1] = cells[:, row + 1 : count].copy()
        cells[:, count - 1] = 0
        del self._names[row]
        self._rows = {other: index for index, other in enumerate(self._names)}
        self._roster_rows = None
        self._forget_speeds()
        self._change_form()

    def bar(self, name: str, until: float) -> None:
        """Makes placement avoid a worker until time `until`. The worker is still chosen if there is
        no other worker."""
        self._set(name, "barred_until", until)
        self.barred_until = max(self.barred_until, until)

    def pace(self, name: str, until: float) -> None:
        self._set(name, "paced_until", until)

    def excuse(self, name: str, heard_at: float) -> None:
        """Sets the time of a worker's last heartbeat. Called after a period in which this router
        could not receive heartbeats."""
        self._set(name, "heard_at", heard_at)
        self._heard_since = min(self._heard_since, heard_at)

    def _set(self, name: str, column: str, value: float) -> None:
        if (row := self._rows.get(name)) is not None:
            self.table[column][row] = value

    def silent_for(self, now: float, most: float) -> bool:
        if now - self._heard_since > most:
            heard = [self.table["heard_at"][side.span] for side in self._both()]
            self._heard_since = min(float(column.min(initial=now)) for column in heard)
        return now - self._heard_since > most

    def _add(self, name: str) -> int:
        row = len(self._names)
        if row == len(self.table):
            self.table = Table(
                np.concatenate([self.table.cells, np.zeros((len(COLUMNS), row))], axis=1)
            )
        self._names.append(name)
        self._rows[name] = row
        self._roster_rows = None
        self._last_life += 1
        self._lives[name] = self._last_life
        self._place(row, self.description(name))
        return row

    def _place(self, row: int, description: Description) -> None:
        self.table["speed"][row] = self._speed(description.kind)
        for part, code in zip(PARTS, _codes(description.place), strict=True):
            self.table[part][row] = code
        self._change_form()

    def _speed(self, kind: Kind) -> int:
        if kind not in self._kinds:
            self._kinds[kind] = len(self.speeds)
            self.speeds.append(speed_of(kind))
        return self._kinds[kind]

    def _forget_speeds(self) -> None:
        """Each start of a worker may measure other times, so that its speed is its own."""
        of_workers = self.table["speed"][: len(self._names)]
        used = np.unique(of_workers)
        places = {int(old): new for new, old in enumerate(used)}
        self.speeds = [self.speeds[old] for old in places]
        self._kinds = {kind: places[old] for kind, old in self._kinds.items() if old in places}
        of_workers[:] = np.searchsorted(used, of_workers)

    def _change_form(self) -> None:
        self._sides, self._heard_since = None, -math.inf
        self._link_costs.clear()

    def _both(self) -> tuple[Side, Side]:
        if self._sides is None:
            spoke, decodes = self.table.flag("spoke"), self.table.flag("decodes")
            self._sides = (
                self._side(np.flatnonzero(spoke & ~decodes)),
                self._side(np.flatnonzero(spoke & decodes)),
            )
        return self._sides

    def _ends(self, side: Side) -> LinkSide:
        table = self.table.take(side.span)
        places, names = np.array([table[part] for part in PARTS]), map(self.name, side.rows)
        return LinkSide(places, table.codes("speed"), tuple(names))

    def _side(self, rows: Indices) -> Side:
        together = len(rows) and rows[-1] - rows[0] == len(rows) - 1
        span = slice(int(rows[0]), int(rows[-1]) + 1) if together else rows
        table = self.table.take(span)
        speed, chunk, page = (
            _only(table[column]) for column in ("speed", "chunk_tokens", "page_size")
        )
        return Side(
            rows,
            span,
            table if isinstance(span, slice) else None,
            table["slots"]
            + table["ranks"]
            * np.maximum(1.0, table["slots"] // np.maximum(1.0, table["ranks"]) // 4),
            np.zeros(len(rows)),
            None if speed is None else self.speeds[int(speed)],
            None if chunk is None else int(chunk),
            page,
            bool(table.flag("mixed").any()),
            bool(table.flag("can_prefill").any()),
            bool((table["ranks"] != 1.0).any()),
            bool(table.flag("draining").any()),
            _only(table["weights"]),
        )


def _completed(description: Description, status: WorkerStatus) -> Description:
    kind = description.kind
    if kind.hardware is not None or kind.times == status.times:
        return description
    return replace(description, kind=replace(kind, times=status.times))


def _form(status: WorkerStatus) -> object:
    """Values derived from these fields are recomputed only if one of them changes."""
    return (
        status.role,
        status.page_size,
        status.chunk_tokens,
        status.can_prefill,
        status.slots,
        len(status.total_pages),
        status.context_tokens,
        status.draining,
        status.asleep,
        status.weights,
    )


def _code(weights: str) -> int:
    digest = hashlib.blake2b(weights.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little") + 1 if weights else 0


def _only(column: Array) -> float | None:
    return float(column[0]) if len(column) and (column == column[0]).all() else None


def _codes(place: str) -> list[int]:
    parts = place.split("/")[: len(PARTS)] if place else []
    beginnings = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    codes = [
        int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little") + 1
        for text in beginnings
    ]
    return codes + [0] * (len(PARTS) - len(codes))

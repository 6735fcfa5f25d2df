"""The router's index of the workers' prefix caches: how many leading blocks of a prompt each worker
has cached. Blocks are called pages here, and a chain is the list of the prompt's page hashes in
order.

Each page has an entry: an integer with one bit per worker. The result is a dense array with a count
per worker (`ByWorker`), because usually most workers have the system prompt cached. The index may
lag behind the caches. A wrong match costs time but never changes a token."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from jdisagg.messages.kept_blocks import PrefixEvent
from jdisagg.plain import plain

Counts = npt.NDArray[np.int64]


@plain
class Roster:
    """Immutable assignment of numbers to workers. `names[number]` is the worker, or "" if the
    number is free. Rosters are compared by identity (`is`)."""

    names: tuple[str, ...]
    numbers: Mapping[str, int]


class Numbering:
    """Assigns each worker the lowest free number. `PrefixIndex` objects may share it."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._roster: Roster | None = None

    @property
    def roster(self) -> Roster:
        if self._roster is None:
            self._roster = Roster(tuple(self._names), dict(self._numbers))
        return self._roster

    def number(self, worker: str) -> int:
        found = self._numbers.get(worker)
        if found is not None:
            return found
        if "" in self._names:
            found = self._names.index("")
            self._names[found] = worker
        else:
            found = len(self._names)
            self._names.append(worker)
        self._numbers[worker], self._roster = found, None
        return found

    def free(self, worker: str) -> None:
        self._names[self._numbers.pop(worker)] = ""
        self._roster = None


class ByWorker(Mapping[str, int]):
    """A count per worker, stored in an array that is indexed by the workers' numbers. As a mapping
    from worker names, it contains only the workers whose count is not 0."""

    def __init__(self, roster: Roster, counts: Counts) -> None:
        self.roster = roster
        self.counts = counts

    def __getitem__(self, worker: str) -> int:
        found = self.get(worker)
        if not found:
            raise KeyError(worker)
        return found

    def get(self, worker: str, default: int = 0) -> int:  # type: ignore[override]
        number = self.roster.numbers.get(worker)
        return default if number is None else int(self.counts[number]) or default

    def __contains__(self, worker: object) -> bool:
        return isinstance(worker, str) and self.get(worker) > 0

    def __iter__(self) -> Iterator[str]:
        return (self.roster.names[number] for number in np.flatnonzero(self.counts))

    def __len__(self) -> int:
        return int(np.count_nonzero(self.counts))

    def __add__(self, other: "ByWorker") -> "ByWorker":
        return ByWorker(self.roster, self.counts + other.counts)

    def __mul__(self, factor: int) -> "ByWorker":
        return ByWorker(self.roster, self.counts * factor)

    def __repr__(self) -> str:
        return repr(dict(self))


class PrefixIndex:
    """Index of the pages that workers have cached.

    Args:
        most_pages: Largest number of entries, summed over workers. Further insertions are dropped.
        numbering: Numbers of the workers. It may be shared with other indices if each worker is in
            only one of them.
    """

    def __init__(self, most_pages: int | None = None, numbering: Numbering | None = None) -> None:
        self._most = most_pages
        self._count = 0
        self._numbering = numbering or Numbering()
        self._bits: dict[str, int] = {}
        self._holders: dict[int, int] = {}
        self._pages: dict[str, set[int]] = {}
        self._last: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def pages(self, worker: str) -> int:
        return len(self._pages.get(worker, ()))

    def last(self, worker: str) -> int:
        return self._last.get(worker, 0)

    def apply(self, worker: str, events: Sequence[PrefixEvent]) -> bool:
        """Applies a worker's next cache events. Returns False if earlier events are missing. Events
        are then ignored until `replace` is called with a snapshot."""
        self._know(worker)
        for event in events:
            if event.number <= self._last[worker]:
                continue
            if event.number != self._last[worker] + 1:
                return False
            self._last[worker] = event.number
            (self._gain if event.added else self._lose)(worker, event.page_hash)
        return True

    def replace(self, worker: str, snapshot: tuple[int, frozenset[int]]) -> None:
        """The snapshot has the number of the last event that it includes, and all page hashes."""
        self._know(worker)
        number, hashes = snapshot
        for page_hash in self._pages[worker] - hashes:
            self._lose(worker, page_hash)
        for page_hash in hashes - self._pages[worker]:
            self._gain(worker, page_hash)
        self._last[worker] = number

    def forget(self, worker: str) -> None:
        """Removes a worker and its entries. Called if the worker is gone, or restarted so that it
        numbers events from 1 again."""
        if worker not in self._bits:
            return
        for page_hash in tuple(self._pages[worker]):
            self._lose(worker, page_hash)
        del self._bits[worker], self._pages[worker], self._last[worker]
        self._numbering.free(worker)

    def matches(self, hashes: Sequence[int]) -> ByWorker:
        roster = self._numbering.roster
        counts = np.zeros(len(roster.names), np.int64)
        knowing = self._holders.get(hashes[0], 0) if hashes else 0
        count = 1
        while knowing:
            still = knowing & self._holders.get(hashes[count], 0) if count < len(hashes) else 0
            if still != knowing:
                counts[_numbers(knowing & ~still, len(counts))] = count
            knowing, count = still, count + 1
        return ByWorker(roster, counts)

    def _know(self, worker: str) -> None:
        if worker not in self._bits:
            self._bits[worker] = 1 << self._numbering.number(worker)
            self._pages[worker], self._last[worker] = set(), 0

    def _gain(self, worker: str, page_hash: int) -> None:
        pages = self._pages[worker]
        if page_hash in pages:
            return
        if self._most is not None and self._count >= self._most:
            return
        self._count += 1
        pages.add(page_hash)
        self._holders[page_hash] = self._holders.get(page_hash, 0) | self._bits[worker]

    def _lose(self, worker: str, page_hash: int) -> None:
        pages = self._pages[worker]
        if page_hash not in pages:
            return
        self._count -= 1
        pages.remove(page_hash)
        left = self._holders.get(page_hash, 0) & ~self._bits[worker]
        if left:
            self._holders[page_hash] = left
        else:
            self._holders.pop(page_hash, None)


def _numbers(bits: int, most: int) -> npt.NDArray[np.intp]:
    packed = np.frombuffer(bits.to_bytes(-(-most // 8), "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(packed, bitorder="little"))

"""Allocates the pages of sliding-window layers on one data-parallel rank of a mesh that prefills.

At any time a prompt needs only a few of these pages: those of the window before its next chunk, and
those of the chunk. Its page table therefore repeats pages whose positions no later query attends
to.

A kept window is the pages of the last window before a block boundary. It needs no copy, because a
sequence that continues from the boundary only reads these pages.

Invariants (each is a test of the same name in tests/scheduler/test_window_pages.py):
- free_used_and_kept_pages_are_all_pages
- no_page_is_repeated_that_a_query_still_reads
- a_kept_window_is_never_overwritten
"""

from collections import deque
from collections.abc import Callable, Iterable

from jdisagg.layout.kv_spec import ring_pages
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.page_ledger import LedgerError, pages_for
from jdisagg.scheduler.snapshots import Pending, Snapshots

# A page table: the page of each column of `page_size` positions. Columns that no query reads hold
# 0.
Table = tuple[int, ...]
# Value of a kept window at a boundary where no prompt is known to end or to branch.
LEAST_SHARE = 0.1


def turn_pages(window: int, chunk: int, page_size: int) -> int:
    """Returns the number of columns after which a page may be repeated in a page table. The chunk
    that overwrites the page must have no query that attends to the page's earlier positions."""
    return ring_pages(window + chunk - 1, page_size)


def prompt_pages(window: int, chunk: int, page_size: int) -> int:
    """Returns a number of pages that suffices for a prompt of any length: the pages of its chunks,
    of the window that it continues from, and of two windows to cache."""
    return turn_pages(window, chunk, page_size) + 3 * ring_pages(window, page_size)


class WindowPages:
    """The pages of sliding-window layers of one rank. Owners are sequences and restores."""

    def __init__(self, limits: MeshLimits) -> None:
        self.total = limits.window_pages_per_rank
        self._seen_from, self._page_size = limits.seen_from, limits.page_size
        sizes = limits.kv_spec.widest_window, limits.chunk_buckets[-1], limits.page_size
        self._turn = turn_pages(*sizes)
        self._most = prompt_pages(*sizes) if limits.snapshot_tokens else self._turn
        self._free = deque(range(self.total))
        self._used = [0] * self.total  # by owners
        self._kept = [0] * self.total  # by kept windows
        self._in_use = 0  # pages that owners use
        self.kept_pages = 0
        self._tables: dict[int, Table] = {}
        self._held: dict[int, frozenset[int]] = {}
        self._repeats: set[int] = set()  # owners in whose tables pages repeat
        # first column and pages, by slot
        self._windows: dict[int, tuple[int, Table]] = {}
        self._make_room: Callable[[bool], bool] = lambda cheap: False

    def on_full(self, make_room: Callable[[bool], bool]) -> None:
        """Sets a function that drops one kept window and returns True, or returns False if there is
        none. If its argument is True, it drops no window at a boundary where a prompt ended,
        branched or continued."""
        self._make_room = make_room

    @property
    def available(self) -> int:
        """Number of pages that no sequence or restore uses. It includes pages that only kept
        windows use."""
        return self.total - self._in_use

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        return min(pages_for(tokens, self._page_size), self._most)

    def begin(
        self,
        owner: int,
        tokens: int,
        cached: int,
        window: Table,
        wanted: Iterable[int],
        promised: int = 0,
    ) -> Table:
        """Assigns pages to a prompt. The caller must have checked that `needed` pages are
        available.

        Args:
            cached: Number of leading tokens whose KV is cached, a multiple of the page size.
            window: Kept window before `cached`; () if `cached` is 0.
        """
        first, columns = cached // self._page_size, pages_for(tokens, self._page_size)
        begin = min(first, self._first(cached))
        held = [*window[begin:first]]
        self._use(held)
        table = [0] * begin + held
        fresh = columns - first
        spare = self.available - promised - self.total // 2
        scarce = fresh > max(spare, self.needed(tokens) - len(held))
        while not scarce and fresh > len(self._free):
            scarce = not self._make_room(True)
        pinned = {column for at in wanted for column in self._columns(at)} if scarce else set()
        behind: deque[tuple[int, int]] = deque()  # columns that may be overwritten, with pages
        for column in range(first, columns):
            if scarce and behind and behind[0][0] <= column - self._turn:
                page = behind.popleft()[1]
                self._repeats.add(owner)
            else:
                page = self._take()
                held.append(page)
            table.append(page)
            if column not in pinned:
                behind.append((column, page))
        self._record(owner, tuple(table), held)
        return tuple(table)

    def begin_restore(self, owner: int, tokens: int) -> Table | None:
        """Assigns pages for a window that is being restored, the one before position `tokens`.
        Releases earlier pages of the owner. Returns the page table, or None if too few pages are
        available."""
        self.free(owner)
        columns = self._columns(tokens)
        if len(columns) > self.available:
            return None
        pages = [self._take() for _ in columns]
        table = (0,) * columns.start + tuple(pages)
        self._record(owner, table, pages)
        return table

    def own(self, owner: int) -> int:
        """Returns the number of an owner's pages that no other sequence or restore uses."""
        return sum([self._used[page] == 1 for page in self._held.get(owner, ())])

    def repeats(self, owner: int) -> bool:
        """Returns whether an owner's page table repeats pages. If it does, only the wanted windows
        can be cached."""
        return owner in self._repeats

    def table(self, owner: int) -> Table:
        return self._tables[owner]

    def free(self, owner: int) -> None:
        self._repeats.discard(owner)
        self._tables.pop(owner, None)
        for page in self._held.pop(owner, ()):
            self._used[page] -= 1
            self._in_use -= not self._used[page]
            self._release(page)

    # ---- kept windows

    def keep(self, slot: int, owner: int, tokens: int) -> None:
        columns = self._columns(tokens)
        pages = self._tables[owner][columns.start : columns.stop]
        self._windows[slot] = columns.start, pages
        for page in pages:
            self.kept_pages += not self._kept[page]
            self._kept[page] += 1

    def window(self, slot: int) -> Table:
        first, pages = self._windows[slot]
        return (0,) * first + pages

    def drop(self, slot: int) -> None:
        for page in self._windows.pop(slot, (0, ()))[1]:
            self._kept[page] -= 1
            self.kept_pages -= not self._kept[page]
            self._release(page)

    def _first(self, tokens: int) -> int:
        return self._seen_from(tokens) // self._page_size

    def _columns(self, tokens: int) -> range:
        return range(self._first(tokens), tokens // self._page_size)

    def _record(self, owner: int, table: Table, held: list[int]) -> None:
        if owner in self._tables:
            raise LedgerError(f"owner {owner} has pages of windows already; free it first")
        self._tables[owner], self._held[owner] = table, frozenset(held)

    def _use(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._in_use += not self._used[page]
            self._used[page] += 1

    def _take(self) -> int:
        while not self._free:
            if not self._make_room(False):
                raise LedgerError("no page of windows is available; check `available` first")
        page = self._free.popleft()
        self._use((page,))
        return page

    def _release(self, page: int) -> None:
        if not self._used[page] and not self._kept[page]:
            self._free.append(page)


class WindowSnapshots(Snapshots):
    """The kept windows of one rank in the form of snapshots (`scheduler/snapshots.py`). A slot is a
    number that identifies the window's pages."""

    def __init__(self, pages: WindowPages) -> None:
        super().__init__(0, 0)
        self.pages = pages
        self.total = pages.total
        self._last_slot = 0
        pages.on_full(self._make_room)

    @property
    def free(self) -> int:
        return self.pages.free_pages

    @property
    def filled(self) -> int:
        return self.pages.kept_pages

    def place(self, name: bytes) -> Table:
        return self.pages.window(self._kept[name].slot)

    def begin(self, owner: int, tokens: int, rolling: bool = False) -> None:
        self._expect(owner, tokens, 1.0)

    def begin_all(self, owner: int, cached: int, tokens: int, multiple: int) -> None:
        if not self.pages.repeats(owner):
            known = {one.tokens for one in self._pending.get(owner, ())}
            for at in range(cached // multiple * multiple + multiple, tokens, multiple):
                if at not in known:
                    self._expect(owner, at, LEAST_SHARE)

    def begin_restore(self, owner: int, tokens: int) -> Table | None:
        self._pending.pop(owner, None)
        self.begin(owner, tokens)
        return self.pages.begin_restore(owner, tokens)

    def settle(
        self, owner: int, name_at: Callable[[int], bytes | None], most: int | None = None
    ) -> None:
        super().settle(owner, name_at, most)
        if most is None:
            self.pages.free(owner)

    def _expect(self, owner: int, tokens: int, share: float) -> None:
        self._last_slot += 1
        pending = Pending(self._last_slot, tokens, False, share)
        self._pending.setdefault(owner, []).append(pending)

    def _settled(self, owner: int, one: Pending) -> None:
        self.pages.keep(one.slot, owner, one.tokens)

    def _give_back(self, slot: int) -> None:
        self.pages.drop(slot)

"""The page allocator of one data-parallel rank.

An owner (any integer) holds an ordered list of pages.

`keep` marks a page as cached: when its last owner releases the page, its contents stay, and another
owner may `adopt` it. A cached page without an owner is called idle. It counts as free, but is
reused only when no other page is free.

Invariants (each is a test of the same name in tests/scheduler/test_page_ledger.py):
- every_page_is_free_or_held: free pages (including idle pages) and held pages are disjoint, and
  together they are all pages
- a_page_has_as_many_references_as_owners
- an_owner_holds_no_page_twice
- nothing_is_freed_twice: freeing an unknown owner indicates a bug and raises `LedgerError`
- a_refused_request_changes_nothing: `reserve` and `extend` give all pages, or return None and
  change nothing
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from jdisagg.scheduler.retention import EvictionOrder


class LedgerError(AssertionError):
    """A misuse of the ledger, such as freeing an owner twice. It indicates a bug in the caller."""


class PageLedger:
    """Allocator of the pages 0 to total_pages-1 of one data-parallel rank."""

    def __init__(self, total_pages: int) -> None:
        self.total_pages = total_pages
        self._free: deque[int] = deque(range(total_pages))
        self._references = [0] * total_pages
        self._held: dict[int, list[int]] = {}
        self._kept: set[int] = set()
        self._idle: EvictionOrder[int] = EvictionOrder()  # kept pages without an owner
        self._spared: set[int] = set()  # idle pages that are passed over once
        self._given_away: Callable[[int], Iterable[int]] | None = None

    @property
    def free_pages(self) -> int:
        """Number of pages without owner, including idle (cached) pages."""
        return len(self._free) + len(self._idle) if self._kept else len(self._free)

    def idle(self) -> Iterator[int]:
        """Iterates over cached pages without owner, in the order in which they will be reused."""
        return iter(self._idle)

    def owners(self) -> Iterator[int]:
        return iter(self._held)

    def references(self, page: int) -> int:
        return self._references[page]

    def count(self, owner: int) -> int:
        return len(self._holding(owner))

    def count_all(self, owners: Iterable[int]) -> int:
        """A shared page counts for each owner."""
        held = self._held
        return sum([len(held[owner]) for owner in owners])

    def pages(self, owner: int) -> tuple[int, ...]:
        return tuple(self._holding(owner))

    def reserve(self, owner: int, count: int) -> tuple[int, ...] | None:
        if owner in self._held:
            raise LedgerError(
                f"owner {owner} holds {len(self._held[owner])} pages already; extend it"
            )
        if count > self.free_pages:
            return None
        self._held[owner] = []
        return self.extend(owner, count)

    def adopt(self, owner: int, pages: Sequence[int]) -> tuple[int, ...]:
        if owner in self._held:
            raise LedgerError(f"owner {owner} holds pages already; adopt with a new owner")
        if not self._kept.issuperset(pages):
            raise LedgerError(f"owner {owner} adopts pages {pages}, of which some are not kept")
        for page in pages:
            self._references[page] += 1
            self._idle.discard(page)
            self._spared.discard(page)
        self._held[owner] = list(pages)
        return tuple(pages)

    def extend(self, owner: int, count: int) -> tuple[int, ...] | None:
        held = self._holding(owner)
        if count > len(self._free):
            if count > self.free_pages:
                return None
            pages = [self._take() for _ in range(count)]
        else:
            give = self._free.popleft
            pages = [give() for _ in range(count)]
        references = self._references
        for page in pages:
            references[page] = 1
        held += pages
        return tuple(held)

    def share(self, owner: int, new_owner: int, count: int) -> tuple[int, ...]:
        if new_owner in self._held:
            raise LedgerError(f"owner {new_owner} holds pages already; share with a new owner")
        pages = self._holding(owner)[:count]
        if len(pages) < count:
            raise LedgerError(f"owner {owner} holds {len(pages)} pages, cannot share {count}")
        for page in pages:
            self._references[page] += 1
        self._held[new_owner] = pages
        return tuple(pages)

    def own(self, owner: int, index: int) -> tuple[int, int] | None:
        """Replaces page `index` of `owner` by an unshared page. Returns (source page, destination
        page), which the caller must copy, or None if the page is not shared.

        The other owners keep the source page. The caller must check that a page is free."""
        held = self._holding(owner)
        source = held[index]
        if self._references[source] == 1:
            return None
        if not self.free_pages:
            raise LedgerError(
                f"no free page to copy page {source} of owner {owner} to; check free_pages first"
            )
        destination = self._take()
        self._references[destination] = 1
        self._references[source] -= 1
        held[index] = destination
        return source, destination

    def free(self, owner: int) -> int:
        held, references, kept = self._holding(owner), self._references, self._kept
        for page in held:
            references[page] -= 1
        let_go = [page for page in held if not references[page]]
        if kept:
            self._free.extend([page for page in let_go if page not in kept])
            for page in reversed(let_go):
                if page in kept:
                    self._idle.add(page)
        else:
            self._free.extend(let_go)
        del self._held[owner]
        return len(let_go)

    # ---- kept pages

    def on_given_away(
        self, given_away: Callable[[int], Iterable[int]], order: EvictionOrder[int]
    ) -> None:
        """Sets a callback that is called with each idle page before it is reused, and the order in
        which idle pages are reused. The callback returns other pages whose cached contents are
        useless without this page. They are then no longer cached either."""
        self._given_away, self._idle = given_away, order

    def keep(self, page: int) -> None:
        """Marks a page as cached: its contents stay after all owners have released it."""
        if not self._references[page] or page in self._kept:
            raise LedgerError(f"page {page} has no owner or is kept already")
        self._kept.add(page)

    def keep_no_longer(self, page: int) -> None:
        self._kept.remove(page)
        if not self._references[page]:
            self._idle.discard(page)
            self._spared.discard(page)
            self._free.append(page)

    def touch(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page in self._idle:
                self._idle.add(page)

    def demote(self, pages: Iterable[int]) -> None:
        """Lets idle pages be reused before all others, until they are used or promoted."""
        for page in pages:
            if page in self._idle:
                self._idle.discard(page)
                self._idle.add_first(page)

    def promote(self, pages: Iterable[int]) -> None:
        """Lets demoted pages count as used now."""
        for page in pages:
            if self._idle.is_first(page):
                self._idle.add(page)

    def spare(self, pages: Iterable[int]) -> None:
        """Lets idle pages be reused later than others: each is passed over once."""
        self._spared.update([page for page in pages if page in self._idle])

    def _take(self) -> int:
        if self._free:
            return self._free.popleft()
        page = self._idle.pop()
        while page in self._spared:
            self._spared.remove(page)
            self._idle.add(page)
            page = self._idle.pop()
        self._kept.remove(page)
        for other in self._given_away(page) if self._given_away else ():
            self.keep_no_longer(other)
        return page

    def _holding(self, owner: int) -> list[int]:
        try:
            return self._held[owner]
        except KeyError:
            raise LedgerError(
                f"owner {owner} holds no pages: freed twice, or never reserved"
            ) from None


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)

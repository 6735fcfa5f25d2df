"""The page ledger of one dp rank: who holds which page, and how often. Pure bookkeeping; knows no
sequences, no time, no JAX.

An owner (any integer) holds an ordered list of pages. A page may have several owners: `share` lets
one owner hold the first pages of another (n > 1 shares its prompt), `own` gives an owner a page of
its own in place of a shared one (copy-on-write: the caller issues the copy). Leases live with
whoever reserves (`scheduler/reservations.py`); the ledger only counts.

Invariants (each is a test of the same name in tests/scheduler/test_page_ledger.py):
- every_page_is_free_or_held: free pages and held pages are disjoint and together all pages
- a_page_has_as_many_references_as_owners
- an_owner_holds_no_page_twice
- nothing_is_freed_twice: freeing an unknown owner is a `LedgerError`, our own bug
- a_refused_request_changes_nothing: `reserve` and `extend` give all pages asked for, or None and no
  change"""

from collections import deque
from collections.abc import Iterator


class LedgerError(AssertionError):
    """Our own code broke the ledger's rules: freed twice, or named an owner that holds nothing."""


class PageLedger:
    """Pages 0..total_pages-1 of one rank."""

    def __init__(self, total_pages: int) -> None:
        self.total_pages = total_pages
        self._free: deque[int] = deque(range(total_pages))
        self._references = [0] * total_pages
        self._held: dict[int, list[int]] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def owners(self) -> Iterator[int]:
        return iter(self._held)

    def references(self, page: int) -> int:
        return self._references[page]

    def count(self, owner: int) -> int:
        """How many pages `owner` holds."""
        return len(self._holding(owner))

    def pages(self, owner: int) -> tuple[int, ...]:
        return tuple(self._holding(owner))

    def reserve(self, owner: int, count: int) -> tuple[int, ...] | None:
        """Makes `owner` with `count` fresh pages; None when there are not so many."""
        if owner in self._held:
            raise LedgerError(
                f"owner {owner} holds {len(self._held[owner])} pages already; extend it"
            )
        if count > len(self._free):
            return None
        self._held[owner] = []
        return self.extend(owner, count)

    def extend(self, owner: int, count: int) -> tuple[int, ...] | None:
        """Appends `count` fresh pages to what `owner` holds and returns all of it; None when there
        are not so many."""
        held = self._holding(owner)
        if count > len(self._free):
            return None
        for _ in range(count):
            page = self._free.popleft()
            self._references[page] = 1
            held.append(page)
        return tuple(held)

    def share(self, owner: int, new_owner: int, count: int) -> tuple[int, ...]:
        """Makes `new_owner` hold the first `count` pages of `owner` too. Costs no page."""
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
        """Makes page `index` of `owner` its own: returns (source, destination) to copy, or None
        when it is its own already.

        The source stays held by its other owners. The caller has made sure that a page is free."""
        held = self._holding(owner)
        source = held[index]
        if self._references[source] == 1:
            return None
        if not self._free:
            raise LedgerError(
                f"no free page to copy page {source} of owner {owner} to; check free_pages first"
            )
        destination = self._free.popleft()
        self._references[destination] = 1
        self._references[source] -= 1
        held[index] = destination
        return source, destination

    def free(self, owner: int) -> int:
        """Drops `owner`; returns how many pages became free. They may be given again to commands
        issued from now on."""
        freed = 0
        for page in self._holding(owner):
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)
                freed += 1
        del self._held[owner]
        return freed

    def _holding(self, owner: int) -> list[int]:
        if owner not in self._held:
            raise LedgerError(f"owner {owner} holds no pages: freed twice, or never reserved")
        return self._held[owner]


def pages_for(tokens: int, page_size: int) -> int:
    """How many pages `tokens` positions fill."""
    return -(-tokens // page_size)

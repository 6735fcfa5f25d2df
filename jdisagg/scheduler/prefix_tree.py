"""Which pages hold which beginnings of prompts: full pages under chained content hashes, with
references and eviction of the least recently used.

A page is known by the hash of its tokens chained to the hash of the page before it, so one lookup a
page finds the longest known beginning, and pages of different tenants never meet (the chain starts
from a salt). The tree stores page numbers for its owner and gives back those that it evicts; it
knows neither tokens, arrays, clocks nor what pages are used for. Everything is O(1) a page.

A chain is always named from its first page on. Releasing and touching count its end as used before
its beginning, so that in the order of use every page lies behind all that continue it: eviction
needs no look at parents and children, and never cuts a chain in its middle. `children_first=False`
is the plain LRU of a block store, for comparison: front to back, and gaps may hide what follows
them.

Events (`PrefixEvent`) tell a router's index (`router/prefix_index.py`) what a tree gained and lost.

Invariants (each is a test of the same name in tests/scheduler/test_prefix_tree.py):
- references_are_never_negative: releasing what is not held is a `PrefixError`, our own bug
- a_held_page_is_never_evicted
- every_known_page_has_its_parent
- a_page_number_is_stored_once
- events_replayed_give_the_same_pages"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

# events kept for whoever takes them; when more happen unasked they are dropped, and the gap tells
EVENT_LIMIT = 1 << 16
HASH_BYTES = 16  # two prompts of 2**40 pages together meet by chance with a probability of 2**-49


class PrefixError(AssertionError):
    """Our own code broke the tree's rules: released what it did not hold, or stored a page
    twice."""


@dataclass(frozen=True, slots=True)
class PrefixEvent:
    """`added`: the page of this hash is there now; else it is gone. `number` counts a tree's events
    from 1, without gaps."""

    number: int
    page_hash: int
    added: bool


@dataclass(slots=True)
class _Page:
    number: int
    references: int = 0


def page_hashes(tokens: Sequence[int], page_size: int, salt: str = "") -> list[int]:
    """The chain of the full pages of a prompt. `salt`: the tenant, and whatever else must not share
    pages (an adapter, a model)."""
    content = np.asarray(tokens, "<u4").tobytes()
    step = 4 * page_size
    link = blake2b(salt.encode(), digest_size=HASH_BYTES).digest()
    hashes = []
    for end in range(step, len(content) + 1, step):
        link = blake2b(content[end - step : end], key=link, digest_size=HASH_BYTES).digest()
        hashes.append(int.from_bytes(link, "little"))
    return hashes


class PrefixTree:
    """`capacity`: pages that `touch` and `release` keep it to; None where the owner evicts when its
    ledger runs short."""

    def __init__(self, capacity: int | None = None, *, children_first: bool = True) -> None:
        self.capacity = capacity
        self._children_first = children_first
        self._pages: dict[int, _Page] = {}
        self._numbers: set[int] = set()
        self._unheld: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._events: list[PrefixEvent] = []
        self._last_event = 0
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page_hash: int) -> bool:
        return page_hash in self._pages

    def __iter__(self) -> Iterator[int]:
        return iter(self._pages)

    @property
    def evictable(self) -> int:
        """Pages that nobody holds."""
        return len(self._unheld)

    def references(self, page_hash: int) -> int:
        return self._pages[page_hash].references

    def match(self, hashes: Sequence[int]) -> int:
        """How many pages of the chain are known, from its first on. Counts as no use."""
        for count, page_hash in enumerate(hashes):
            if page_hash not in self._pages:
                return count
        return len(hashes)

    def hold(self, hashes: Sequence[int]) -> tuple[int, ...]:
        """Pins the known beginning of a chain and returns its page numbers; release just as many
        hashes."""
        known = hashes[: self.match(hashes)]
        for page_hash in known:
            self._pin(page_hash)
        return tuple(self._pages[page_hash].number for page_hash in known)

    def insert(self, hashes: Sequence[int], numbers: Sequence[int]) -> tuple[int, ...]:
        """Adds the pages of a chain that the caller has filled, and pins the whole chain. Where a
        page is known already (two requests computed the same) it stays, and the caller's own number
        comes back as surplus: to be freed once nobody reads it."""
        if len(hashes) != len(numbers):
            raise PrefixError(f"{len(hashes)} hashes for {len(numbers)} pages")
        surplus = []
        for page_hash, number in zip(hashes, numbers, strict=True):
            known = self._pages.get(page_hash)
            if known is None:
                self._add(page_hash, number)
            elif known.number != number:
                surplus.append(number)
            self._pin(page_hash)
        return tuple(surplus)

    def release(self, hashes: Sequence[int]) -> tuple[int, ...]:
        """Unpins a chain that `hold` or `insert` pinned; returns pages evicted to keep to the
        capacity."""
        for page_hash in self._in_order_of_use(hashes):
            page = self._pages.get(page_hash)
            if page is None or not page.references:
                raise PrefixError(f"page {page_hash:#x} is released more often than it was held")
            page.references -= 1
            if not page.references:
                self._unheld[page_hash] = None
        return self._keep_to_capacity()

    def touch(self, hashes: Sequence[int]) -> int:
        """Uses a whole chain at once, adding what is unknown under numbers of its own, then keeps
        to the capacity. Returns how many pages were known. For simulated and comparative caches,
        whose pages nobody reads."""
        known = self.match(hashes)
        for page_hash in self._in_order_of_use(hashes):
            if page_hash in self._unheld:
                self._unheld.move_to_end(page_hash)
            elif page_hash not in self._pages:
                self._next_number += 1
                self._add(page_hash, -self._next_number)
        self._keep_to_capacity()
        return known

    def evict(self, count: int) -> tuple[int, ...]:
        """Drops up to `count` pages that nobody holds, least recently used first; returns their
        numbers, which are free now."""
        freed = []
        while len(freed) < count and self._unheld:
            page_hash, _ = self._unheld.popitem(last=False)
            number = self._pages.pop(page_hash).number
            self._numbers.remove(number)
            self._tell(page_hash, False)
            freed.append(number)
        return tuple(freed)

    def take_events(self) -> tuple[PrefixEvent, ...]:
        """What happened since this was asked last; of more than `EVENT_LIMIT` events only the
        latest, with a gap before them."""
        events, self._events = tuple(self._events), []
        return events

    def snapshot(self) -> tuple[int, frozenset[int]]:
        """(number of the last event, all hashes): for an index that missed events."""
        return self._last_event, frozenset(self._pages)

    def _in_order_of_use(self, hashes: Sequence[int]) -> Iterator[int]:
        return reversed(hashes) if self._children_first else iter(hashes)

    def _pin(self, page_hash: int) -> None:
        self._pages[page_hash].references += 1
        self._unheld.pop(page_hash, None)

    def _keep_to_capacity(self) -> tuple[int, ...]:
        return self.evict(len(self._pages) - self.capacity) if self.capacity is not None else ()

    def _add(self, page_hash: int, number: int) -> None:
        if number in self._numbers:
            raise PrefixError(f"page {number} is in the tree already, under another hash")
        self._pages[page_hash] = _Page(number)
        self._numbers.add(number)
        self._unheld[page_hash] = None
        self._tell(page_hash, True)

    def _tell(self, page_hash: int, added: bool) -> None:
        self._last_event += 1
        if len(self._events) >= EVENT_LIMIT:
            self._events.clear()
        self._events.append(PrefixEvent(self._last_event, page_hash, added))

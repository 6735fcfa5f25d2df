"""Assigns the snapshot slots of one data-parallel rank, and decides which snapshots stay.

When a slot is needed and none is free, the snapshot with the lowest value is dropped (greedy dual
algorithm).

Invariants (each is a test of the same name in tests/scheduler/test_snapshots.py):
- free_pending_and_kept_slots_are_all_slots
- a_snapshot_never_outlives_its_block
- what_saves_more_stays_longer
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jdisagg.plain import plain

SPARE_ENTRIES = 64  # heap entries beyond twice the snapshots before outdated ones are removed


@dataclass(slots=True)
class Kept:
    """A cached snapshot after a prefix of `tokens` tokens, used `hits` times. Its value is
    multiplied by `share` until its first use."""

    slot: int
    tokens: int
    hits: int
    worth: float
    share: float = 1.0


@dataclass(slots=True)
class Pending:
    """A snapshot of a running sequence (its owner) after `tokens` tokens. If `rolling` is set, the
    owner overwrites the snapshot at each later block boundary."""

    slot: int
    tokens: int
    rolling: bool
    share: float = 1.0


@plain
class EvictedSnapshot:
    """A snapshot after `tokens` tokens, and where it was (`Snapshots.place`)."""

    name: bytes
    tokens: int
    place: tuple[int, ...]


class Snapshots:
    """The snapshots of one rank.

    Args:
        first_slot: Number of the first snapshot slot. Lower numbers are slots of sequences.
    """

    def __init__(self, first_slot: int, count: int) -> None:
        self.total = count
        self._free = list(range(first_slot + count - 1, first_slot - 1, -1))
        self._kept: dict[bytes, Kept] = {}
        self._pending: dict[int, list[Pending]] = {}
        self._clock = 0.0  # value of the last snapshot that was dropped for room
        # heap of (value, name) of kept snapshots; it may have outdated entries
        self._order: list[tuple[float, bytes]] = []
        self.made = self.used = self.evicted = 0
        self._given_up: list[EvictedSnapshot] = []

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, name: bytes) -> bool:
        return name in self._kept

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._kept)

    def take_evicted(self) -> list[EvictedSnapshot]:
        """Returns the snapshots that were evicted since the last call, if a prompt ended, branched
        or continued at them. They can still be copied before the next command is issued."""
        evicted = self._given_up
        if evicted:
            self._given_up = []
        return evicted

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def filled(self) -> int:
        return len(self._kept)

    @property
    def pending(self) -> int:
        return sum(map(len, self._pending.values()))

    def place(self, name: bytes) -> tuple[int, ...]:
        """Returns the pages of a kept snapshot. For a snapshot in a state slot, this is only the
        slot's number. The command that reads them must be issued immediately, because they may be
        reused later."""
        return (self._kept[name].slot,)

    def tokens(self, name: bytes) -> int:
        return self._kept[name].tokens

    def use(self, name: bytes) -> tuple[int, ...]:
        found = self._kept[name]
        found.hits += 1
        found.share = 1.0
        self.used += 1
        self._value(name, found)
        return self.place(name)

    def begin(self, owner: int, tokens: int, rolling: bool = False) -> int | None:
        """Assigns a slot to a snapshot of `owner` after `tokens` tokens. A rolling snapshot
        replaces the owner's earlier rolling one. If half of all slots are pending, it replaces any
        earlier snapshot of the owner. Returns None if all slots are pending."""
        mine = self._pending.setdefault(owner, [])
        crowded = 2 * self.pending >= self.total
        reused = [one for one in mine if rolling and (one.rolling or crowded)]
        if reused:
            reused[-1].tokens, reused[-1].rolling = tokens, True
            return reused[-1].slot
        if not self._free and not self._make_room():
            if not mine:
                del self._pending[owner]
            return None
        mine.append(Pending(self._free.pop(), tokens, rolling))
        return mine[-1].slot

    def begin_all(self, owner: int, cached: int, tokens: int, multiple: int) -> None:
        """Begins a snapshot of `owner` at each multiple of `multiple` tokens between `cached` and
        `tokens`. Does so only if snapshots take no extra memory, so it does nothing for snapshots
        in slots."""

    def pass_on(self, owner: int, new_owner: int) -> None:
        if owner in self._pending:
            self._pending.setdefault(new_owner, []).extend(self._pending.pop(owner))

    def begin_restore(self, owner: int, tokens: int) -> tuple[int, ...] | None:
        """Assigns a place to a snapshot after `tokens` tokens that is being restored. The place
        replaces the owner's earlier one. Returns None if there is no room."""
        slot = self.begin(owner, tokens, rolling=True)
        return None if slot is None else (slot,)

    def settle(
        self, owner: int, name_at: Callable[[int], bytes | None], most: int | None = None
    ) -> None:
        """Caches the pending snapshots of `owner`. Frees those whose block is not cached or has a
        snapshot already.

        Args:
            name_at: Function that returns the name of the cached block that ends after a number of
                tokens of the owner's sequence. Returns None if no such block is cached.
            most: Snapshots after more tokens than this stay pending; None means that none stays
                pending.
        """
        pending = self._pending.pop(owner, [])
        now = pending if most is None else [one for one in pending if one.tokens <= most]
        if len(now) < len(pending):
            self._pending[owner] = [one for one in pending if one.tokens > (most or 0)]
        for one in now:
            name = name_at(one.tokens)
            if name is None or name in self._kept:
                self._give_back(one.slot)
                if name is not None and self._kept[name].share < one.share:
                    self._kept[name].share = one.share
                    self._value(name, self._kept[name])
            else:
                self._settled(owner, one)
                self.add(name, one.slot, one.tokens, one.share)

    def add(self, name: bytes, slot: int, tokens: int, share: float = 1.0) -> None:
        kept = self._kept[name] = Kept(slot, tokens, 0, 0.0, share)
        self._value(name, kept)
        self.made += 1

    def drop(self, name: bytes) -> None:
        found = self._kept.get(name)
        if found is not None:
            if found.share == 1.0:
                self._given_up.append(EvictedSnapshot(name, found.tokens, self.place(name)))
            del self._kept[name]
            self._give_back(found.slot)
            self.evicted += 1

    def clear(self) -> None:
        for one in self._kept.values():
            self._give_back(one.slot)
        self._given_up.clear()
        self._kept.clear()
        self._order.clear()

    def _value(self, name: bytes, kept: Kept) -> None:
        kept.worth = self._clock + kept.tokens * kept.share * (1 + kept.hits)
        heapq.heappush(self._order, (kept.worth, name))
        if len(self._order) > 2 * len(self._kept) + SPARE_ENTRIES:
            self._order = [(one.worth, name) for name, one in self._kept.items()]
            heapq.heapify(self._order)

    def _make_room(self, cheap: bool = False) -> bool:
        while self._order:
            worth, name = self._order[0]
            kept = self._kept.get(name)
            if kept is None or kept.worth != worth:
                heapq.heappop(self._order)
                continue
            if cheap and kept.share == 1.0:
                return False
            heapq.heappop(self._order)
            self._clock = worth
            self.drop(name)
            return True
        return False

    def _settled(self, owner: int, one: Pending) -> None: ...

    def _give_back(self, slot: int) -> None:
        self._free.append(slot)


def wanted_snapshots(tokens: int, cached: int, matched: int, multiple: int) -> tuple[int, ...]:
    """Returns the positions of a prompt, ascending, at which snapshots should be made.

    Args:
        matched: Number of leading tokens whose KV is cached. It is more than `cached` if the cached
            prefix has no snapshot at its end.
    """
    last = (tokens - 1) // multiple * multiple
    branch = min(matched // multiple * multiple, last)
    return tuple([at for at in dict.fromkeys((branch, last)) if at > cached])

"""Assigns the snapshot slots of one data-parallel rank, and decides which snapshots stay.

A sequence that continues a cached prefix needs the prefix's KV, which is in pages, and the
recurrent state and sliding-window ring buffers at the prefix's end. A snapshot is a copy of the
state and the ring buffers, in a slot like those of sequences. It is kept under the name of the
prefix's last block, and dropped with or before this block.

Snapshots are made at three places: the last block boundary of a prompt, the end of a cached prefix
that has no snapshot there (a branch), and the last block boundary of an answer. A snapshot is
pending while a running sequence owns it, because its block is not cached yet. It is kept when the
sequence releases its pages.

When a slot is needed and none is free, the snapshot with the lowest value is dropped (greedy dual
algorithm). The value is the snapshot's number of tokens times its number of uses, plus the value of
the snapshot that was dropped last, so that unused snapshots age. Slots have equal size. Pure.

Invariants (each is a test of the same name in tests/scheduler/test_snapshots.py):
- free_pending_and_kept_slots_are_all_slots
- a_snapshot_never_outlives_its_block
- what_saves_more_stays_longer"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Kept:
    """A snapshot of a cached prefix of `tokens` tokens, used `hits` times."""

    slot: int
    tokens: int
    hits: int
    worth: float


@dataclass(slots=True)
class Pending:
    """A snapshot of a running sequence (its owner) after `tokens` tokens. With `rolling`, the owner
    overwrites the snapshot at each later block boundary."""

    slot: int
    tokens: int
    rolling: bool


class Snapshots:
    """The snapshots of one rank.

    Args:
        first_slot: Number of the first snapshot slot. Lower numbers are slots of sequences.
        count: Number of snapshot slots.
    """

    def __init__(self, first_slot: int, count: int) -> None:
        self.total = count
        self._free = list(range(first_slot + count - 1, first_slot - 1, -1))
        self._kept: dict[bytes, Kept] = {}
        self._pending: dict[int, list[Pending]] = {}
        self._clock = 0.0  # worth of the last snapshot dropped for room
        self.made = self.used = self.evicted = 0
        # called with the name, slot and tokens of a snapshot before its slot is written again
        self.on_evicted: Callable[[bytes, int, int], None] | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, name: bytes) -> bool:
        return name in self._kept

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._kept)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def pending(self) -> int:
        return sum(map(len, self._pending.values()))

    def slot(self, name: bytes) -> int:
        """Returns the slot of a kept snapshot, which must be read by a command issued at once."""
        return self._kept[name].slot

    def use(self, name: bytes) -> int:
        """Records that a sequence continues from a snapshot. Returns the snapshot's slot, which
        must be copied by a command issued at once."""
        found = self._kept[name]
        found.hits += 1
        self.used += 1
        self._value(found)
        return found.slot

    def begin(self, owner: int, tokens: int, rolling: bool = False) -> int | None:
        """Assigns a slot to a snapshot of `owner` after `tokens` tokens. A rolling snapshot
        replaces the owner's earlier rolling one, and any earlier one if half of the slots are
        pending. Returns None if all slots are pending."""
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

    def pass_on(self, owner: int, new_owner: int) -> None:
        """Makes `new_owner` the owner of all pending snapshots of `owner`."""
        if owner in self._pending:
            self._pending.setdefault(new_owner, []).extend(self._pending.pop(owner))

    def settle(self, owner: int, name_at: Callable[[int], bytes | None]) -> None:
        """Keeps the pending snapshots of `owner` and frees those that cannot be used.

        Args:
            name_at: Returns the name of the cached block that ends after a number of tokens of the
                owner's sequence; None if no such block is cached.
        """
        for one in self._pending.pop(owner, ()):
            name = name_at(one.tokens)
            if name is None or name in self._kept:
                self._free.append(one.slot)
            else:
                self.add(name, one.slot, one.tokens)

    def add(self, name: bytes, slot: int, tokens: int) -> None:
        """Keeps a complete snapshot under the name of a cached block."""
        kept = self._kept[name] = Kept(slot, tokens, 0, 0.0)
        self._value(kept)
        self.made += 1

    def drop(self, name: bytes) -> None:
        """Drops the snapshot of a block that is no longer cached, if there is one."""
        found = self._kept.pop(name, None)
        if found is not None:
            if self.on_evicted is not None:
                self.on_evicted(name, found.slot, found.tokens)
            self._free.append(found.slot)
            self.evicted += 1

    def clear(self) -> None:
        """Drops all kept snapshots."""
        self._free += [one.slot for one in self._kept.values()]
        self._kept.clear()

    def _value(self, kept: Kept) -> None:
        kept.worth = self._clock + kept.tokens * (1 + kept.hits)

    def _make_room(self) -> bool:
        if not self._kept:
            return False
        name, least = min(self._kept.items(), key=lambda one: one[1].worth)
        self._clock = least.worth
        self.drop(name)
        return True


def wanted_snapshots(tokens: int, cached: int, matched: int, multiple: int) -> tuple[int, ...]:
    """Returns the positions of a prompt, ascending, at which snapshots should be made.

    Args:
        tokens: Number of tokens of the prompt.
        cached: Number of leading tokens that are not computed.
        matched: Number of leading tokens whose KV is cached. More than `cached` if the prompt
            leaves another sequence at a place without a snapshot.
        multiple: Snapshots are made at multiples of this number.
    """
    last = (tokens - 1) // multiple * multiple
    branch = min(matched // multiple * multiple, last)
    return tuple([at for at in dict.fromkeys((branch, last)) if at > cached])

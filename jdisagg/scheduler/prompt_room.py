"""Allocates what prompts and sequences need besides ordinary pages: slots for recurrent state or
ring buffers of sliding-window layers, or pages of these layers, and slots for LoRA adapters. Does
no I/O.

If the model has neither recurrent state nor ring buffers (`MeshLimits.ring_pages`), no slots are
used and there is always room. The first child of a group (n > 1) uses the group's slot. Each other
child has its own slot, into which the group's state is copied.

Invariants of adapters (tests/scheduler/test_adapter_table.py): a slot holds one adapter; an adapter
that a sequence uses keeps its slot."""

from collections import OrderedDict
from collections.abc import Collection, Sequence

from jdisagg.layout.kv_spec import KvKind
from jdisagg.request import Request
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.page_ledger import PageLedger
from jdisagg.scheduler.residency import Residency
from jdisagg.scheduler.sequences import Prompt
from jdisagg.scheduler.snapshots import Snapshots
from jdisagg.scheduler.window_pages import Table, WindowPages, WindowSnapshots


class PromptRoom:
    """The state slots, or the pages of sliding-window layers, that the prompts of one mesh use. A
    prompt is identified by its key (`owner`)."""

    def __init__(self, limits: MeshLimits) -> None:
        self._limits = limits
        self.states = StateSlots(limits)
        count = limits.ranks if limits.window_pages_per_rank else 0
        self.windows = [WindowPages(limits) for _ in range(count)]
        self.on = self.states.on or count > 0  # otherwise there is always room

    def needed(self, tokens: int) -> int:
        return self.windows[0].needed(tokens) if self.windows else int(self.states.on)

    def available(self, rank: int) -> int:
        return self.windows[rank].available if self.windows else self.states.free_slots(rank)

    def own(self, rank: int, owner: int) -> int:
        """Returns how many more are available when a prompt releases what it has."""
        return self.windows[rank].own(owner) if self.windows else int(self.states.on)

    def begin_windows(
        self, kept: Residency, rank: int, prompt: Prompt, cached: int, promised: int
    ) -> Table:
        """Assigns a prompt its pages of sliding-window layers. If a prefix of the prompt is cached,
        the first of these pages hold the window before its end. Records at which positions the
        prompt's window will be cached."""
        owner, chain, tokens = prompt.key, prompt.chain, prompt.tokens
        wanted = kept.wanted_snapshots(rank, chain, tokens, cached)
        window = kept.use_snapshot(rank, chain, cached) if cached else ()
        table = self.windows[rank].begin(owner, tokens, cached, window, wanted, promised)
        for at in wanted:
            kept.begin_snapshot(rank, owner, at)
        if chain:
            kept.begin_all_snapshots(rank, owner, cached, tokens)
        return table

    def place(self, kind: KvKind, rank: int, owner: int, tokens: int) -> Table:
        """Returns the pages of windows after `tokens` tokens, or as its only element the slot of
        recurrent state."""
        if kind is KvKind.WINDOW and self.windows:
            return self.windows[rank].table(owner)
        slot = self.states.slot(rank, owner)
        return (slot,) if kind is KvKind.STATE else self._limits.ring(slot, tokens)

    def free(self, rank: int, owner: int) -> None:
        if self.windows:
            self.windows[rank].free(owner)
        else:
            self.states.free(rank, owner)


def snapshots_of(limits: MeshLimits, windows: Sequence[WindowPages] = ()) -> Sequence[Snapshots]:
    if windows and limits.snapshot_tokens:
        return [WindowSnapshots(pages) for pages in windows]
    if not limits.snapshots_per_rank:
        return []
    slots = limits.state_slots_per_rank, limits.snapshots_per_rank
    return [Snapshots(*slots) for _ in range(limits.ranks)]


class StateSlots:
    def __init__(self, limits: MeshLimits) -> None:
        self._ledgers = [PageLedger(limits.state_slots_per_rank) for _ in range(limits.ranks)]
        self.by_rank = (limits.state_slots_per_rank,) * limits.ranks
        self.on = limits.has_slots

    def free_slots(self, rank: int) -> int:
        return self._ledgers[rank].free_pages

    def free_by_rank(self) -> tuple[int, ...]:
        if not self.on:
            return self.by_rank
        return tuple([ledger.free_pages for ledger in self._ledgers])

    def take(self, rank: int, owner: int) -> None:
        """Assigns a slot to an owner. The caller must have checked that a slot is free."""
        if self.on:
            taken = self._ledgers[rank].reserve(owner, 1)
            assert taken is not None, "room was checked"

    def share(self, rank: int, owner: int, new_owner: int) -> None:
        if self.on:
            self._ledgers[rank].share(owner, new_owner, 1)

    def free(self, rank: int, owner: int) -> None:
        if self.on:
            self._ledgers[rank].free(owner)

    def slot(self, rank: int, owner: int) -> int:
        return self._ledgers[rank].pages(owner)[0] if self.on else 0


class AdapterTable:
    """Which LoRA adapter is loaded in which adapter slot of a mesh. Slots count from 1; slot 0 is
    the base model. A loaded adapter stays until another adapter needs its slot. Then the least
    recently used adapter that no sequence uses is evicted."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.evictions = 0
        self._loaded: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._loading: dict[str, int] = {}
        self._free = list(range(slots, 0, -1))

    @property
    def loaded(self) -> tuple[str, ...]:
        return tuple(self._loaded)

    def __contains__(self, digest: str) -> bool:
        return digest in self._loaded

    def slot_of(self, request: Request) -> int:
        """Returns 0 if the request has no adapter."""
        return 0 if request.adapter is None else self._loaded[request.adapter.digest]

    def use(self, digest: str) -> None:
        self._loaded.move_to_end(digest)

    def take(self, digest: str, used: Collection[str]) -> int | None:
        """Assigns a slot to an adapter that is about to be loaded. Evicts another adapter if no
        slot is free.

        Returns:
            The slot, or None if every slot is used.
        """
        if not self._free:
            victim = next((one for one in self._loaded if one not in used), None)
            if victim is None:
                return None
            self._free.append(self._loaded.pop(victim))
            self.evictions += 1
        self._loading[digest] = slot = self._free.pop()
        return slot

    def load_ended(self, digest: str, loaded: bool) -> None:
        """If the adapter was not `loaded`, the slot is free again."""
        slot = self._loading.pop(digest)
        if loaded:
            self._loaded[digest] = slot
        else:
            self._free.append(slot)

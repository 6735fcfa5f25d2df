"""Tracks which LoRA adapter is loaded in which adapter slot of a mesh. Does no I/O.

Slots count from 1; slot 0 is the base model. A loaded adapter stays until another adapter needs its
slot. Then the least recently used adapter that no sequence uses is evicted.

Invariants (tests/scheduler/test_adapter_table.py): a slot holds one adapter; an adapter that a
sequence uses keeps its slot."""

from collections import OrderedDict
from collections.abc import Collection

from jdisagg.request import Request


class AdapterTable:
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

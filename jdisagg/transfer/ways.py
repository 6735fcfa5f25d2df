"""By which of its memories the KV of each sender process comes here: what both have in common, and
what has not failed before.

Nothing is sent or read here. Who keeps it guards it by a lock."""

import logging

from jdisagg.layout.mesh_card import KvEnd
from jdisagg.transfer.device_memory import DeviceSender
from jdisagg.transfer.memories import Memories
from jdisagg.transfer.nixl_memory import NixlSender
from jdisagg.transfer.shared_memory import SenderMemory, reachable

ReadMemory = NixlSender | DeviceSender  # it is read here, once its sender said where
MappedOrRead = SenderMemory | ReadMemory

_log = logging.getLogger(__name__)
_NAMES: dict[type, str] = {
    DeviceSender: "CUDA memory",
    SenderMemory: "shared memory",
    NixlSender: "NIXL",
    type(None): "transfer engine",
}
_READ = (NixlSender, DeviceSender)


class Ways:
    """`own`: what this process has."""

    def __init__(self, own: Memories) -> None:
        self._own = own
        self._proven: set[tuple[KvEnd, type]] = set()
        self._failed: dict[tuple[KvEnd, type], str] = {}

    def memory_of(self, end: KvEnd) -> MappedOrRead | None:
        """What of its memory can be had here; None: its KV comes through the engine."""
        own = self._own
        nixl = own.nixl if end.nixl and (end, NixlSender) not in self._failed else None
        if nixl is not None and nixl.first:
            return NixlSender(nixl)
        lent = own.device if (end, DeviceSender) not in self._failed else None
        if lent is not None and end.device == lent.host:
            return DeviceSender(lent)
        if end.memory and own.shared is not None and reachable(end.memory):
            return SenderMemory(end.memory)
        return NixlSender(nixl) if nixl is not None else None

    def said(self, end: KvEnd, memory: MappedOrRead | None) -> str:
        """Of a connection: also why its KV does not come from device to device, where that could
        be expected."""
        own, why = self._own, self._failed.get((end, DeviceSender), "")
        if isinstance(memory, SenderMemory) and not why:
            if own.no_device:
                why = own.no_device
            elif own.device is not None and not end.device:
                why = "the sender lends none"
        way = _NAMES[type(memory)]
        return f"{end.control} {way}, no CUDA memory: {why}" if why else f"{end.control} {way}"

    def proved(self, end: KvEnd, memory: MappedOrRead | None) -> None:
        """Something came from there so."""
        if isinstance(memory, _READ):
            self._proven.add((end, type(memory)))

    def is_proven(self, end: KvEnd, memory: ReadMemory) -> bool:
        return (end, type(memory)) in self._proven

    def failed(self, end: KvEnd, memory: ReadMemory, why: str) -> None:
        """Something could not be read from there; where nothing ever could, the next comes another
        way."""
        way = end, type(memory)
        if way not in self._proven:
            self._failed[way] = why
            _log.warning(
                "KV from %s cannot be read by %s, and comes another way from now on: %s",
                end.control,
                _NAMES[type(memory)],
                why,
            )

    def forget(self, end: KvEnd) -> None:
        """It was disconnected; who has its name again is tried anew."""
        for way in _READ:
            self._proven.discard((end, way))
            self._failed.pop((end, way), None)

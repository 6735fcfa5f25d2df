"""Records which blocks a mesh cached and evicted. Routers use this log to keep an index of cached
blocks.

A block counts as cached while at least one rank or tier has it. A router passes its position in the
log (`KeptMark` in `messages/kept_blocks.py`) and gets the events after that position. If the log no
longer has these events, or if there are more events than blocks, the router gets a list of all
blocks instead. Does no I/O."""

from collections import deque
from itertools import islice

from jdisagg.messages.kept_blocks import TOLD_BYTES, KeptMark, KeptNews

EVENTS_ON_RECORD = 1 << 15
MOST_EVENTS = 1 << 14  # limit of one message
# Limit of a snapshot. It lists the oldest blocks, because sequences start with them.
MOST_BLOCKS = 1 << 16


class KeptLog:
    def __init__(self, events_on_record: int = EVENTS_ON_RECORD) -> None:
        self.epoch = 1
        self.number = 0  # number of the last event
        self._events: deque[tuple[bytes, bool]] = deque(maxlen=events_on_record)
        self._ranks: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, name: bytes) -> bool:
        return name[:TOLD_BYTES] in self._ranks

    def gained(self, name: bytes) -> None:
        told = name[:TOLD_BYTES]
        ranks = self._ranks.get(told, 0)
        self._ranks[told] = ranks + 1
        if not ranks:
            self._record(told, True)

    def lost(self, name: bytes) -> None:
        told = name[:TOLD_BYTES]
        ranks = self._ranks[told] - 1
        if ranks:
            self._ranks[told] = ranks
        else:
            del self._ranks[told]
            self._record(told, False)

    def cleared(self) -> None:
        self.epoch += 1
        self.number = 0
        self._events.clear()
        self._ranks.clear()

    def news(self, worker: str, mark: KeptMark) -> KeptNews | None:
        if mark == KeptMark(self.epoch, self.number) or (not self.number and mark == KeptMark()):
            return None
        missed = self.number - mark.number
        on_record = mark.epoch == self.epoch and 0 < missed <= len(self._events)
        if not on_record or missed > MOST_EVENTS + len(self._ranks):
            names = b"".join(islice(self._ranks, MOST_BLOCKS))
            return KeptNews(worker, self.epoch, self.number, names, whole=True)
        first = len(self._events) - missed
        events = list(islice(self._events, first, first + MOST_EVENTS))
        return KeptNews(
            worker,
            self.epoch,
            mark.number,
            b"".join([name for name, _ in events]),
            bytes([added for _, added in events]),
        )

    def _record(self, told: bytes, added: bool) -> None:
        self.number += 1
        self._events.append((told, added))

"""Records which blocks a mesh cached and evicted. Routers use this log to keep an index of cached
blocks.

A block counts as cached while at least one rank or tier has it. A router passes its position in the
log (`KeptMark` in `messages/kept_blocks.py`) and gets the events after that position. If the log no
longer has these events, or if there are more events than blocks, the router gets a list of all
blocks instead.

`KeptEvents` does the same for routers of other projects, in the event format that vLLM and SGLang
share, by data-parallel rank and for pages alone. An event has a block's tokens, because other
routers compute hashes of their own. Does no I/O."""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import islice

import msgspec

from jdisagg.messages.kept_blocks import TOLD_BYTES, KeptMark, KeptNews

EVENTS_ON_RECORD = 1 << 15
MOST_EVENTS = 1 << 14  # limit of one message
# Limit of a snapshot. It lists the oldest blocks, because sequences start with them.
MOST_BLOCKS = 1 << 16
# Blocks whose tokens are remembered: more than any mesh computes at a time.
REMEMBERED_BLOCKS = 1 << 16
MEDIUM = "GPU"  # the format's word for device memory of every kind
HASH_BYTES = 8


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


class BlockStored(msgspec.Struct, tag=True, array_like=True):
    """Consecutive blocks of one sequence that were added to the cache.

    Attributes:
        block_hashes: The first bytes of each block's hash, as an integer.
        parent_block_hash: Hash of the block before the first one, or None if the first one starts
            its sequence.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM


class BlockRemoved(msgspec.Struct, tag=True, array_like=True):
    block_hashes: list[int]
    medium: str | None = MEDIUM


class AllBlocksCleared(msgspec.Struct, tag=True, array_like=True):
    pass


KeptEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True):
    """Events of one data-parallel rank, in order. `ts` is in seconds since 1970."""

    ts: float
    events: list[KeptEvent]
    data_parallel_rank: int | None = None


class KeptEvents:
    """Collects the events of one mesh."""

    def __init__(self, ranks: int, block_tokens: int, pending: Callable[[], None]) -> None:
        self._block_tokens = block_tokens
        self._pending = pending
        self._events: list[list[KeptEvent]] = [[] for _ in range(ranks)]
        self._tokens: OrderedDict[bytes, tuple[bytes | None, list[int]]] = OrderedDict()

    def named(self, chain: Sequence[bytes], first: int, tokens: Sequence[int]) -> None:
        """Stores the tokens of the blocks of `chain` from index `first` on. `tokens` are the tokens
        of the whole sequence, from the first block of `chain` on."""
        size = self._block_tokens
        for index in range(first, len(chain)):
            parent = chain[index - 1] if index else None
            self._tokens[chain[index]] = parent, list(tokens[index * size : (index + 1) * size])
            self._tokens.move_to_end(chain[index])
        while len(self._tokens) > REMEMBERED_BLOCKS:
            self._tokens.popitem(last=False)

    def changed(self, rank: int, name: bytes, added: bool) -> None:
        if added:
            self._stored(rank, name)
        else:
            last = self._events[rank][-1] if self._events[rank] else None
            if isinstance(last, BlockRemoved):
                last.block_hashes.append(_hash(name))
            else:
                self._add(rank, BlockRemoved([_hash(name)]))

    def _stored(self, rank: int, name: bytes) -> None:
        found = self._tokens.get(name)
        if found is None:
            return  # its tokens were forgotten
        parent, tokens = found
        last = self._events[rank][-1] if self._events[rank] else None
        before = None if parent is None else _hash(parent)
        if isinstance(last, BlockStored) and last.block_hashes[-1] == before:
            last.block_hashes.append(_hash(name))
            last.token_ids += tokens
            return
        self._add(rank, BlockStored([_hash(name)], before, [*tokens], self._block_tokens))

    def cleared(self) -> None:
        """Replaces the pending events of each rank by a single event: the rank's cache is empty."""
        for rank in range(len(self._events)):
            self._events[rank] = []
            self._add(rank, AllBlocksCleared())

    def take(self, now: float) -> list[KVEventBatch]:
        """Returns the pending events of each rank that has any. They are then no longer pending."""
        taken = [
            KVEventBatch(now, events, rank) for rank, events in enumerate(self._events) if events
        ]
        self._events = [[] for _ in self._events]
        return taken

    def _add(self, rank: int, event: KeptEvent) -> None:
        empty = not any(self._events)
        self._events[rank].append(event)
        if empty:
            self._pending()


def _hash(name: bytes) -> int:
    return int.from_bytes(name[:HASH_BYTES], "big")

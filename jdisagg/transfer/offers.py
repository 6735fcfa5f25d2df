"""The blocks that a channel offers, by offer id. Records how each offer ended (released or
revoked): a pull of an ended offer fails with this record as its error text, and no id is offered
twice. Keeps the records of the latest REMEMBERED_IDS ids."""

import threading
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from jdisagg.errors import HandoffError
from jdisagg.transfer.channel import Offered

REMEMBERED_IDS = 65536


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Block = TypeVar("Block", bound=_Sized)


class Offers(Generic[Block]):
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[int, Block] = {}
        self._ended: OrderedDict[int, str] = OrderedDict()

    def add(self, offer_id: int, block: Block) -> bool:
        """Returns whether the block is offered now. Returns False if the id was revoked before.
        Raises HandoffError if the id is in use or was used before."""
        with self._lock:
            how = "is live already" if offer_id in self._live else self._ended.get(offer_id)
            if how is None:
                self._live[offer_id] = block
            elif not how.startswith("was revoked"):
                raise HandoffError(
                    f"offer {offer_id:#x} {how}; draw a fresh random id for each offer"
                )
            return how is None

    def get(self, offer_id: int) -> Block | None:
        """Returns None for a block that is not offered yet. Raises HandoffError for an ended
        offer."""
        with self._lock:
            if how := self._ended.get(offer_id):
                raise HandoffError(f"offer {offer_id:#x} {how}")
            return self._live.get(offer_id)

    def release(self, offer_id: int) -> None:
        with self._lock:
            if self._live.pop(offer_id, None) is not None:
                self._end(offer_id, "was released")

    def revoke(self, offer_id: int, reason: str) -> Block | None:
        """Ends an offer, even before it is made. Does not change an ended offer. Returns the block
        that was offered."""
        with self._lock:
            if offer_id not in self._ended:
                self._end(offer_id, f"was revoked: {reason}")
            return self._live.pop(offer_id, None)

    def offered(self) -> Offered:
        with self._lock:
            return Offered(len(self._live), sum(block.nbytes for block in self._live.values()))

    def clear(self) -> None:
        with self._lock:
            self._live.clear()

    def _end(self, offer_id: int, how: str) -> None:
        self._ended[offer_id] = how
        while len(self._ended) > REMEMBERED_IDS:
            self._ended.popitem(last=False)

"""Records, by offer id, how each offer ended (released or revoked). A pull of an ended offer fails
with this record as its error text. The records also prevent that an id is offered twice.

Keeps the latest REMEMBERED_IDS ids. Not thread-safe: the channel's lock guards it."""

from collections import OrderedDict
from collections.abc import Container

from jdisagg.errors import HandoffError

REMEMBERED_IDS = 65536


class EndedOffers:
    def __init__(self) -> None:
        self._how: OrderedDict[int, str] = OrderedDict()

    def __contains__(self, offer_id: int) -> bool:
        return offer_id in self._how

    def how(self, offer_id: int) -> str | None:
        """Returns how the offer ended: "released", or "revoked: " and the reason."""
        return self._how.get(offer_id)

    def admits(self, offer_id: int, live: Container[int]) -> bool:
        """Returns whether a block may be offered under this id. Returns False if the id was revoked
        before the offer was made. Raises HandoffError if the id is in use or was used before."""
        if offer_id in live:
            raise HandoffError(
                f"offer {offer_id:#x} is live already; draw a fresh random id for each offer"
            )
        how = self._how.get(offer_id, "")
        if how and not how.startswith("revoked"):
            raise HandoffError(
                f"offer {offer_id:#x} was {how}; ids are used once: draw a fresh one"
            )
        return not how

    def released(self, offer_id: int) -> None:
        self._note(offer_id, "released")

    def revoked(self, offer_id: int, reason: str) -> None:
        """Records a revocation, even before the offer is made. Does not change an ended offer."""
        if offer_id not in self._how:
            self._note(offer_id, f"revoked: {reason}")

    def _note(self, offer_id: int, how: str) -> None:
        self._how[offer_id] = how
        while len(self._how) > REMEMBERED_IDS:
            self._how.popitem(last=False)

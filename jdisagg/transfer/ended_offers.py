"""What became of offers that are no longer held, by id: that a late pull is told, and that no id is
offered twice.

A bounded memory: beyond REMEMBERED_IDS the oldest are forgotten. Not thread-safe: its channel's
lock is around it."""

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
        """ "released", "revoked: " and the reason, or None for an id that is not known here."""
        return self._how.get(offer_id)

    def admits(self, offer_id: int, live: Container[int]) -> bool:
        """Whether a block may be offered under this id; False where it was revoked before it was
        made. Raises HandoffError for an id in use or used before."""
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
        """Also of an offer that was not made yet; of one that has ended it changes nothing."""
        if offer_id not in self._how:
            self._note(offer_id, f"revoked: {reason}")

    def _note(self, offer_id: int, how: str) -> None:
        self._how[offer_id] = how
        while len(self._how) > REMEMBERED_IDS:
            self._how.popitem(last=False)

"""Which attempt of each child of a request was seen last, so that a late zombie is ignored (rule 7 of the design).

Knows numbers only. Entries are forgotten some time after they were last seen: a zombie older than that has no lease left.
"""

from collections import OrderedDict
from collections.abc import Iterable

from jdisagg.errors import HandoffError
from jdisagg.request import Identity, Request


class Attempts:
    """The highest attempt seen per (request, child)."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[Identity, int], tuple[int, float]] = OrderedDict()  # seen longest ago first

    def take(self, request: Request, children: Iterable[int], attempt: int, now: float) -> None:
        """Notes an attempt; raises HandoffError when a later one was seen."""
        keys = [(request.identity, child) for child in children]
        for key in keys:
            latest, _ = self._seen.get(key, (attempt, now))
            if attempt < latest:
                raise HandoffError(
                    f"request {request.request_id!r}, child {key[1]}: attempt {attempt} comes after attempt {latest}; it is ignored"
                )
        for key in keys:
            self._seen[key] = (attempt, now)
            self._seen.move_to_end(key)

    def forget_before(self, instant: float) -> None:
        while self._seen and next(iter(self._seen.values()))[1] < instant:
            self._seen.popitem(last=False)

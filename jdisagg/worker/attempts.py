"""Which attempt of each child of a request was seen last, so that a late zombie is ignored (rule 7 of the design).

Knows numbers only. Entries are forgotten some time after they were last seen: a zombie older than that has no lease left.
"""

from collections.abc import Iterable

from jdisagg.errors import HandoffError
from jdisagg.request import Request


class Attempts:
    """The highest attempt seen per (request, child)."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str, int], tuple[int, float]] = {}

    def take(self, request: Request, children: Iterable[int], attempt: int, now: float) -> None:
        """Notes an attempt; raises HandoffError when a later one was seen."""
        keys = [(request.tenant, request.request_id, child) for child in children]
        for key in keys:
            latest, _ = self._seen.get(key, (attempt, now))
            if attempt < latest:
                raise HandoffError(f"request {key[1]!r}, child {key[2]}: attempt {attempt} comes after attempt {latest}; it is ignored")
        self._seen.update((key, (attempt, now)) for key in keys)

    def forget_before(self, instant: float) -> None:
        self._seen = {key: entry for key, entry in self._seen.items() if entry[1] >= instant}

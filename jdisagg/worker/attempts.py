"""Which attempt of each child of a request was seen last, so that a late zombie is ignored (rule 7 of the design).

Knows numbers only. Entries are forgotten some time after they were last seen: a zombie older than that has no lease left.
"""

from collections.abc import Iterable

from jdisagg.errors import HandoffError


class Attempts:
    """The highest attempt seen per (request, child)."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], tuple[int, float]] = {}

    def take(self, request_id: str, children: Iterable[int], attempt: int, now: float) -> None:
        """Notes an attempt; raises HandoffError when a later one was seen."""
        children = tuple(children)
        for child in children:
            latest, _ = self._seen.get((request_id, child), (attempt, now))
            if attempt < latest:
                raise HandoffError(f"request {request_id!r}, child {child}: attempt {attempt} comes after attempt {latest}; it is ignored")
        for child in children:
            self._seen[request_id, child] = (attempt, now)

    def forget_before(self, instant: float) -> None:
        self._seen = {key: entry for key, entry in self._seen.items() if entry[1] >= instant}

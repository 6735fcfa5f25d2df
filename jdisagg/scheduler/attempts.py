"""The latest attempt number of each (request, child), so that calls of earlier attempts can be
refused. An entry expires when no earlier attempt can hold a lease any more."""

from collections import OrderedDict
from collections.abc import Iterable

from jdisagg.errors import HandoffError
from jdisagg.messages.ports import Child
from jdisagg.request import Identity, Request


class Attempts:
    def __init__(self) -> None:
        # least recently seen first
        self._seen: OrderedDict[tuple[Identity, int], tuple[int, float]] = OrderedDict()

    def take(self, request: Request, children: Iterable[Child], attempt: int, now: float) -> None:
        """Records an attempt. Raises HandoffError if a later attempt was recorded."""
        keys = [(request.identity, child.index) for child in children]
        for key in keys:
            latest, _ = self._seen.get(key, (attempt, now))
            if attempt < latest:
                raise HandoffError(
                    f"request {request.request_id!r}, child {key[1]}: attempt {attempt} comes after"
                    f" attempt {latest}; it is ignored"
                )
        for key in keys:
            self._seen[key] = (attempt, now)
            self._seen.move_to_end(key)

    def forget_before(self, instant: float) -> None:
        while self._seen and next(iter(self._seen.values()))[1] < instant:
            self._seen.popitem(last=False)

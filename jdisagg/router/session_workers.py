"""Remembers which workers served the last turn of each session, so that the next turn can prefer
them. The prefix index knows only what workers have reported; a session's next turn may come before
the report, or find its KV in a tier that is not in the index."""

from collections import OrderedDict

from jdisagg.request import Request

MOST_SESSIONS = 1 << 16

NOBODY: frozenset[str] = frozenset()


class SessionWorkers:
    """The workers of the latest turns. A session belongs to its tenant and cache scope: equal keys
    of two tenants are two sessions."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._workers: OrderedDict[tuple[str, str, str], frozenset[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def of(self, request: Request) -> frozenset[str]:
        if request.hints is None or not request.hints.session:
            return NOBODY
        return self._workers.get(_key(request, request.hints.session), NOBODY)

    def placed(self, request: Request, workers: frozenset[str]) -> None:
        if request.hints is None or not request.hints.session:
            return
        key = _key(request, request.hints.session)
        self._workers[key] = workers
        self._workers.move_to_end(key)
        if len(self._workers) > self._most:
            self._workers.popitem(last=False)


def _key(request: Request, session: str) -> tuple[str, str, str]:
    return request.tenant, request.cache_scope, session

"""What workers have cached and have not reported yet.

Workers report cached blocks with their heartbeats, so `known_blocks.py` lacks the blocks of a
prompt until it was computed and reported. A prompt that arrives in the meantime with the same
prefix should go to the same worker, if the worker's queue is not too long. It then waits there for
the common blocks (`scheduler/prompts.py`). A session's next turn may come before the report,
too, or find its KV in a tier that is not reported. Does no I/O."""

from collections import OrderedDict, deque
from collections.abc import Sequence

from jdisagg.request import Request
from jdisagg.router.decision import PromptBlocks

LINGER_SECONDS = 3.0


class ComingPrefixes:
    """The prefixes that workers will have cached when they have computed the prompts in progress.
    An entry ends when its attempt ends, or `LINGER_SECONDS` after the first token, when the worker
    has reported the blocks."""

    def __init__(self) -> None:
        self._workers: dict[int, dict[str, int]] = {}  # number of prompts by block and worker
        self._prompts: dict[int, tuple[str, Sequence[int]]] = {}
        self._computed: deque[tuple[float, int]] = deque()  # end of the entry, key
        self._last_key = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def placed(self, prompt: PromptBlocks, worker: str) -> int:
        self._last_key += 1
        self._prompts[self._last_key] = worker, prompt.names
        for name in prompt.names:
            counts = self._workers.setdefault(name, {})
            counts[worker] = counts.get(worker, 0) + 1
        return self._last_key

    def computed(self, key: int, now: float) -> None:
        if key in self._prompts:
            self._computed.append((now + LINGER_SECONDS, key))

    def ended(self, key: int) -> None:
        """Removes an entry. Idempotent."""
        worker, chain = self._prompts.pop(key, ("", ()))
        for name in chain:
            counts = self._workers[name]
            counts[worker] -= 1
            if not counts[worker]:
                del counts[worker]
                if not counts:
                    del self._workers[name]

    def known(self, prompt: PromptBlocks, now: float) -> dict[str, int]:
        while self._computed and self._computed[0][0] <= now:
            self.ended(self._computed.popleft()[1])
        found: dict[str, int] = {}
        still: set[str] | None = None
        for count, name in enumerate(prompt.names, 1):
            here = self._workers.get(name, {}).keys()
            still = set(here) if still is None else still & here
            if not still:
                break
            found.update(dict.fromkeys(still, count * prompt.block_tokens))
        return found


MOST_SESSIONS = 1 << 16

NOBODY: frozenset[str] = frozenset()


class SessionWorkers:
    """The workers of the latest turn of each session, so that the next turn can prefer them. A
    session belongs to its tenant and cache scope: equal keys
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

"""Tracks which prefixes workers will have cached when they have computed the prompts in progress.

Workers report cached blocks with their heartbeats, so `known_blocks.py` lacks the blocks of a
prompt until it was computed and reported. A prompt that arrives in the meantime with the same
prefix should go to the same worker, if the worker's queue is not too long. It then waits there for
the common blocks (`scheduler/shared_prompts.py`). An entry ends when its attempt ends, or
`LINGER_SECONDS` after the first token, when the worker has reported the blocks. Does no I/O."""

from collections import deque
from collections.abc import Sequence

from jdisagg.router.decision import PromptBlocks

LINGER_SECONDS = 3.0


class ComingPrefixes:
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

"""Sums up the prefill work that a mesh has accepted and not computed yet.

`tokens` is the number of uncomputed positions. `pairs` is the number of (query, key) pairs of
causal attention whose query is an uncomputed position. `pairs` estimates the cost of attention;
sliding windows are ignored. Invariant: both sums are zero when no work is left."""

from collections import Counter


def causal_pairs(start: int, end: int) -> float:
    """Returns the number of (query, key) pairs of causal attention for the queries at positions
    [start, end)."""
    return (end - start) * start + (end - start) * (end - start + 1) / 2


class Backlog:
    """Sums of uncomputed tokens and attention pairs over the prompts of one mesh."""

    def __init__(self) -> None:
        self.tokens = 0
        self.pairs = 0.0
        self._prompts: dict[int, tuple[int, int]] = {}
        self._priorities: dict[int, int] = {}

    def add(self, key: int, tokens: int, cached_tokens: int = 0, priority: int = 0) -> None:
        """Adds or replaces a prompt. Its first `cached_tokens` tokens need no computing."""
        self.forget(key)
        self._prompts[key], self._priorities[key] = (cached_tokens, tokens), priority
        self._count(cached_tokens, tokens, 1)

    def by_priority(self) -> dict[int, int]:
        """Returns the number of uncomputed tokens by priority."""
        tokens: Counter[int] = Counter()
        for key, (start, end) in self._prompts.items():
            tokens[self._priorities[key]] += end - start
        return tokens

    def computed(self, key: int, tokens: int) -> None:
        """Records that a prompt's next `tokens` tokens were computed. Ignores unknown keys."""
        known = self._prompts.get(key)
        if known is None:
            return
        start, end = known
        until = min(end, start + tokens)
        self._count(start, until, -1)
        if until == end:
            del self._prompts[key], self._priorities[key]
        else:
            self._prompts[key] = (until, end)

    def forget(self, key: int) -> None:
        """Removes a prompt and its uncomputed rest. Idempotent."""
        known = self._prompts.pop(key, None)
        self._priorities.pop(key, None)
        if known is not None:
            self._count(*known, -1)

    def _count(self, start: int, end: int, sign: int) -> None:
        self.tokens += sign * (end - start)
        self.pairs += sign * causal_pairs(start, end)

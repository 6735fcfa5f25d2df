"""Sums up the prefill work that a mesh has accepted but not computed yet.

`tokens` is the number of uncomputed positions. `pairs` estimates the cost of their attention: it is
the number of (query, key) pairs of causal attention in which the query is uncomputed. Invariant:
both sums are zero when no work is left."""


def causal_pairs(start: int, end: int) -> float:
    return (end - start) * start + (end - start) * (end - start + 1) / 2


class Backlog:
    def __init__(self) -> None:
        self.tokens = 0
        self.pairs = 0.0
        # first uncomputed position, end of the prompt, and priority
        self._prompts: dict[int, tuple[int, int, int]] = {}

    def add(self, key: int, tokens: int, cached_tokens: int = 0, priority: int = 0) -> None:
        self.forget(key)
        self._prompts[key] = cached_tokens, tokens, priority
        self._count(cached_tokens, tokens, 1)

    def by_priority(self) -> dict[int, int]:
        tokens: dict[int, int] = {}
        for start, end, priority in self._prompts.values():
            tokens[priority] = tokens.get(priority, 0) + end - start
        return tokens

    def computed(self, key: int, tokens: int) -> None:
        known = self._prompts.get(key)
        if known is None:
            return
        start, end, priority = known
        until = min(end, start + tokens)
        self._count(start, until, -1)
        if until == end:
            del self._prompts[key]
        else:
            self._prompts[key] = until, end, priority

    def forget(self, key: int) -> None:
        known = self._prompts.pop(key, None)
        if known is not None:
            start, end, _ = known
            self._count(start, end, -1)

    def _count(self, start: int, end: int, sign: int) -> None:
        self.tokens += sign * (end - start)
        self.pairs += sign * causal_pairs(start, end)

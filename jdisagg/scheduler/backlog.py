"""What a mesh still has to compute of the prompts that it took: two sums, kept up to date so that
telling them costs nothing.

`tokens` are positions not computed yet; `pairs` the pairs of positions that these attend to, each
token with itself and all before it (what attention costs; a sliding window is the reader's affair).
Knows keys and sizes alone. Invariant: both sums are zero when nothing is left."""


def causal_pairs(start: int, end: int) -> float:
    """Pairs of positions [start, end) with themselves and all before them."""
    return (end - start) * start + (end - start) * (end - start + 1) / 2


class Backlog:
    """Prompts by key, each computed from its beginning on."""

    def __init__(self) -> None:
        self.tokens = 0
        self.pairs = 0.0
        self._prompts: dict[int, tuple[int, int]] = {}

    def add(self, key: int, tokens: int, cached_tokens: int = 0) -> None:
        """A prompt of `tokens`, of which the first `cached_tokens` need not be computed, in place
        of what was said of it before."""
        self.forget(key)
        self._prompts[key] = (cached_tokens, tokens)
        self._count(cached_tokens, tokens, 1)

    def computed(self, key: int, tokens: int) -> None:
        """So many more of its tokens are done. What is not known (any more) is passed over."""
        known = self._prompts.get(key)
        if known is None:
            return
        start, end = known
        until = min(end, start + tokens)
        self._count(start, until, -1)
        if until == end:
            del self._prompts[key]
        else:
            self._prompts[key] = (until, end)

    def forget(self, key: int) -> None:
        """Whatever is left of it will not be computed. Idempotent."""
        known = self._prompts.pop(key, None)
        if known is not None:
            self._count(*known, -1)

    def _count(self, start: int, end: int, sign: int) -> None:
        self.tokens += sign * (end - start)
        self.pairs += sign * causal_pairs(start, end)

"""Where the beginning of one prompt was when the prompt came: which of its blocks were brought into
pages for it, and from where.

Written by what brings (`worker/host_tier.py`, `worker/fetched_kv.py`), when it is done, also where
the prompt did not wait so long; read when the prompt has its pages. What was in pages already, or
came there for another prompt, is not on record: it was found in pages. Pure."""

from collections.abc import Iterable
from typing import Literal

from jdisagg.request import CachedTokens

Origin = Literal["host", "disk", "peer"]


class BroughtBlocks:
    """Of one prompt, in blocks of `block_tokens`."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._origins: dict[tuple[int, int], Origin] = {}  # by rank and index in the chain

    def add(self, rank: int, first: int, origins: Iterable[Origin]) -> None:
        """The blocks from the `first` of the chain on came into pages of a rank."""
        for index, origin in enumerate(origins, first):
            self._origins[rank, index] = origin

    def split(self, rank: int, tokens: int) -> CachedTokens:
        """The first `tokens` of the prompt, which are known in pages of a rank now, by where they
        were before."""
        size = self._block_tokens
        found: dict[Origin, int] = {"host": 0, "disk": 0, "peer": 0}
        for (where, index), origin in self._origins.items():
            if where == rank:
                found[origin] += min(size, max(0, tokens - index * size))
        return CachedTokens(pages=tokens - sum(found.values()), **found)

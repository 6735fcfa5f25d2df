"""Which workers know how much of a request's beginning already: the router's index of what they
keep, asked for each placement.

`PrefixAffinity` is fed by whoever sees the workers' trees:

    affinity = PrefixAffinity(lambda request: page_hashes(request.prompt_token_ids, 128,
    request.tenant), page_tokens=128) if not
    affinity.heard("prefill-0", events): affinity.replace("prefill-0", tree.snapshot())

`router/known_blocks.py` is fed by what workers tell. Either may lag behind the workers: a
wrong match costs time and never truth. It knows hashes alone; how a request's are made is given."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from jdisagg.request import Request
from jdisagg.router.prefix_index import ByWorker, PrefixIndex
from jdisagg.scheduler.prefix_tree import PrefixEvent

# Positions that each worker knows now, from the first on; workers that know none are left out.
Known = Callable[[], Mapping[str, int]]


class Affinity(Protocol):
    """What placement asks."""

    def known(self, request: Request) -> Known:
        """To be called as often as need be: the prompt is hashed once."""
        ...


class PrefixAffinity:
    """`hashes_of`: the chain of a request's full pages of `page_tokens`."""

    def __init__(self, hashes_of: Callable[[Request], Sequence[int]], page_tokens: int) -> None:
        self._index = PrefixIndex()
        self._hashes_of = hashes_of
        self._page_tokens = page_tokens

    def known(self, request: Request) -> Known:
        hashes = self._hashes_of(request)
        return lambda: self.matches(hashes)

    def matches(self, hashes: Sequence[int]) -> Mapping[str, int]:
        """As `known` says it, of a chain."""
        return matched_tokens(self._index, hashes, self._page_tokens)

    def heard(self, worker: str, events: Sequence[PrefixEvent]) -> bool:
        """What a worker gained and lost since. False: some are missing; give `replace` all that it
        has."""
        return self._index.apply(worker, events)

    def replace(self, worker: str, snapshot: tuple[int, frozenset[int]]) -> None:
        self._index.replace(worker, snapshot)

    def forget(self, worker: str) -> None:
        """It is gone, or another process took its place."""
        self._index.forget(worker)


def matched_tokens(index: PrefixIndex, hashes: Sequence[int], page_tokens: int) -> ByWorker:
    """Positions of a chain of pages that each worker knows."""
    return index.matches(hashes) * page_tokens

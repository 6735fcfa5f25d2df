"""Which workers know how much of a request's beginning already: the router's index of their pages,
asked for each placement.

    affinity = PrefixAffinity(lambda request: page_hashes(request.prompt_token_ids, 128,
    request.tenant), page_tokens=128) if not
    affinity.heard("prefill-0", events): affinity.replace("prefill-0", tree.snapshot())

The index may lag behind the workers: a wrong match costs time and never truth. It knows hashes
alone; how a request's are made is given."""

from collections.abc import Callable, Mapping, Sequence

from jdisagg.request import Request
from jdisagg.scheduler.prefix_tree import PrefixEvent, PrefixIndex


class PrefixAffinity:
    """`hashes_of`: the chain of a request's full pages of `page_tokens`."""

    def __init__(self, hashes_of: Callable[[Request], Sequence[int]], page_tokens: int) -> None:
        self._index = PrefixIndex()
        self._hashes_of = hashes_of
        self._page_tokens = page_tokens

    def hashes(self, request: Request) -> Sequence[int]:
        """What the request is asked for by, as often as need be: the whole prompt is hashed."""
        return self._hashes_of(request)

    def matches(self, hashes: Sequence[int]) -> Mapping[str, int]:
        """Positions that each worker knows, from the first on; workers that know none are left
        out."""
        return (
            {
                worker: pages * self._page_tokens
                for worker, pages in self._index.matches(hashes).items()
            }
            if hashes
            else {}
        )

    def heard(self, worker: str, events: Sequence[PrefixEvent]) -> bool:
        """What a worker gained and lost since. False: some are missing; give `replace` all that it
        has."""
        return self._index.apply(worker, events)

    def replace(self, worker: str, snapshot: tuple[int, frozenset[int]]) -> None:
        self._index.replace(worker, snapshot)

    def forget(self, worker: str) -> None:
        """It is gone, or another process took its place."""
        self._index.forget(worker)

"""Which blocks of KV the live workers keep, as they tell it (`messages/kept_blocks.py`), for
placement.

A hint: the worker decides what it has when the request comes. News that are missing, doubled or out
of order change nothing that was known; what is returned says how far that is, and the worker goes
on from there or tells all that it keeps. A worker that is gone, or whose name another process
bears, leaves nothing behind. Bounded: what the workers keep beyond `most_blocks`, each counted for
each worker, is not noted.

Workers of one scheme and one size of blocks share an index, the same as of simulated ones. Pure; on
one event loop."""

from collections.abc import Callable, Mapping, Sequence

from jdisagg.errors import InvalidRequestError
from jdisagg.messages.kept_blocks import TOLD_BYTES, KeptMark, KeptNews, KeptScheme, PrefixEvent
from jdisagg.request import Request
from jdisagg.router.decision import Known
from jdisagg.router.prefix_index import ByWorker, Numbering, PrefixIndex
from jdisagg.scheduler.residency import BlockNames

# some 300 bytes each (benchmarks/LOG.md): half a gigabyte
MOST_BLOCKS = 1 << 21


class KnownBlocks:
    """`secret`: keys the names of blocks (`BlockNames`); with another than the workers' no block is
    ever found. `names`: how blocks are named under a secret, for a model and a grain."""

    def __init__(
        self,
        secret: bytes,
        most_blocks: int = MOST_BLOCKS,
        names: Callable[[bytes, str, int], BlockNames] = BlockNames,
    ) -> None:
        self._secret = secret
        self._names = names
        self._most_blocks = most_blocks
        self._schemes: dict[str, KeptScheme] = {}
        self._epochs: dict[str, int] = {}
        self._indices: dict[KeptScheme, PrefixIndex] = {}
        self._numbering = Numbering()

    def __len__(self) -> int:
        """Blocks known of anyone."""
        return sum([len(index) for index in self._indices.values()])

    def blocks(self, worker: str) -> int:
        """How many a worker is known to keep."""
        scheme = self._schemes.get(worker)
        return self._indices[scheme].pages(worker) if scheme else 0

    def joined(self, worker: str, scheme: KeptScheme | None) -> None:
        """A worker came, of which nothing is known. `scheme` None: it keeps nothing."""
        self.forget(worker)
        if scheme is not None:
            _check(worker, scheme)
            self._schemes[worker] = scheme
            self._indices.setdefault(scheme, PrefixIndex(self._most_blocks, self._numbering))

    def forget(self, worker: str) -> None:
        """It is gone. Idempotent."""
        scheme = self._schemes.pop(worker, None)
        self._epochs.pop(worker, None)
        if scheme is not None:
            self._indices[scheme].forget(worker)
            if scheme not in self._schemes.values():
                del self._indices[scheme]

    def told(self, news: KeptNews) -> KeptMark:
        """Takes what a worker tells, as far as it follows on what is known of it; returns how far
        that is now. Raises InvalidRequestError for what are no news."""
        names = _hashes(news)
        worker, scheme = news.worker, self._schemes.get(news.worker)
        if scheme is None:
            return KeptMark()
        index, epoch = self._indices[scheme], self._epochs.get(worker, 0)
        if news.whole:
            if (news.epoch, news.number) >= (epoch, index.last(worker)):
                index.replace(worker, (news.number, frozenset(names)))
                self._epochs[worker] = news.epoch
        elif news.epoch >= epoch and (news.epoch == epoch or not news.number):
            if news.epoch != epoch:
                index.replace(worker, (0, frozenset()))
                self._epochs[worker] = news.epoch
            numbered = zip(names, news.added, strict=True)
            index.apply(
                worker,
                [
                    PrefixEvent(number, name, bool(added))
                    for number, (name, added) in enumerate(numbered, news.number + 1)
                ],
            )
        return KeptMark(self._epochs.get(worker, 0), index.last(worker))

    def known(self, request: Request) -> Known:
        chains: dict[tuple[str, int], Sequence[int]] = {}

        def now() -> Mapping[str, int]:
            found: ByWorker | None = None
            for scheme, index in self._indices.items():
                if not len(index):
                    continue
                named = scheme.model, scheme.grain_tokens
                if named not in chains:
                    chains[named] = self._chain(request, *named)
                every = scheme.block_tokens // scheme.grain_tokens
                these = index.matches(chains[named][every - 1 :: every]) * scheme.block_tokens
                # a worker is in one index, and all number them alike
                found = found + these if found else these
            return found if found is not None else {}

        return now

    def _chain(self, request: Request, model: str, grain_tokens: int) -> Sequence[int]:
        names = self._names(self._secret, model, grain_tokens)
        chain = names.chain(request, request.prompt_token_ids, grain_tokens)
        return [int.from_bytes(name[:TOLD_BYTES], "little") for name in chain]


def _hashes(news: KeptNews) -> list[int]:
    names = news.names
    count, rest = divmod(len(names), TOLD_BYTES)
    if rest or (not news.whole and len(news.added) != count) or news.epoch < 1 or news.number < 0:
        raise InvalidRequestError(
            f"worker {news.worker!r} tells {len(names)} bytes of names and {len(news.added)} marks"
            f" in epoch {news.epoch} from {news.number} on: names have {TOLD_BYTES} bytes and a"
            " mark each; do both ends run the same version?"
        )
    return [
        int.from_bytes(names[at : at + TOLD_BYTES], "little")
        for at in range(0, len(names), TOLD_BYTES)
    ]


def _check(worker: str, scheme: KeptScheme) -> None:
    grain, block = scheme.grain_tokens, scheme.block_tokens
    if grain < 1 or block < grain or block % grain:
        raise InvalidRequestError(
            f"worker {worker!r}: blocks of {block} tokens are no multiple of the grain, {grain}; do"
            " both ends run the same version?"
        )

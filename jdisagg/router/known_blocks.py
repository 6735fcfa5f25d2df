"""Index of the KV blocks that live workers report as cached (`messages/kept_blocks.py`).

The index is a hint: a worker uses only the blocks that it still has when the request arrives.
Missing, duplicate or reordered reports do not corrupt the index. The reply to a report contains the
number of the last event that the index applied. The worker then sends the later events, or a full
snapshot. Entries of a worker that is gone or replaced are removed.

Workers with the same naming scheme and block size share one `PrefixIndex`."""

from collections.abc import Callable, Mapping, Sequence

from jdisagg.errors import InvalidRequestError
from jdisagg.messages.kept_blocks import TOLD_BYTES, KeptMark, KeptNews, KeptScheme, PrefixEvent
from jdisagg.request import Request
from jdisagg.router.decision import Known, PromptBlocks
from jdisagg.router.prefix_index import ByWorker, Numbering, PrefixIndex
from jdisagg.scheduler.residency import BlockNames

# Entries of about 180 bytes (benchmarks/LOG.md), 0.4 GB in total.
MOST_BLOCKS = 1 << 21


class KnownBlocks:
    """Index of the KV blocks that workers have cached. Implements `router.decision.Affinity`.

    Args:
        secret: Key with which block names are hashed. It must equal the workers' key; if it does
            not, no block is found.
    """

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
        self._latest: tuple[Request, str, int, Sequence[int]] | None = None

    def __len__(self) -> int:
        return sum([len(index) for index in self._indices.values()])

    def blocks(self, worker: str) -> int:
        scheme = self._schemes.get(worker)
        return self._indices[scheme].pages(worker) if scheme else 0

    def joined(self, worker: str, scheme: KeptScheme | None) -> None:
        self.forget(worker)
        if scheme is not None:
            _check(worker, scheme)
            self._schemes[worker] = scheme
            self._indices.setdefault(scheme, PrefixIndex(self._most_blocks, self._numbering))

    def forget(self, worker: str) -> None:
        """Removes a worker and its blocks. Idempotent."""
        scheme = self._schemes.pop(worker, None)
        self._epochs.pop(worker, None)
        if scheme is not None:
            self._indices[scheme].forget(worker)
            if scheme not in self._schemes.values():
                del self._indices[scheme]

    def told(self, news: KeptNews) -> KeptMark:
        """Applies a worker's report of changes to its cache. A report that does not follow the last
        applied one is ignored. Returns the number of the last applied event. Raises
        InvalidRequestError for a malformed report."""
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
                # Each worker is in one index, and all indices share their numbering.
                found = found + these if found else these
            return found if found is not None else {}

        return now

    def prompt_blocks(self, request: Request) -> PromptBlocks:
        for scheme in self._indices:
            names = self._chain(request, scheme.model, scheme.grain_tokens)
            return PromptBlocks(names, scheme.grain_tokens)
        return PromptBlocks()

    def _chain(self, request: Request, model: str, grain_tokens: int) -> Sequence[int]:
        """The hashes of the latest prompt are stored, because it is usually looked up several
        times."""
        latest = self._latest
        if latest is None or latest[0] is not request or latest[1:3] != (model, grain_tokens):
            hashes = self._hashed(request, model, grain_tokens)
            self._latest = latest = request, model, grain_tokens, hashes
        return latest[3]

    def _hashed(self, request: Request, model: str, grain_tokens: int) -> Sequence[int]:
        names = self._names(self._secret, model, grain_tokens)
        chain = names.chain(request, request.prompt_token_ids, grain_tokens)
        return [int.from_bytes(name[:TOLD_BYTES], "little") for name in chain]


def _hashes(news: KeptNews) -> list[int]:
    names = news.names
    count, rest = divmod(len(names), TOLD_BYTES)
    if rest or (not news.whole and len(news.added) != count) or news.epoch < 1 or news.number < 0:
        raise InvalidRequestError(
            f"worker {news.worker!r} reports {len(names)} bytes of names and {len(news.added)}"
            f" marks in epoch {news.epoch} from {news.number} on: each name has {TOLD_BYTES} bytes"
            " and one mark; run the same version on both ends"
        )
    return [
        int.from_bytes(names[at : at + TOLD_BYTES], "little")
        for at in range(0, len(names), TOLD_BYTES)
    ]


def _check(worker: str, scheme: KeptScheme) -> None:
    grain, block = scheme.grain_tokens, scheme.block_tokens
    if grain < 1 or block < grain or block % grain:
        raise InvalidRequestError(
            f"worker {worker!r}: blocks of {block} tokens are no multiple of the block granularity,"
            f" {grain}; run the same version on both ends"
        )

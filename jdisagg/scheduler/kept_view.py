"""What stays on a mesh, block by block, for people who look: a list made when it is asked for.

Pure; reads the three places where blocks lie and changes none of them, nor the order in which they
go."""

from collections.abc import Iterator

from jdisagg.plain import plain
from jdisagg.scheduler.disk_blocks import DiskBlocks
from jdisagg.scheduler.host_blocks import HostBlocks
from jdisagg.scheduler.residency import Residency

SHOWN_BYTES = 8  # of a name


@plain
class KeptBlock:
    """One block in one place; it may lie in several.

    Attributes:
        worker: who keeps it.
        tier: "pages", "host" or "disk".
        rank: the dp rank whose pages it lies in, or came from; of a block on disk that was found at
            the start, 0.
        name: the beginning of its keyed name, in hexadecimal digits: equal where the tokens of the
            block and all before it are, and the tenant.
        index: which of its chain it is: positions [index * tokens, (index + 1) * tokens). Of a
            block on disk that was found at the start, 0.
        tokens: of a block.
        in_use: a sequence holds its pages, or it is on its way in or out; then it does not go.
    """

    worker: str
    tier: str
    rank: int
    name: str
    index: int
    tokens: int
    in_use: bool


def kept_blocks(
    worker: str, kept: Residency, host: HostBlocks | None = None, disk: DiskBlocks | None = None
) -> Iterator[KeptBlock]:
    """The blocks of a worker, tier by tier (of pages, rank by rank), by their last use: that which
    was used longest ago, and goes first, comes first; those in pages that sequences hold come
    last."""
    size = kept.block_tokens
    for rank, tree in enumerate(kept.trees):
        for name, index, held in tree.by_last_use():
            yield KeptBlock(worker, "pages", rank, _shown(name), index, size, held)
    for block in host or ():
        offer, busy = block.pieces[0].offer, block.held or not block.written
        index = offer.start // size
        yield KeptBlock(worker, "host", offer.rank, _shown(block.name), index, size, busy)
    for saved in disk or ():
        busy = saved.readers > 0 or not saved.written
        name = _shown(saved.name)
        yield KeptBlock(worker, "disk", saved.rank, name, saved.index, size, busy)


def _shown(name: bytes) -> str:
    return name[:SHOWN_BYTES].hex()

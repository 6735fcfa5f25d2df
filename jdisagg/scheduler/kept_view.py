"""Lists the cached blocks of a worker for display. Pure: reads the tiers and does not change the
order of eviction."""

from collections.abc import Iterable, Iterator, Mapping

from jdisagg.plain import plain
from jdisagg.scheduler.residency import Residency

SHOWN_BYTES = 8  # of a name

Listed = Iterable[tuple[int, bytes, int, bool]]


@plain
class KeptBlock:
    """One cached block in one tier. A block may lie in several.

    Attributes:
        worker: Name of the worker.
        tier: "pages", "host" or "disk".
        rank: Data-parallel rank whose pages hold it or held it; 0 for a block found on disk at the
            start.
        name: First digits of its keyed name, hexadecimal. Two blocks with the same name have the
            same tokens, the same tokens before them and the same tenant.
        index: Place in its chain: it holds positions [index * tokens, (index + 1) * tokens); 0 for
            a block found on disk at the start.
        tokens: Tokens of a block.
        in_use: A sequence holds its pages, or it is being copied; it is not evicted meanwhile.
    """

    worker: str
    tier: str
    rank: int
    name: str
    index: int
    tokens: int
    in_use: bool


def kept_blocks(worker: str, kept: Residency, tiers: Mapping[str, Listed]) -> Iterator[KeptBlock]:
    """Yields the blocks of a worker, tier by tier (pages rank by rank), least recently used first.
    Blocks in pages that sequences hold come last in their tier.

    Args:
        tiers: By name, rank, name, index in the chain and whether it is in use of each block.
    """
    in_pages = [
        (rank, name, index, held)
        for rank, tree in enumerate(kept.trees)
        for name, index, held in tree.by_last_use()
    ]
    for tier, blocks in {"pages": in_pages, **tiers}.items():
        for rank, name, index, in_use in blocks:
            shown = name[:SHOWN_BYTES].hex()
            yield KeptBlock(worker, tier, rank, shown, index, kept.block_tokens, in_use)

"""Lists a worker's cached blocks for display, without changing the order of eviction."""

from collections.abc import Iterable, Iterator, Mapping

from jdisagg.messages.worker_status import KeptTier
from jdisagg.plain import plain
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.scheduler.residency import Residency

SHOWN_BYTES = 8  # leading bytes of a name that are shown

Listed = Iterable[tuple[int, bytes, int, bool]]


@plain
class KeptBlock:
    """One cached block in one tier: device pages, host memory or disk. A block that is in several
    tiers is listed for each.

    Attributes:
        rank: Data-parallel rank whose pages hold or held the block; 0 if an earlier run of the
            worker wrote the block to disk.
        name: First hexadecimal digits of the block's keyed hash. Blocks with the same hash have the
            same tokens, the same preceding tokens and the same tenant.
        index: Number of the block in its sequence, counted from 0. The block holds positions [index
            * tokens, (index + 1) * tokens). The number is 0 if an earlier run of the worker wrote
            the block to disk.
        in_use: Whether a sequence uses the block or the block is being copied. A block in use
            cannot be evicted.
    """

    worker: str
    tier: str
    rank: int
    name: str
    index: int
    tokens: int
    in_use: bool


def kept_blocks(worker: str, kept: Residency, tiers: Mapping[str, Listed]) -> Iterator[KeptBlock]:
    """Yields the cached blocks of a worker. Each tier lists its least recently used block first.
    Blocks in pages are listed rank by rank, and those in use last.

    Args:
        tiers: For each tier other than pages, its name and its blocks. A block is given as (rank,
            block name, index in its sequence, whether it is in use).
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


def kept_tiers(kept: Residency, mesh: MeshLimits) -> tuple[KeptTier, ...]:
    """Returns the used and total bytes of the cached blocks in pages, and of snapshots."""
    if not kept.on:
        return ()
    of_token = mesh.sent.bytes_per_token
    room = mesh.ranks * mesh.pages_per_rank * mesh.page_size * of_token
    blocks = kept.blocks
    pages = KeptTier("pages", blocks, blocks * kept.block_tokens * of_token, room)
    if not kept.snapshots:
        return (pages,)
    sizes = [(len(one), one.filled, one.total) for one in kept.snapshots]
    count, filled, total = map(sum, zip(*sizes, strict=True))
    size = mesh.snapshot_slot_bytes
    return pages, KeptTier("snapshots", count, filled * size, total * size)

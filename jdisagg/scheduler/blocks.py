"""Splits the KV of one row of a prefill chunk into transfer blocks, by tokens and by layers.

The length of a block is `granule_tokens` times one of `LENGTHS`. A row is split into blocks,
longest first. Only its last block is padded, up to a multiple of `granule_tokens`. Rows start at
such multiples in their chunk, so padding never reaches the next row. The last row of a chunk may
instead be sent as one padded block (per band), if the padding costs less than several blocks.

A band is a range of consecutive layer groups that are sent in the same block. For long prompts each
layer group has its own block, which is sent while the next layer group is computed. For short
prompts a band has several layer groups, because otherwise the host's work per block would take
longer than sending the bytes."""

import functools
from collections.abc import Callable, Iterator

from jdisagg.errors import LayoutError
from jdisagg.layout.kv_spec import KVSpec

LENGTHS = 1, 8, 64  # of blocks, in granules
# Function from a model's KV spec to the range of layers of each pipeline stage.
StageCut = Callable[[KVSpec], tuple[range, ...]]


def split_blocks(
    tokens: int, granule_tokens: int, whole: bool = False
) -> Iterator[tuple[int, int, int]]:
    """Yields (offset in the row, block_tokens, valid_tokens) of each block, largest block first. If
    `whole` is set, any block length is allowed, and the row is one block."""
    if whole and tokens:
        yield 0, padded(tokens, granule_tokens), tokens
        return
    offset = 0
    for block_tokens in (granule_tokens * length for length in reversed(LENGTHS)):
        while block_tokens <= padded(tokens - offset, granule_tokens):
            yield offset, block_tokens, min(block_tokens, tokens - offset)
            offset += block_tokens


def merged_block(tokens: int, granule_tokens: int) -> int | None:
    """Returns the shortest block length that holds `tokens` tokens in one block, or None if there
    is none."""
    lengths = (granule_tokens * length for length in LENGTHS)
    return next((block_tokens for block_tokens in lengths if block_tokens >= tokens), None)


def padded(tokens: int, granule_tokens: int) -> int:
    return -(-tokens // granule_tokens) * granule_tokens


def even_runs(count: int, runs: int) -> tuple[range, ...]:
    runs = min(runs, count)
    size, larger = divmod(count, runs)
    starts = [index * size + min(index, larger) for index in range(runs + 1)]
    return tuple(range(first, last) for first, last in zip(starts[:-1], starts[1:], strict=True))


def layer_groups(positioned: tuple[int, ...], layers: int, groups: int) -> tuple[range, ...]:
    """Splits the layers of a model into consecutive ranges, at most `groups` of them.

    Args:
        positioned: Layers that store KV for each position, ascending. Each range has at least one
            of them, so no block is empty. All ranges have nearly equally many.
    """
    last = [positioned[run.stop - 1] + 1 for run in even_runs(len(positioned), groups)]
    stops = [*last[:-1], layers]
    return tuple(range(first, stop) for first, stop in zip([0, *stops[:-1]], stops, strict=True))


def stage_layers(
    positioned: tuple[int, ...], layers: int, groups: int, stages: int
) -> tuple[range, ...]:
    """Returns the range of layers of each pipeline stage. A stage consists of whole layer groups,
    so that each block of one group is on one stage. The numbers of layers of the stages differ as
    little as the groups allow.

    Raises:
        LayoutError: A stage would have no group.
    """
    cut = layer_groups(positioned, layers, groups)
    count = len(cut)
    if stages > count:
        raise LayoutError(
            f"layout pp={stages} exceeds the {count} groups of layers; choose at most pp={count}"
        )
    starts = [group.start for group in cut]
    borders = [0]
    for stage in range(1, stages):
        possible = range(borders[-1] + 1, count - (stages - stage) + 1)
        wanted = stage * layers / stages
        borders.append(min(possible, key=lambda at: abs(starts[at] - wanted)))
    stops = [*(starts[border] for border in borders[1:]), layers]
    return tuple(range(starts[at], stop) for at, stop in zip(borders, stops, strict=True))


@functools.lru_cache(maxsize=1024)
def bands(groups: int, nbytes: int, least_bytes: int) -> tuple[range, ...]:
    """Returns the range of layer groups in each block. The number of blocks is the largest power of
    two for which a block has at least `least_bytes` bytes. If there could be a block for each
    group, each group is a block of its own.

    Args:
        least_bytes: Least number of bytes of a block; 0 makes each group a block.
    """
    blocks = nbytes // least_bytes if least_bytes else groups
    return even_runs(groups, groups if blocks >= groups else 1 << max(0, blocks.bit_length() - 1))

"""How a row's KV is cut into blocks to offer, by tokens and by layers: few shapes, so that few
programs.

A block's length is a power-of-two multiple of the granule; a row is cut from large to small, and
only the last block is padded, to the next multiple of the granule. A row starts at a multiple of
the granule in its chunk, so padding never reaches into the next row. Where the number of blocks
costs more than padding, the last row of a chunk may instead leave as one block for each band, which
reaches into what nobody computes.

A band is a run of consecutive layer groups whose KV leaves as one block. Layer groups are cut for
long prompts: the block of one is on its way while the next computes. Of a short prompt each would
be so small that the host's work for a block outweighs its bytes. Pure."""

import functools
from collections.abc import Iterator


def split_blocks(
    tokens: int, granule_tokens: int, whole: bool = False
) -> Iterator[tuple[int, int, int]]:
    """Yields (offset in the row, block_tokens, valid_tokens), largest block first; one block of all
    where `whole` (any length will do)."""
    if whole and tokens:
        yield 0, padded(tokens, granule_tokens), tokens
        return
    rest = -(-tokens // granule_tokens)
    offset = 0
    while rest:
        granules = 1 << (rest.bit_length() - 1)
        block_tokens = granules * granule_tokens
        yield offset, block_tokens, min(block_tokens, tokens - offset)
        offset += block_tokens
        rest -= granules


def merged_block(tokens: int, granule_tokens: int) -> int:
    """The length of one block for all: the next power-of-two multiple of the granule."""
    return granule_tokens << (-(-tokens // granule_tokens) - 1).bit_length()


def padded(tokens: int, granule_tokens: int) -> int:
    """Room that `tokens` take in a chunk."""
    return -(-tokens // granule_tokens) * granule_tokens


def even_runs(count: int, runs: int) -> tuple[range, ...]:
    """`runs` consecutive ranges (fewer where there are fewer items) that cover `count` items, as
    even as can be, the larger ones first."""
    runs = min(runs, count)
    size, larger = divmod(count, runs)
    starts = [index * size + min(index, larger) for index in range(runs + 1)]
    return tuple(range(first, last) for first, last in zip(starts[:-1], starts[1:], strict=True))


def layer_groups(positioned: tuple[int, ...], layers: int, groups: int) -> tuple[range, ...]:
    """`groups` consecutive ranges of `layers` layers, each with as many as can be that keep
    something of each position (`positioned`), and so one at least: a block of none is not
    offered."""
    last = [positioned[run.stop - 1] + 1 for run in even_runs(len(positioned), groups)]
    stops = [*last[:-1], layers]
    return tuple(range(first, stop) for first, stop in zip([0, *stops[:-1]], stops, strict=True))


@functools.lru_cache(maxsize=1024)
def bands(groups: int, nbytes: int, least_bytes: int) -> tuple[range, ...]:
    """The layer groups of each block, where all `groups` together have `nbytes`: a power of two of
    blocks of `least_bytes` or more, or one for each group. `least_bytes` 0: always one for each
    group."""
    blocks = nbytes // least_bytes if least_bytes else groups
    return even_runs(groups, groups if blocks >= groups else 1 << max(0, blocks.bit_length() - 1))

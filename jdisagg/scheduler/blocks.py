"""Cuts a row's KV into blocks to offer, by tokens and by layers, with few shapes and thus few
programs.

A block has a power-of-two multiple of the granule as its length. A row is cut from large to small,
and only its last block is padded, to the next multiple of the granule. A row starts at a multiple
of the granule in its chunk, so padding never reaches the next row. Where several blocks cost more
than padding, the last row of a chunk leaves as one padded block per band.

A band is a run of consecutive layer groups that share a block. For long prompts each group has its
own block, which is sent while the next group computes. For short prompts the host's work per block
would outweigh its bytes. Pure."""

import functools
from collections.abc import Iterator


def split_blocks(
    tokens: int, granule_tokens: int, whole: bool = False
) -> Iterator[tuple[int, int, int]]:
    """Yields (offset in the row, block_tokens, valid_tokens), largest block first. With `whole`,
    where any length is possible, yields one block."""
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
    """Returns the length of a single block: the next power-of-two multiple of the granule."""
    return granule_tokens << (-(-tokens // granule_tokens) - 1).bit_length()


def padded(tokens: int, granule_tokens: int) -> int:
    """Returns the room that `tokens` take in a chunk."""
    return -(-tokens // granule_tokens) * granule_tokens


def even_runs(count: int, runs: int) -> tuple[range, ...]:
    """Splits `count` items into at most `runs` consecutive ranges of nearly equal length, larger
    ones first."""
    runs = min(runs, count)
    size, larger = divmod(count, runs)
    starts = [index * size + min(index, larger) for index in range(runs + 1)]
    return tuple(range(first, last) for first, last in zip(starts[:-1], starts[1:], strict=True))


def layer_groups(positioned: tuple[int, ...], layers: int, groups: int) -> tuple[range, ...]:
    """Splits `layers` layers into at most `groups` consecutive ranges. Each has nearly the same
    number of layers that keep something per position (`positioned`), and at least one, because an
    empty block is not offered."""
    last = [positioned[run.stop - 1] + 1 for run in even_runs(len(positioned), groups)]
    stops = [*last[:-1], layers]
    return tuple(range(first, stop) for first, stop in zip([0, *stops[:-1]], stops, strict=True))


@functools.lru_cache(maxsize=1024)
def bands(groups: int, nbytes: int, least_bytes: int) -> tuple[range, ...]:
    """Returns the layer groups of each block. `nbytes` of all groups are cut into a power-of-two
    number of blocks of at least `least_bytes`, or one per group. With `least_bytes` 0 it is always
    one per group."""
    blocks = nbytes // least_bytes if least_bytes else groups
    return even_runs(groups, groups if blocks >= groups else 1 << max(0, blocks.bit_length() - 1))

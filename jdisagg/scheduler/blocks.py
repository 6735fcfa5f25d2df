"""Cuts the KV of a chunk's row into the blocks that are offered to a receiver, by tokens and by
layers. The blocks have few shapes, so few programs are compiled.

The shortest block has `granule_tokens` tokens, and the others are longer by a power of two. A row
is cut from large to small blocks, and only its last block is padded, to the next multiple of
`granule_tokens`. Rows start at such multiples in their chunk, so padding never reaches the next
row. If several blocks cost more than padding, the last row of a chunk is sent as one padded block
per band.

A band is a run of consecutive layer groups that share a block. For long prompts each group has its
own block, which is sent while the next group computes. For short prompts the host's work per block
would cost more than sending the bytes. Pure."""

import functools
from collections.abc import Iterator


def split_blocks(
    tokens: int, granule_tokens: int, whole: bool = False
) -> Iterator[tuple[int, int, int]]:
    """Yields (offset in the row, block_tokens, valid_tokens) of each block, largest first. With
    `whole`, blocks may have any length, so the whole row is one block."""
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
    """Returns the length of a single block: the next power-of-two multiple of `granule_tokens`."""
    return granule_tokens << (-(-tokens // granule_tokens) - 1).bit_length()


def padded(tokens: int, granule_tokens: int) -> int:
    """Rounds `tokens` up to a multiple of `granule_tokens`."""
    return -(-tokens // granule_tokens) * granule_tokens


def even_runs(count: int, runs: int) -> tuple[range, ...]:
    """Splits `count` items into at most `runs` ranges of nearly equal length, larger ones first."""
    runs = min(runs, count)
    size, larger = divmod(count, runs)
    starts = [index * size + min(index, larger) for index in range(runs + 1)]
    return tuple(range(first, last) for first, last in zip(starts[:-1], starts[1:], strict=True))


def layer_groups(positioned: tuple[int, ...], layers: int, groups: int) -> tuple[range, ...]:
    """Splits `layers` layers into at most `groups` consecutive ranges. Each range has nearly the
    same number, at least one, of the layers in `positioned`, which store KV for each position. An
    empty block is never offered."""
    last = [positioned[run.stop - 1] + 1 for run in even_runs(len(positioned), groups)]
    stops = [*last[:-1], layers]
    return tuple(range(first, stop) for first, stop in zip([0, *stops[:-1]], stops, strict=True))


@functools.lru_cache(maxsize=1024)
def bands(groups: int, nbytes: int, least_bytes: int) -> tuple[range, ...]:
    """Returns the layer groups that each block covers. The `nbytes` bytes of all groups are cut
    into a power-of-two number of blocks of at least `least_bytes`, at most one per group. With
    `least_bytes` 0, each group is a block."""
    blocks = nbytes // least_bytes if least_bytes else groups
    return even_runs(groups, groups if blocks >= groups else 1 << max(0, blocks.bit_length() - 1))

"""How a row's tokens are cut into blocks to offer: few shapes, so that few programs.

A block's length is a power-of-two multiple of the granule; a row is cut from large to small, and only the last block is padded,
to the next multiple of the granule. A row starts at a multiple of the granule in its chunk, so padding never reaches into
the next row. Where bytes are so few that the number of blocks costs more than padding, the last row of a chunk may instead leave as one
block that reaches into what nobody computes. Pure.
"""

from collections.abc import Iterator


def split_blocks(tokens: int, granule_tokens: int, whole: bool = False) -> Iterator[tuple[int, int, int]]:
    """Yields (offset in the row, block_tokens, valid_tokens), largest block first; one block of all where `whole` (any length will do)."""
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

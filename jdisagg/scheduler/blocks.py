"""How a row's tokens are cut into blocks to offer: few shapes, so that few programs.

A block's length is a power-of-two multiple of the granule; a row is cut from large to small, and only the last block is padded,
to the next multiple of the granule. A row starts at a multiple of the granule in its chunk, so padding never reaches into
the next row. Pure.
"""

from collections.abc import Iterator


def split_blocks(tokens: int, granule_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yields (offset in the row, block_tokens, valid_tokens), largest block first."""
    rest = -(-tokens // granule_tokens)
    offset = 0
    while rest:
        granules = 1 << (rest.bit_length() - 1)
        block_tokens = granules * granule_tokens
        yield offset, block_tokens, min(block_tokens, tokens - offset)
        offset += block_tokens
        rest -= granules


def padded(tokens: int, granule_tokens: int) -> int:
    """Room that `tokens` take in a chunk."""
    return -(-tokens // granule_tokens) * granule_tokens

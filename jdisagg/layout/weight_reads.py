"""Plans how slices of offered arrays are read from the devices that hold them. Has no side
effects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jdisagg.layout.reshard_plan import Box, plan_reshard, volume

_READER = -1  # place of the reader in a plan; sources have numbers from 0
Source = tuple[int, int]
"""Index of the offering process, and number of the device in this process."""


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """One piece of a read.

    Attributes:
        place: Bounds of the piece in the read's result.
    """

    read: int
    tensor: int
    source: Source
    box: Box
    place: Box
    nbytes: int


def plan_reads(
    held: Sequence[Mapping[Source, Box]],
    itemsizes: Sequence[int],
    reads: Sequence[tuple[int, Box]],
    most_bytes: int,
) -> list[tuple[ReadPiece, ...]]:
    """Plans blocks of pieces, in the order of the reads.

    Args:
        most_bytes: Largest size of a block, except for a piece that cannot be cut along its first
            dimension.

    Raises:
        LayoutError: No device holds a part of a read.
    """
    pieces = [
        piece
        for number, (tensor, box) in enumerate(reads)
        for piece in _pieces(number, tensor, box, held[tensor], itemsizes[tensor], most_bytes)
    ]
    blocks: list[tuple[ReadPiece, ...]] = []
    block: list[ReadPiece] = []
    for piece in pieces:
        full = sum(one.nbytes for one in block) + piece.nbytes > most_bytes
        if block and (full or piece.source[0] != block[0].source[0]):
            blocks.append(tuple(block))
            block = []
        block.append(piece)
    return [*blocks, tuple(block)] if block else blocks


def _pieces(
    number: int, tensor: int, box: Box, held: Mapping[Source, Box], itemsize: int, most_bytes: int
) -> list[ReadPiece]:
    sources = sorted(held)
    placement = {place: held[source] for place, source in enumerate(sources)}
    found: list[ReadPiece] = []
    for piece in plan_reshard(placement, {_READER: box}, turn=number):
        for part in _cut(piece.box, itemsize, most_bytes):
            place = tuple(
                (first - begin, end - begin)
                for (first, end), (begin, _) in zip(part, box, strict=True)
            )
            nbytes = volume(part) * itemsize
            found.append(ReadPiece(number, tensor, sources[piece.source], part, place, nbytes))
    return found


def _cut(box: Box, itemsize: int, most_bytes: int) -> list[Box]:
    if not box:
        return [box]
    (first, end), *rest = box
    row_bytes = volume(tuple(rest)) * itemsize
    step = max(1, most_bytes // max(1, row_bytes))
    return [((at, min(at + step, end)), *rest) for at in range(first, end, step)]

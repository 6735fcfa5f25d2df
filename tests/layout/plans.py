"""What a card and a plan say, for tests and benchmarks."""

import math
from collections.abc import Iterable

from jdisagg.layout.mesh_card import MeshCard
from jdisagg.layout.reshard_plan import Box, Piece


def rank_boxes(card: MeshCard, rank: int, shape: tuple[int, ...]) -> dict[int, Box]:
    """Returns, by device number, the box of a KV block that each device of dp rank `rank` holds.
    `shape` is [dp, components, heads, tokens, head size]."""
    _, shards, replicas = card.shape
    _, components, heads, tokens, width = shape
    local = heads // shards
    return {
        card.devices[(rank * shards + shard) * replicas + replica]: (
            (0, 1),
            (0, components),
            (shard * local, shard * local + local),
            (0, tokens),
            (0, width),
        )
        for shard in range(shards)
        for replica in range(replicas)
    }


def elements(piece: Piece) -> int:
    return math.prod(stop - start for start, stop in piece.box)


def bytes_per_pair(plan: Iterable[Piece], itemsize: int) -> dict[tuple[int, int], int]:
    """Returns the bytes to transfer for each (source device, destination device)."""
    moved: dict[tuple[int, int], int] = {}
    for piece in plan:
        if piece.source != piece.destination:
            pair = (piece.source, piece.destination)
            moved[pair] = moved.get(pair, 0) + elements(piece) * itemsize
    return moved

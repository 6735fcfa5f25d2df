"""Plans which bytes each device sends to which other device when an array changes its sharding.

A box is a range of indices in each dimension. A placement gives the box of the global array that
each device holds.

Invariants for every destination device: its pieces are disjoint and fill its box exactly, so each
destination byte arrives once. Each piece lies inside its source's box. If the destination device
already holds the bytes of a piece, it is the piece's source, too, and nothing is transferred. The
plan depends only on the inputs, so both ends of a connection can compute it independently."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from jdisagg.errors import LayoutError

Box = tuple[tuple[int, int], ...]
"""(start, stop) for each dimension."""

Placement = Mapping[int, Box]
"""Device id -> the box that it holds or needs."""

# Dimensions of a KV block. A hand-off transfers one dp rank's part of it to one dp rank of another
# mesh, and boxes are relative to that rank: dimension 0 is always (0, 1). Between the two meshes
# only the sharding of the KV heads differs.
RANK_DIMENSION, HEAD_DIMENSION = 0, 2


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


@dataclass(frozen=True, slots=True)
class Piece:
    """One box to copy from device `source` to device `destination`. `box` is relative to the global
    array. `source_slice` and `destination_slice` are relative to the box of the respective
    device."""

    source: int
    source_slice: Box
    destination: int
    destination_slice: Box
    box: Box


def plan_reshard(
    source: Placement,
    destination: Placement,
    *,
    granule: Sequence[int] | None = None,
    turn: int = 0,
) -> tuple[Piece, ...]:
    """Plans the copies that change an array's placement from `source` to `destination`. Returns all
    pieces, ordered by destination device, then by position in the array.

    Args:
        granule: Shape that all pieces must have. The bounds of every box must be multiples of it.
            None allows pieces of any shape.
        turn: Index of the replica to prefer among equally loaded ones. A caller that plans many
            small arrays increments `turn` for each, which spreads the load over the replicas.

    Raises:
        LayoutError: `source` does not cover `destination`, the boxes differ in their number of
            dimensions, or a box is not divisible by `granule`.
    """
    _validate(source, destination, granule)
    holders_of = _holders(source)
    wanted: list[tuple[int, Box, tuple[int, ...]]] = []
    for device in sorted(destination):
        for cell in _cells(destination[device], holders_of):
            holders = tuple(
                sorted(
                    d
                    for box, devices in holders_of.items()
                    if _contains(box, cell)
                    for d in devices
                )
            )
            if not holders:
                raise LayoutError(
                    f"reshard: device {device} needs {cell} (of its {destination[device]}), which"
                    f" no source device holds; the source holds {sorted(holders_of)}: give a source"
                    " that covers the destination"
                )
            wanted += [(device, part, holders) for part in _cut(cell, granule)]
    sources = _choose(wanted, turn)
    pieces = (
        Piece(
            chosen, _relative(box, source[chosen]), device, _relative(box, destination[device]), box
        )
        for (device, box, _), chosen in zip(wanted, sources, strict=True)
    )
    return tuple(sorted(pieces, key=lambda piece: (piece.destination, piece.box)))


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def _choose(wanted: Sequence[tuple[int, Box, tuple[int, ...]]], turn: int) -> list[int]:
    """Chooses the source device for each (destination, box, devices that hold the box): the
    destination itself if it holds the box, otherwise the device with the fewest bytes to send."""
    load = {device: 0 for _, _, holders in wanted for device in holders}
    chosen = [device if device in holders else -1 for device, _, holders in wanted]
    remote = [index for index, device in enumerate(chosen) if device < 0]

    def least_loaded(holders: tuple[int, ...]) -> int:
        count = len(holders)
        return min(range(count), key=lambda place: (load[holders[place]], (place - turn) % count))

    for index in sorted(
        remote, key=lambda index: (len(wanted[index][2]), -volume(wanted[index][1]))
    ):
        _, box, holders = wanted[index]
        chosen[index] = holders[least_loaded(holders)]
        load[chosen[index]] += volume(box)
    improved = True
    while improved:
        improved = False
        for index in remote:
            _, box, holders = wanted[index]
            better, size = holders[least_loaded(holders)], volume(box)
            if load[chosen[index]] - load[better] > size:
                load[chosen[index]] -= size
                load[better] += size
                chosen[index] = better
                improved = True
    return chosen


def _cells(box: Box, holders_of: Mapping[Box, Sequence[int]]) -> list[Box]:
    cells = [box] if volume(box) else []
    for held in sorted(holders_of):
        parts: list[Box] = []
        for cell in cells:
            common = _intersection(cell, held)
            parts += [cell] if common is None else [common, *_difference(cell, common)]
        cells = parts
    return cells


def _difference(box: Box, inner: Box) -> list[Box]:
    parts: list[Box] = []
    for axis, ((start, stop), (low, high)) in enumerate(zip(box, inner, strict=True)):
        for side in ((start, low), (high, stop)):
            if side[0] < side[1]:
                parts.append((*inner[:axis], side, *box[axis + 1 :]))
    return parts


def _intersection(a: Box, b: Box) -> Box | None:
    common = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _contains(outer: Box, inner: Box) -> bool:
    return all(p <= r and s <= q for (p, q), (r, s) in zip(outer, inner, strict=True))


def _relative(box: Box, frame: Box) -> Box:
    return tuple(
        (start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(box, frame, strict=True)
    )


def _cut(box: Box, granule: Sequence[int] | None) -> list[Box]:
    if granule is None:
        return [box]
    return list(
        product(
            *(
                [(at, at + step) for at in range(start, stop, step)]
                for (start, stop), step in zip(box, granule, strict=True)
            )
        )
    )


def _holders(source: Placement) -> dict[Box, list[int]]:
    found: dict[Box, list[int]] = {}
    for device, box in source.items():
        if volume(box):
            found.setdefault(box, []).append(device)
    return found


def _validate(source: Placement, destination: Placement, granule: Sequence[int] | None) -> None:
    rank = len(next(iter(destination.values()), ()))
    if granule is not None and (len(granule) != rank or any(step < 1 for step in granule)):
        raise LayoutError(
            f"reshard: granule {tuple(granule)} must give {rank} positive steps, one for each"
            " dimension of the destination"
        )
    for side, placement in (("source", source), ("destination", destination)):
        for device, box in placement.items():
            if len(box) != rank:
                raise LayoutError(
                    f"reshard: {side} device {device} holds a box of {len(box)} dimensions, {box}, "
                    f"but the destination has {rank}; describe both sides of the same array"
                )
            for axis, (start, stop) in enumerate(box):
                if not 0 <= start <= stop:
                    raise LayoutError(
                        f"reshard: {side} device {device}, dimension {axis}: ({start}, {stop}) must"
                        " have 0 <= start <= stop"
                    )
                if granule is not None and (start % granule[axis] or stop % granule[axis]):
                    raise LayoutError(
                        f"reshard: {side} device {device}, dimension {axis}: ({start}, {stop}) is"
                        f" not cut at multiples of the granule {granule[axis]}; choose a granule"
                        " that divides every edge (their greatest common divisor)"
                    )


def head_granule(kv_heads: int, source_shards: int, destination_shards: int) -> int:
    """Returns the number of KV heads in a piece: the largest number that divides the heads per
    shard on both sides."""
    for side, shards in (("source", source_shards), ("destination", destination_shards)):
        if kv_heads % shards:
            raise LayoutError(
                f"{kv_heads} kv heads cannot be sharded over {shards} devices on the {side} side;"
                f" use a divisor of {kv_heads}"
            )
    return math.gcd(kv_heads // source_shards, kv_heads // destination_shards)


def plan_handoff(
    source: Placement, destination: Placement, granule: int, turn: int = 0
) -> tuple[Piece, ...]:
    """Each piece has `granule` KV heads. `plan_reshard` describes the other parameters."""
    whole = [
        max((box[axis][1] for box in destination.values()), default=1)
        for axis in range(len(next(iter(destination.values()))))
    ]
    whole[HEAD_DIMENSION] = granule
    return plan_reshard(source, destination, granule=whole, turn=turn)

"""Plans which device sends which KV heads to which device. A box is the index range, in each
dimension, of the part of an array that one device holds.

A hand-off transfers one dp rank's part of a block to one dp rank of another mesh. Boxes are
therefore relative to a single rank: dimension 0 is always (0, 1). Between the two meshes only the
sharding of the KV heads (dimension 2) differs."""

import math
from typing import TYPE_CHECKING

from jdisagg.errors import LayoutError
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.layout.reshard_plan import Box, ReshardPlan, box_of, plan_reshard

if TYPE_CHECKING:  # plans need no JAX
    import jax

RANK_DIMENSION = 0
HEAD_DIMENSION = 2


def mesh_card(mesh: "jax.sharding.Mesh") -> MeshCard:
    """Returns the description of a mesh with axes ("dp", "kv", "rep"). The worker adds the
    endpoints of its processes to the description."""
    dp, kv, rep = mesh.devices.shape
    devices = tuple(mesh.devices.flat)
    return MeshCard(
        (dp, kv, rep),
        tuple(device.id for device in devices),
        tuple(device.process_index for device in devices),
    )


def placement(sharding: "jax.sharding.Sharding", shape: tuple[int, ...]) -> dict[int, Box]:
    """Returns, by device id, the box of an array that each device holds."""
    return {
        device.id: box_of(index, shape)
        for device, index in sharding.devices_indices_map(shape).items()
    }


def rank_placement(
    sharding: "jax.sharding.Sharding", shape: tuple[int, ...], rank: int
) -> dict[int, Box]:
    """Returns, by device id, the box that each device of one dp rank holds. Boxes are relative to
    the rank (dimension 0 becomes (0, 1)). Raises LayoutError if there is no such rank, or if a
    device holds several ranks."""
    if not 0 <= rank < shape[RANK_DIMENSION]:
        raise LayoutError(
            f"rank {rank} is not one of the block's {shape[RANK_DIMENSION]} dp ranks (shape"
            f" {shape})"
        )
    boxes = placement(sharding, shape)
    for device, ((start, stop), *_) in boxes.items():
        if stop - start != 1:
            raise LayoutError(
                f"device {device} holds dp ranks [{start}, {stop}) of a block of shape {shape}; "
                "shard dimension 0 so that each device holds one"
            )
    return {
        device: ((0, 1), *rest) for device, ((start, _), *rest) in boxes.items() if start == rank
    }


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
    source: dict[int, Box], destination: dict[int, Box], granule: int, turn: int = 0
) -> ReshardPlan:
    """Each piece has `granule` KV heads. `plan_reshard` describes the other parameters."""
    whole = [
        max((box[axis][1] for box in destination.values()), default=1)
        for axis in range(len(next(iter(destination.values()))))
    ]
    whole[HEAD_DIMENSION] = granule
    return plan_reshard(source, destination, granule=whole, turn=turn)

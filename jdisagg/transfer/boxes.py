"""Converts JAX shardings to boxes, the part of an array that each device holds, and plans
hand-offs.

A hand-off moves one dp rank's part of a block [dp, C, K, T, H] to one dp rank of a similar block on
the other mesh. Both sides are therefore described within one rank: dimension 0 is (0, 1) on each.
Only the sharding of heads (dimension 2) differs. All pieces of a hand-off have the same shape:
`granule` heads, and the whole of the other dimensions."""

import math

import jax

from jdisagg.errors import LayoutError
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.layout.reshard_plan import Box, ReshardPlan, plan_reshard

RANK_DIMENSION = 0
HEAD_DIMENSION = 2


def mesh_card(mesh: jax.sharding.Mesh) -> MeshCard:
    """Describes a mesh ("dp", "kv", "rep"). The worker adds the `KvEnd`s of its processes."""
    dp, kv, rep = mesh.devices.shape
    devices = tuple(mesh.devices.flat)
    return MeshCard(
        (dp, kv, rep),
        tuple(device.id for device in devices),
        tuple(device.process_index for device in devices),
    )


def placement(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[int, Box]:
    """Returns the box of an array that each device of all processes holds, by device id."""
    return {
        device.id: tuple(
            slice_.indices(size)[:2] for slice_, size in zip(index, shape, strict=True)
        )
        for device, index in sharding.devices_indices_map(shape).items()
    }


def rank_placement(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], rank: int
) -> dict[int, Box]:
    """Returns the devices of one dp rank, each with its box inside that rank's part (dimension 0
    becomes (0, 1)). Raises LayoutError if there is no such rank or a device holds several."""
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
    """Returns the heads of a piece: the largest divisor of both sides' heads per shard."""
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
    """Plans the pieces, each of `granule` heads, from one rank's block to one rank of the
    destination (see `plan_reshard`)."""
    whole = [
        max((box[axis][1] for box in destination.values()), default=1)
        for axis in range(len(next(iter(destination.values()))))
    ]
    whole[HEAD_DIMENSION] = granule
    return plan_reshard(source, destination, granule=whole, turn=turn)

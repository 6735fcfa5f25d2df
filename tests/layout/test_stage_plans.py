"""Reshard plans between instances with pipeline stages. A layer's KV is on one stage of each side,
so every layer group is planned from the mesh of its stage to the mesh of its stage."""

import itertools

import numpy as np
import pytest

from jdisagg.layout.axes import Layout
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.layout.reshard_plan import Box, plan_reshard
from jdisagg.scheduler.blocks import layer_groups, stage_layers
from tests.layout.plans import rank_boxes

LAYERS, HEADS, TOKENS, WIDTH = 6, 4, 3, 2
SIDES = [
    Layout(dp=dp, tp=tp, pp=pp)
    for pp, (dp, tp) in itertools.product((1, 2, 3, 4), ((1, 1), (1, 2), (2, 1), (1, 8)))
]


def cards(layout: Layout, first: int) -> list[MeshCard]:
    """The mesh of each stage, on devices from `first` on."""
    size, shape = layout.stage_devices, layout.mesh_shape(HEADS)
    return [
        MeshCard(shape, tuple(range(start, start + size)), (0,) * size)
        for start in range(first, first + layout.devices, size)
    ]


def at(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(*bounds) for bounds in box)]


@pytest.mark.parametrize("source", SIDES, ids=str)
def test_every_value_of_every_layer_arrives_once_on_each_replica_of_its_stage(
    source: Layout,
) -> None:
    whole = np.arange(LAYERS * HEADS * TOKENS * WIDTH).reshape(1, LAYERS, HEADS, TOKENS, WIDTH)
    groups = layer_groups(tuple(range(LAYERS)), LAYERS, LAYERS)
    for destination in SIDES:
        here, there = cards(source, 0), cards(destination, 100)
        moved = 0
        for group in groups:
            sender, receiver = (
                next(
                    card
                    for card, run in zip(side, of_side(layout), strict=True)
                    if group.start in run
                )
                for side, layout in ((here, source), (there, destination))
            )
            block = whole[:, group.start : group.stop]
            sent = rank_boxes(sender, source.dp - 1, block.shape)
            wanted = rank_boxes(receiver, destination.dp - 1, block.shape)
            arrived = {device: np.full(at(block, box).shape, -1) for device, box in wanted.items()}
            for piece in plan_reshard(sent, wanted):
                part = at(at(block, sent[piece.source]), piece.source_slice)
                into = at(arrived[piece.destination], piece.destination_slice)
                assert np.all(into == -1), "a value arrives twice"
                into[...] = part
                moved += part.size
            for device, box in wanted.items():
                assert np.array_equal(arrived[device], at(block, box))
        assert moved == whole.size * destination.mesh_shape(HEADS)[2]


def of_side(layout: Layout) -> tuple[range, ...]:
    return stage_layers(tuple(range(LAYERS)), LAYERS, LAYERS, layout.pp)

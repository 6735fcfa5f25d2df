"""A step's seconds in one go are those of the cost model, to the bit."""

import random

import pytest

from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.decode_seconds import DecodeSeconds
from jdisagg.costs.hardware import accelerator
from jdisagg.costs.model_geometry import CATALOG, geometry
from jdisagg.errors import ConfigError, LayoutError
from jdisagg.layout.axes import Layout

LAYOUTS = (Layout(), Layout(tp=4), Layout(tp=8), Layout(dp=8, ep=8), Layout(dp=2, tp=4, ep=8))


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_seconds_in_one_go_are_those_of_all_parts_together_to_the_bit(name: str) -> None:
    draw, asked = random.Random(name), 0
    for hardware in ("h100", "gb200", "l40s"):
        for layout in LAYOUTS:
            try:
                model = CostModel(geometry(name), accelerator(hardware), layout)
            except (ConfigError, LayoutError):
                continue
            seconds = DecodeSeconds(model)
            for _ in range(20):
                sequences = draw.randrange(0, 300)
                context = sequences * draw.uniform(1, 40_000)
                assert seconds(sequences, context) == model.decode_of(sequences, context).seconds
                asked += 1
    assert asked

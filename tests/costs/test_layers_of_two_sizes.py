"""A model with two sizes of attention costs what two models cost, each with the layers of one
kind."""

import dataclasses

import pytest

from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.model_geometry import GroupedAttention
from jdisagg.layout.axes import Layout
from tests.costs.kinds import DENSE, IDEAL


def test_layers_of_another_size_cost_what_a_model_of_that_size_does_in_their_number() -> None:
    """Four layers with a window, six without one and twice as wide heads."""
    both = GroupedAttention(16, 4, 64, 128, 4, full_kv_heads=2, full_head_dim=128)
    shape = dataclasses.replace(DENSE, attention=both)
    windowed = GroupedAttention(16, 4, 64, window=128, windowed_layers=4)
    parts = (
        dataclasses.replace(DENSE, layers=4, attention=windowed),
        dataclasses.replace(DENSE, layers=6, attention=GroupedAttention(16, 2, 128)),
    )
    assert shape.kv_bytes_per_token() == sum(part.kv_bytes_per_token() for part in parts)
    assert shape.windowed_bytes_per_token() == parts[0].kv_bytes_per_token()
    embedded = DENSE.embedding_parameters
    assert shape.parameters - embedded == sum(part.parameters - embedded for part in parts)
    for layout in (Layout(), Layout(tp=2)):
        model = CostModel(shape, IDEAL, layout)
        first, second = (CostModel(part, IDEAL, layout) for part in parts)
        assert model.kv_bytes_per_device == first.kv_bytes_per_device + second.kv_bytes_per_device
        for ask in (
            lambda one: one.decode([5000, 40]).seconds - one.decode([1, 1]).seconds,
            lambda one: one.prefill([(1000, 500)]).compute - one.prefill([(1000, 0)]).compute,
        ):
            assert ask(model) == pytest.approx(ask(first) + ask(second), rel=1e-6)
    # one matrix makes keys and values of the wide ones
    shared = GroupedAttention(
        16, 4, 64, 128, 4, full_kv_heads=2, full_head_dim=128, keys_are_values=True
    )
    saved = shape.parameters - dataclasses.replace(DENSE, attention=shared).parameters
    assert saved == 6 * DENSE.width * 2 * 128

"""Layouts: parsing, refusals, and the resulting mesh."""

import math

import pytest

from jdisagg.errors import LayoutError
from jdisagg.layout.axes import Layout, LogicalAxis, ModelGeometry, padded_vocabulary

DENSE = ModelGeometry(query_heads=8, kv_heads=4, ffn=64)
MOE = ModelGeometry(query_heads=8, kv_heads=4, ffn=64, experts=8, expert_ffn=32)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("", Layout()),
        ("tp=2", Layout(tp=2)),
        ("dp=1,tp=2,ep=1", Layout(1, 2, 1)),
        ("ep=4,dp=2, tp=2", Layout(2, 2, 4)),
        ("dp=4,tp=4,ep=16", Layout(4, 4, 16)),
        ("pp=2,tp=2", Layout(tp=2, pp=2)),
    ],
)
def test_a_layout_is_read_in_any_order_and_printed_so_that_it_can_be_read_again(
    text: str, layout: Layout
) -> None:
    assert Layout.parse(text) == layout
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    "text", ["tp", "tp=", "tp=two", "tp=-1", "sp=2", "tp=2,tp=2", "tp=2 dp=2", "tp=1.5"]
)
def test_text_that_is_no_layout_is_refused_with_the_part_that_is_wrong(text: str) -> None:
    with pytest.raises(LayoutError, match="is not one of dp=N, tp=N, ep=N"):
        Layout.parse(text)


def test_a_number_alone_is_refused_with_the_flags_that_count_workers() -> None:
    with pytest.raises(LayoutError, match="how many workers: --prefill_workers"):
        Layout.parse("2")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 1), "dp must be a positive integer, got 0"),
        ((1, -2, 1), "tp must be a positive integer, got -2"),
        ((2, 2, 3), r"ep=3 must be 1, tp=2 or dp\*tp=4"),
        ((4, 1, 2), r"ep=2 must be 1, tp=1 or dp\*tp=4"),
        ((1, 1, 1, 0), "pp must be a positive integer, got 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_the_numbers(
    sizes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout(*sizes)


@pytest.mark.parametrize(
    ("layout", "kv_heads", "shape"),
    [
        (Layout(), 4, (1, 1, 1)),
        (Layout(tp=4), 4, (1, 4, 1)),
        (Layout(tp=4), 2, (1, 2, 2)),
        (Layout(tp=4), 1, (1, 1, 4)),
        (Layout(dp=2, tp=2), 8, (2, 2, 1)),
        (Layout(tp=3), 6, (1, 3, 1)),
        (Layout(dp=4, tp=16, ep=64), 4, (4, 4, 4)),
    ],
)
def test_kv_heads_are_sharded_as_far_as_they_go_and_replicated_beyond(
    layout: Layout, kv_heads: int, shape: tuple[int, int, int]
) -> None:
    assert layout.mesh_shape(kv_heads) == shape
    assert math.prod(shape) == layout.devices


@pytest.mark.parametrize(("tp", "kv_heads"), [(3, 4), (4, 6), (6, 4), (2, 3)])
def test_a_tp_that_neither_divides_the_kv_heads_nor_is_a_multiple_is_refused(
    tp: int, kv_heads: int
) -> None:
    with pytest.raises(
        LayoutError, match=f"tp={tp} does not divide the model's {kv_heads} kv heads"
    ):
        Layout(tp=tp).mesh_shape(kv_heads)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tp=4),
        Layout(tp=8),
        Layout(dp=2, tp=2),
        Layout(tp=4, ep=4),
        Layout(dp=8, tp=1, ep=8),
        Layout(dp=2, tp=2, ep=2),
    ],
)
def test_a_layout_that_divides_the_model_is_accepted(layout: Layout) -> None:
    layout.check(MOE)


@pytest.mark.parametrize(
    ("layout", "geometry", "message"),
    [
        (Layout(tp=3), DENSE, "tp=3 does not divide the model's 4 kv heads"),
        (
            Layout(tp=4),
            ModelGeometry(query_heads=6, kv_heads=2, ffn=64),
            "tp=4 does not divide the model's 6 query heads",
        ),
        (
            Layout(tp=4),
            ModelGeometry(query_heads=8, kv_heads=4, ffn=66),
            "tp=4 does not divide the model's 66 ffn width",
        ),
        (Layout(dp=4, tp=1, ep=4), DENSE, "ep=4: the model has no experts"),
        (Layout(dp=16, tp=1, ep=16), MOE, "ep=16 does not divide the model's 8 experts"),
        (
            Layout(tp=4),
            ModelGeometry(8, 4, 64, experts=8, expert_ffn=30),
            "tp=4 does not divide the model's 30 expert ffn width",
        ),
        (
            Layout(tp=4),
            ModelGeometry(8, 4, 64, state_key_heads=6, state_value_heads=12),
            "share of kv heads=4 does not divide the model's 6 key heads of layers with state",
        ),
        (
            Layout(tp=4),
            ModelGeometry(8, 2, 64, state_key_heads=2, state_value_heads=6),
            "tp=4 does not divide the model's 6 value heads of layers with state",
        ),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused_with_the_numbers(
    layout: Layout, geometry: ModelGeometry, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        layout.check(geometry)


def test_whole_experts_leave_their_width_unsharded() -> None:
    geometry = ModelGeometry(query_heads=8, kv_heads=4, ffn=64, experts=8, expert_ffn=30)
    Layout(tp=4, ep=4).check(geometry)


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        (Layout(tp=4), ()),
        (Layout(tp=4, ep=4), ("kv", "rep")),
        (Layout(dp=2, tp=2, ep=2), ("kv", "rep")),
        (Layout(dp=2, tp=2, ep=4), ("dp", "kv", "rep")),
        (Layout(dp=4, tp=1, ep=4), ("dp", "kv", "rep")),
    ],
)
def test_experts_are_spread_over_the_axes_that_ep_names(
    layout: Layout, axes: tuple[str, ...]
) -> None:
    assert layout.expert_axes() == axes
    _, kv, rep = layout.mesh_shape(4)
    sizes = {"dp": layout.dp, "kv": kv, "rep": rep}
    assert math.prod(sizes[axis] for axis in axes) == layout.ep
    table = layout.axis_table()
    assert table["expert"] == axes
    assert bool(table["expert"]) != bool(table["expert_ffn"]), (
        "an expert is sharded inside, or whole: never both"
    )


def test_each_logical_axis_has_a_place() -> None:
    assert Layout().axis_table().keys() == set(LogicalAxis.__args__)


@pytest.mark.parametrize(
    ("vocabulary", "tp", "padded"), [(512, 4, 512), (513, 4, 516), (1, 8, 8), (32000, 3, 32001)]
)
def test_the_vocabulary_is_padded_to_a_multiple_of_tp(
    vocabulary: int, tp: int, padded: int
) -> None:
    assert padded_vocabulary(vocabulary, tp) == padded

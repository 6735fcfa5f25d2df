"""For any cache, the rows hold each byte once, and a hand-off transfers the bytes that the spec
states."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jdisagg.errors import ConfigError
from jdisagg.layout.kv_spec import DTYPE_BYTES, KVComponent, KVLayer, KVSpec
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.layout.reshard_plan import head_granule, plan_handoff
from tests.layout.plans import bytes_per_pair, rank_boxes

UNHURRIED = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
ROW_BYTES = {**DTYPE_BYTES, "uint8": 1, "uint16": 2}


@st.composite
def specs(draw: st.DrawFn) -> KVSpec:
    """Layers of up to three kinds, whose components have heads or none."""
    shards = draw(st.sampled_from([1, 2, 4, 6]))
    dtypes = st.sampled_from(["", "", "float32", "bfloat16", "int8"])

    def component(index: int) -> KVComponent:
        heads = shards * draw(st.sampled_from([0, 1, 1, 2, 3]))
        # what has no heads can be cut into as many parts as there can be heads
        width = draw(st.integers(1, 40)) if heads else 72 * draw(st.integers(1, 3))
        return KVComponent(f"part{index}", heads, width, draw(dtypes))

    kinds = [
        KVLayer(tuple(component(index) for index in range(draw(st.integers(1, 3)))))
        for _ in range(draw(st.integers(1, 3)))
    ]
    return KVSpec(tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))), "bfloat16")


def card(first: int, dp: int, kv: int, rep: int) -> MeshCard:
    count = dp * kv * rep
    return MeshCard((dp, kv, rep), tuple(range(first, first + count)), (0,) * count)


@UNHURRIED
@given(specs())
def test_the_rows_hold_every_byte_once(spec: KVSpec) -> None:
    everything = range(len(spec.layers))
    row_bytes = spec.row_heads * spec.row_width * ROW_BYTES[spec.row_dtype]
    assert spec.rows(everything) * row_bytes == spec.bytes_per_token
    assert spec.bytes_per_token == sum(
        max(1, part.heads) * part.width * DTYPE_BYTES[part.dtype or spec.dtype]
        for layer in spec.layers
        for part in layer.components
    )
    assert all(part.heads % spec.row_heads == 0 for part in spec.components)
    parts = [spec.rows(range(layer, layer + 1)) for layer in everything]
    assert [spec.first_row(layer) for layer in everything] == [
        sum(parts[:layer]) for layer in everything
    ]


@UNHURRIED
@given(specs())
def test_a_device_keeps_its_share_of_heads_and_all_of_what_has_none(spec: KVSpec) -> None:
    for shards in (count for count in range(1, spec.row_heads + 1) if spec.row_heads % count == 0):
        without = sum(
            part.width * DTYPE_BYTES[spec.dtype_of(part)]
            for part in spec.components
            if not part.heads
        )
        assert spec.bytes_per_device(shards) * shards == spec.bytes_per_token + without * (
            shards - 1
        )


@UNHURRIED
@given(specs(), st.data())
def test_a_hand_off_moves_the_specs_bytes_once_to_each_replica(spec, data) -> None:
    shards = st.sampled_from(
        [count for count in range(1, spec.row_heads + 1) if spec.row_heads % count == 0]
    )
    counts = st.tuples(st.integers(1, 2), shards, st.integers(1, 2))
    source, target = card(0, *data.draw(counts)), card(100, *data.draw(counts))
    tokens, rows = 16, spec.rows(range(len(spec.layers)))
    shape = (1, rows, spec.row_heads, tokens, spec.row_width)
    granule = head_granule(spec.row_heads, source.head_shards, target.head_shards)
    plan = plan_handoff(rank_boxes(source, 0, shape), rank_boxes(target, 0, shape), granule)
    moved = bytes_per_pair(plan, ROW_BYTES[spec.row_dtype])
    assert sum(moved.values()) == tokens * spec.bytes_per_token * target.shape[2]
    received: dict[int, int] = {}
    for (_, device), count in moved.items():
        received[device] = received.get(device, 0) + count
    assert set(received.values()) == {tokens * spec.bytes_per_token // target.head_shards}


def test_keys_and_values_are_a_row_each_and_a_latent_is_one() -> None:
    llama = KVSpec.attention(32, 8, 128, "bfloat16")
    assert (llama.row_heads, llama.row_width, llama.row_dtype) == (8, 128, "bfloat16")
    assert (llama.rows(range(32)), llama.bytes_per_token) == (64, 131_072)
    deepseek = KVSpec.latent(61, 512 + 64, "bfloat16")
    assert (deepseek.row_heads, deepseek.row_width) == (1, 576)
    assert (deepseek.rows(range(61)), deepseek.bytes_per_token) == (61, 70_272)
    assert deepseek.bytes_per_device(1) == 70_272


def test_values_of_several_types_travel_as_bits_of_the_narrowest() -> None:
    layer = KVLayer((KVComponent("k", 2, 8), KVComponent("state", 2, 4, "float32")))
    spec = KVSpec((layer,), "bfloat16")
    assert (spec.row_dtype, spec.row_width, spec.rows(range(1))) == ("uint16", 8, 2)


def test_latents_beside_state_are_cut_into_as_many_parts_as_the_state_has_heads() -> None:
    state = (KVComponent("inputs", 8, 30), KVComponent("recurrent", 8, 64, "float32"))
    layers = (KVLayer((), state=state), KVLayer((KVComponent("latent", 0, 20),)))
    spec = KVSpec(layers, "bfloat16")
    assert (spec.row_heads, spec.row_width, spec.rows(range(2))) == (4, 5, 1)
    assert spec.is_cut(spec.components[0])
    assert spec.bytes_per_device(4) == spec.bytes_per_token == 40
    assert spec.state.row_heads == 8
    assert KVSpec(layers[1:], "bfloat16").row_heads == 1


def test_a_component_without_heads_that_cannot_be_cut_is_refused() -> None:
    layer = KVLayer((KVComponent("k", 4, 8), KVComponent("latent", 0, 6)))
    with pytest.raises(ConfigError, match="'latent' has no heads and 6 values.* into 4 parts"):
        KVSpec((layer,), "float32")


@pytest.mark.parametrize(
    ("windows", "can_part"),
    [
        ((None, 8, 8, None), True),
        ((None, 8, 16, None), True),
        ((None,) * 4, False),
        ((8,) * 4, False),
    ],
)
def test_layers_with_a_window_can_be_kept_apart_from_others_without_one(
    windows: tuple[int | None, ...], can_part: bool
) -> None:
    spec = KVSpec.attention(4, 2, 16, "float32", windows)
    assert spec.can_part == can_part
    kinds = (spec.windowed, spec.unwindowed)
    assert sum(kind.bytes_per_token for kind in kinds) == spec.bytes_per_token
    layers = sorted(index for kind in kinds for index in kind.positioned)
    assert layers == [0, 1, 2, 3] and spec.widest_window == max(one or 0 for one in windows)


@UNHURRIED
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 20), st.sampled_from([None, 8, 16])),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 4),
)
def test_kinds_of_layers_that_are_kept_apart_keep_each_byte_once(kinds, shards) -> None:
    """Layers with their own heads and widths, with or without a window, sharded as both allow."""
    layers = tuple(
        KVLayer(
            (KVComponent("k", heads * shards, width), KVComponent("v", heads * shards, width)),
            window,
        )
        for heads, width, window in kinds
    )
    spec = KVSpec(layers, "bfloat16")
    apart = (spec.windowed, spec.unwindowed)
    assert spec.can_part == all(kind.components for kind in apart)
    assert sum(kind.bytes_per_token for kind in apart) == spec.bytes_per_token
    everything = range(len(layers))
    for kind in (kind for kind in apart if kind.components):
        row_bytes = kind.row_heads * kind.row_width * ROW_BYTES[kind.row_dtype]
        assert kind.rows(everything) * row_bytes == kind.bytes_per_token
        assert kind.row_heads % spec.row_heads == 0
    held = [kind.bytes_per_device(shards) for kind in apart]
    assert sum(held) * shards == spec.bytes_per_token


def test_layers_whose_heads_divide_otherwise_apart_than_together_stay_together() -> None:
    window = KVLayer((KVComponent("k", 4, 8), KVComponent("latent", 0, 6)), 8)
    spec = KVSpec((window, KVLayer((KVComponent("k", 2, 8),))), "float32")
    assert not spec.can_part

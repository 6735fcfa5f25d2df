"""Costs of recurrent layers, which hold state in place of KV."""

from dataclasses import replace

import pytest

from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.hardware import Link
from jdisagg.costs.kv_facts import kv_facts
from jdisagg.costs.linear_attention import LinearAttention
from jdisagg.layout.axes import Layout
from tests.costs.kinds import DENSE, IDEAL


def test_a_step_reads_and_writes_the_state_of_each_sequence_and_kv_of_the_other_layers() -> None:
    """Of eight in ten layers: a float32 matrix of 128 x 128 a value head, and three inputs of a
    convolution over 2 x 8 x 128 + 16 x 128 channels."""
    hybrid = replace(DENSE, linear=LinearAttention(8, 8, 16, 128, 128, 4))
    state = 8 * (16 * 128 * 128 * 4 + 3 * 4096 * 2)
    assert hybrid.state_bytes() == state
    assert hybrid.kv_bytes_per_token() == DENSE.kv_bytes_per_token() // 5
    model = CostModel(hybrid, IDEAL)
    assert CostModel(hybrid, IDEAL, Layout(tp=2)).state_bytes_per_device == state / 2
    short, long = model.decode([1]).seconds, model.decode([1001]).seconds
    assert long - short == pytest.approx(1000 * hybrid.kv_bytes_per_token() / 1e12, rel=1e-6)
    read = hybrid.parameters - hybrid.vocabulary * hybrid.width
    assert short == pytest.approx((2 * read + 2 * state) / 1e12, rel=0.01)
    wire = Link("slow", 1e9, 0.0, 1.0)
    assert model.transfer(0, wire).communication == pytest.approx(state / 1e9)
    said = dict(kv_facts(hybrid, "bfloat16", "none", 1000, 1.0))
    assert said["state per sequence"] == "8.59 MB, independent of its length"
    assert "state per sequence" not in dict(kv_facts(DENSE, "bfloat16", "none", 1000, 1.0))


def test_what_all_heads_of_mamba_share_is_on_every_shard_and_need_not_divide() -> None:
    """One group for 16 heads of 64 with a state of 128 each: each kv shard makes what it shares,
    and its convolution's last inputs are kept once for each of 8 kv heads."""
    mamba = LinearAttention(8, 1, 16, 128, 64, 4, corrects=False, key_copies=8)
    hybrid = replace(DENSE, linear=mamba)
    assert hybrid.state_bytes() == 8 * (16 * 128 * 64 * 4 + 3 * (1024 + 8 * 256) * 2)
    width, inner = DENSE.width, 16 * 64
    into, convolution = 2 * inner + 256 + 16, (inner + 256) * 4
    assert mamba.parameters(width) == width * (into + inner) + convolution
    one, two = (CostModel(hybrid, IDEAL, Layout(tp=tp)) for tp in (1, 2))
    shared = 8 * 2 * 256 * (width + 4)
    halved = one.weight_bytes_per_device - shared
    assert two.weight_bytes_per_device == pytest.approx(halved / 2 + shared)


def test_layers_of_one_part_each_cost_what_half_as_many_of_both_do() -> None:
    parted = replace(
        DENSE, layers=2 * DENSE.layers, without_mixer=DENSE.layers, without_ffn=DENSE.layers
    )
    assert parted.parameters == DENSE.parameters
    assert parted.kv_bytes_per_token() == DENSE.kv_bytes_per_token()
    whole, halves = CostModel(DENSE, IDEAL, Layout(tp=2)), CostModel(parted, IDEAL, Layout(tp=2))
    assert halves.decode([100, 2000]).seconds == pytest.approx(whole.decode([100, 2000]).seconds)
    assert halves.prefill([(512, 0)]).seconds == pytest.approx(whole.prefill([(512, 0)]).seconds)

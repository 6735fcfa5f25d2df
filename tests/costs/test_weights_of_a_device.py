"""Weights on one device of a layout, by hand from the sizes of the models."""

import dataclasses

import pytest

from jdisagg.costs.catalog import CATALOG
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.kernels import Kernels
from jdisagg.layout.axes import Layout
from tests.costs.named import DEEPSEEK, H100, H200, LLAMA_31_70B


def test_a_device_holds_whole_what_tensor_parallelism_does_not_cut() -> None:
    """By hand from the sizes: a latent's projections and routers, and one kv head where there are
    fewer than devices."""
    latent = 7168 * (1536 + 512 + 64)
    cut = 128 * (1536 * (128 + 64) + 512 * (128 + 128) + 128 * 7168)
    ffn = 3 * 3 * 7168 * 18432 + 58 * 3 * 7168 * 2048  # of the dense layers, and the shared experts
    routers, experts, embeddings = 58 * 7168 * 256, 58 * 3 * 7168 * 2048 * 256, 2 * 129280 * 7168
    for layout in (Layout(tp=8, ep=8), Layout(dp=4, tp=4, ep=16)):
        whole, shared = 61 * latent + routers, 61 * cut + ffn + embeddings
        held = 2 * (whole + shared / layout.tp + experts / layout.ep)
        model = CostModel(DEEPSEEK, H200, layout)
        assert model.weight_bytes_per_device == pytest.approx(held, rel=1e-12)
    whole = 80 * 8192 * 128 * 2
    shared = 80 * (2 * 8192 * 64 * 128 + 3 * 8192 * 28672) + 2 * 128256 * 8192
    model = CostModel(LLAMA_31_70B, H100, Layout(tp=16))
    assert model.weight_bytes_per_device == pytest.approx(2 * (whole + shared / 16), rel=1e-12)
    quantized = dataclasses.replace(DEEPSEEK, matrix_bits=8)
    plain = routers + 61 * 128 * 512 * (128 + 128) + embeddings  # routers, kv_b, stem
    held = 61 * latent + 61 * cut + ffn + routers + experts + embeddings + plain
    assert CostModel(quantized, H200).weight_bytes_per_device == held
    for shape in CATALOG.values():
        assert CostModel(shape, H100).weight_bytes_per_device == pytest.approx(2 * shape.parameters)


def test_speculation_adds_one_layer_of_weights_and_of_kv() -> None:
    shape, card, layout = DEEPSEEK, H200, Layout(dp=2, tp=4, ep=8)
    drafting = dataclasses.replace(card, kernels=Kernels(draft_tokens=2, acceptance=0.8))
    with_drafts, without = (CostModel(shape, one, layout) for one in (drafting, card))
    latent = 7168 * (1536 + 512 + 64)
    cut = 128 * (1536 * (128 + 64) + 512 * (128 + 128) + 128 * 7168)
    dense = 3 * 3 * 7168 * 18432 + 58 * 3 * 7168 * 2048
    layer = latent + (cut + dense / 61) / 4 + 58 / 61 * 7168 * 256 + 3 * 7168 * 2048 * 256 / 8
    added = with_drafts.weight_bytes_per_device - without.weight_bytes_per_device
    assert added == pytest.approx(2 * layer, rel=1e-9)
    assert with_drafts.kv_bytes_per_device / without.kv_bytes_per_device == pytest.approx(62 / 61)

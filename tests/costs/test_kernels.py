"""Kernel properties: each field of `Kernels` changes its own term by its own factor."""

import pytest

from jdisagg.costs.catalog import geometry
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.kernels import Kernels
from jdisagg.layout.axes import Layout
from tests.costs.named import H200, LLAMA_31_8B

CARD = H200
OP = CARD.efficiency.op_seconds


def model(name: str, tp: int = 1, **kernels: object) -> CostModel:
    return CostModel(geometry(name), CARD, Layout(tp=tp), kernels=Kernels(**kernels))  # type: ignore[arg-type]


def test_products_in_fp8_take_half_as_long_and_attention_does_not() -> None:
    plain, fast = model("llama-3.1-8b"), model("llama-3.1-8b", matrix_speed=2.0)
    without = [each.prefill_of(4096, 0.0, 4096.0, 0).compute for each in (plain, fast)]
    assert without[1] == pytest.approx(without[0] / 2)
    pairs = plain.pairs(4096)
    with_attention = [each.prefill_of(4096, pairs, 4096.0, 0).compute for each in (plain, fast)]
    assert with_attention[0] - without[0] == pytest.approx(with_attention[1] - without[1])


def test_a_direct_all_reduce_waits_as_long_for_eight_as_for_two() -> None:
    def latency(tp: int, **kernels: object) -> float:
        each = model("llama-3.1-70b", tp, **kernels)
        one, two = each.decode_of(1, 1.0).communication, each.decode_of(2, 2.0).communication
        return 2 * one - two  # what does not grow with the message

    assert latency(8) == pytest.approx(3 * latency(2))
    assert latency(8, direct=True) == pytest.approx(latency(2, direct=True))
    assert latency(2, direct=True) == pytest.approx(latency(2))


def test_fused_operations_start_three_times_a_layer_and_quantizing_adds_one_a_product() -> None:
    def overhead(**kernels: object) -> float:
        return model("llama-3.1-8b", 1, **kernels).decode_of(1, 1.0).overhead

    layers = LLAMA_31_8B.layers
    assert overhead() - overhead(fused=True) == pytest.approx(3 * layers * OP)
    # Four products a layer: into attention, out of it, into the ffn, out of it.
    assert overhead(quantizes=True) - overhead() == pytest.approx(4 * layers * OP)


def test_experts_alone_in_four_bits_leave_the_other_weights_as_they_are() -> None:
    shape = geometry("qwen3-30b-a3b")
    assert shape.experts is not None
    plain, few = model(shape.name), model(shape.name, expert_bits=4)
    experts = shape.expert_layers * shape.experts.count * 3 * shape.width * shape.experts.ffn
    saved = plain.weight_bytes_per_device - few.weight_bytes_per_device
    assert saved == pytest.approx(experts * (2 - 0.5))


def test_rows_copied_to_their_experts_are_fewer_a_device_where_experts_lie_apart() -> None:
    def copied(layout: Layout) -> float:
        seconds = []
        for gathers in (False, True):
            each = CostModel(
                geometry("qwen3-30b-a3b"), CARD, layout, kernels=Kernels(gathers=gathers)
            )
            seconds.append(each.prefill_of(4096, 0.0, 4096.0, 1).memory)
        return seconds[1] - seconds[0]

    shape = geometry("qwen3-30b-a3b")
    assert shape.experts is not None
    rows = 4096 * shape.experts.active
    whole = rows * 3 * (shape.width + shape.experts.ffn) * 2 * shape.expert_layers
    per_byte = 1 / (CARD.memory_bytes_per_second * CARD.efficiency.gemm_memory)
    assert copied(Layout()) == pytest.approx(whole * per_byte)
    assert copied(Layout(tp=4, ep=4)) == pytest.approx(whole * per_byte / 4)


def test_serial_experts_take_the_time_of_reading_and_of_multiplying_one_after_the_other() -> None:
    def routed(**kernels: object) -> float:
        each = model("qwen3-30b-a3b", 1, **kernels)
        return each.prefill_of(512, 0.0, 512.0, 0).seconds

    shape = geometry("qwen3-30b-a3b")
    assert shape.experts is not None
    weights = shape.expert_layers * 3 * shape.width * shape.experts.ffn
    reached = CARD.efficiency
    multiplied = 2 * weights * 512 * shape.experts.active / (CARD.peak_flops * reached.gemm_compute)
    bandwidth = CARD.memory_bytes_per_second * reached.gemm_memory
    read = weights * shape.experts.touched(512) * 2 / bandwidth
    assert routed(expert_serial=True) - routed() == pytest.approx(min(read, multiplied))
    serial = routed(expert_serial=True)
    assert serial - routed(expert_serial=True, expert_memory=2.0) == pytest.approx(read / 2)

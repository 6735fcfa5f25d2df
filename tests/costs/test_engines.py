"""Engines as the cost model prices them: exchange kernels, overlap, redundant experts, drafts."""

from dataclasses import replace

import pytest

from jdisagg.costs.catalog import geometry
from jdisagg.costs.collectives import exchange_seconds
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.engines import ENGINES, JDISAGG, Software, engine_named
from jdisagg.costs.hardware import accelerator
from jdisagg.costs.kernels import Kernels
from jdisagg.costs.model_geometry import AssistantSizes
from jdisagg.errors import ConfigError, LayoutError
from jdisagg.layout.axes import Layout

DEEPSEEK, LLAMA = geometry("deepseek-v3"), geometry("llama-3.1-8b")
H100 = accelerator("h100")
WIDE = Layout(dp=64, ep=64)
WIDTH = DEEPSEEK.width


def model(**changes: object) -> CostModel:
    """DeepSeek-V3 in fp8 on 64 H100 with SGLang's kernels, changed."""
    engine = ENGINES["sglang"]
    card = engine.card(H100, DEEPSEEK, WIDE, "fp8")
    kernels = replace(card.kernels, **changes)  # type: ignore[arg-type]
    return CostModel(engine.shape(DEEPSEEK, "fp8"), card, WIDE, kernels=kernels)


def exchanged(tokens: float, **changes: object) -> float:
    """Bytes that a GPU sends over its own network link in one layer, at full speed of the link and
    without latency."""
    engine = ENGINES["sglang"]
    card = engine.card(H100, DEEPSEEK, WIDE, "fp8")
    reached = replace(card.efficiency, collective_seconds=0.0)
    kernels = replace(card.kernels, exchange_bandwidth=1.0, **changes)  # type: ignore[arg-type]
    experts = DEEPSEEK.experts
    assert experts is not None
    seconds = exchange_seconds(
        replace(card, efficiency=reached),
        kernels,
        WIDE,
        experts,
        tokens,
        64 * tokens,
        (WIDTH, 2 * WIDTH),
    )
    return seconds * H100.scale_out.bytes_per_second


def test_few_tokens_go_to_each_expert_on_other_hosts() -> None:
    # Eight experts on eight hosts: seven of eight copies leave the host.
    assert exchanged(128) == pytest.approx(128 * 8 * 7 / 8 * 3 * WIDTH)


def test_of_many_tokens_each_host_gets_one_copy_and_groups_limit_the_hosts() -> None:
    hosts = 8 * (1 - (7 / 8) ** 8)
    assert hosts > 4  # so that the limit of four groups binds
    assert exchanged(4096) == pytest.approx(4096 * 4 * 7 / 8 * 3 * WIDTH)


def test_overlap_hides_the_exchange_behind_compute_and_never_costs() -> None:
    apart, hidden = model(overlaps=False), model()
    for sequences in (1, 8, 64, 256):
        alone = apart.decode_of(sequences, sequences * 2000)
        both = hidden.decode_of(sequences, sequences * 2000)
        assert both.seconds <= alone.seconds
        # A half batch computes while the other is exchanged: never less than either.
        assert both.seconds >= max(alone.exchange, alone.seconds - alone.exchange) * 0.999
    assert both.exchange < alone.exchange / 2
    assert hidden.decode_seconds(256, 256 * 2000) == both.seconds


def test_a_layout_that_does_not_divide_the_experts_needs_redundant_ones() -> None:
    layout = Layout(dp=72, ep=72)
    with pytest.raises(LayoutError, match="256 experts"):
        CostModel(DEEPSEEK, H100, layout)
    card = ENGINES["sglang"].card(H100, DEEPSEEK, layout, "fp8")
    costs = CostModel(DEEPSEEK, card, layout)
    even = CostModel(DEEPSEEK, card, Layout(dp=64, ep=64))
    # Four experts a GPU in both, 288 of 256 being replicas.
    assert costs.weight_bytes_per_device == pytest.approx(even.weight_bytes_per_device)


def test_drafts_divide_a_step_by_the_tokens_that_it_is_expected_to_yield() -> None:
    assert Kernels(draft_tokens=2, acceptance=0.5).tokens_per_step == 1.75
    plain = CostModel(LLAMA, H100)
    drafted = CostModel(LLAMA, H100, kernels=Kernels(draft_tokens=1, acceptance=1.0))
    # Few sequences: a step is bound by weights, which two tokens read once.
    assert 0.5 < drafted.decode_of(1, 1000).seconds / plain.decode_of(1, 1000).seconds < 0.6
    useless = CostModel(LLAMA, H100, kernels=Kernels(draft_tokens=3, acceptance=0.0))
    for sequences in (1, 256):
        tokens = float(sequences * 1000)
        assert (
            useless.decode_of(sequences, tokens).seconds
            > plain.decode_of(sequences, tokens).seconds
        )
    assert drafted.decode_seconds(8, 8000.0) == drafted.decode_of(8, 8000.0).seconds


def test_an_assistant_is_read_for_each_draft_and_has_no_kv() -> None:
    sizes = AssistantSizes(4, 100_000_000)
    shape = replace(LLAMA, assistant=sizes)
    kernels = Kernels(draft_tokens=3, acceptance=0.0)
    plain, layer, drafted = (
        CostModel(geometry, H100, kernels=these)
        for geometry, these in ((shape, Kernels()), (LLAMA, kernels), (shape, kernels))
    )
    added = drafted.weight_bytes_per_device - plain.weight_bytes_per_device
    assert added == sizes.parameters * 2
    assert drafted.kv_bytes_per_device == plain.kv_bytes_per_device < layer.kv_bytes_per_device
    assert plain.decode_of(1, 1000).memory < drafted.decode_of(1, 1000).memory
    assert drafted.decode_of(1, 1000).memory < layer.decode_of(1, 1000).memory


def test_software_is_read_from_flags() -> None:
    software = Software.of("vllm", "fp4", "2:0.8")
    card = software.card(H100, LLAMA, Layout())
    assert (card.kernels.draft_tokens, card.kernels.acceptance) == (2, 0.8)
    assert software.shape(LLAMA).matrix_bits == 4
    assert software.shape(DEEPSEEK).matrix_bits == 0, "of a mixture, only experts have 4 bits"
    assert Software.of("jdisagg", None, None).card(H100, LLAMA, Layout()) == H100


def test_an_a100_computes_fp8_weights_as_fast_as_bfloat16_and_reads_them_faster() -> None:
    engine, a100 = ENGINES["vllm"], accelerator("a100")
    speeds = {
        (card.name, weights): engine.card(card, LLAMA, Layout(), weights).kernels.matrix_speed
        for card in (H100, a100)
        for weights in ("", "fp8")
    }
    assert speeds.pop(("h100", "fp8")) == 1.5 and set(speeds.values()) == {1.0}
    plain, fewer = (
        CostModel(engine.shape(LLAMA, weights), engine.card(a100, LLAMA, Layout(), weights))
        for weights in ("", "fp8")
    )
    assert fewer.decode_seconds(1, 100.0) < 0.7 * plain.decode_seconds(1, 100.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: engine_named("ollama"), "no engine named 'ollama'"),
        (lambda: Software.of("vllm", None, "two"), "TOKENS:ACCEPTANCE"),
        (lambda: Software.of("vllm", None, "2:1.5"), "acceptance 1.5"),
        (lambda: JDISAGG.shape(LLAMA, "fp4"), "'fp4' is not served by jdisagg"),
        (lambda: ENGINES["vllm"].shape(LLAMA, "fp3"), "weights='fp3' is unknown"),
        (
            lambda: ENGINES["vllm"].shape(DEEPSEEK, "int8"),
            "deepseek-v3 with vllm; .* int4, fp8, fp4",
        ),
    ],
)
def test_software_that_does_not_exist_is_refused_by_name(call, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()

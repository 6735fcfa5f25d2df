"""The cost model against exact sizes, limits by hand, required directions, and published
measurements."""

import dataclasses
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.costs.catalog import CATALOG, geometry
from jdisagg.costs.cost_model import CODEC_BITS, Cost, CostModel, Kernels, wire_bytes_per_token
from jdisagg.costs.fitting import Errors, Observation, fit, predict, relative_errors
from jdisagg.costs.hardware import (
    HARDWARE,
    Efficiency,
    Link,
    accelerator,
    accelerator_from_fields,
    link,
)
from jdisagg.costs.model_geometry import CostGeometry, Experts, GroupedAttention
from jdisagg.errors import ConfigError, LayoutError
from jdisagg.layout.axes import Layout
from tests.costs.kinds import DENSE, IDEAL
from tests.costs.measured_steps import eager_accelerator, measured_steps
from tests.costs.named import A100, DEEPSEEK, H100, H200, LLAMA_70B, OPT_13B, QWEN_235B


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("llama-2-70b", 68.98, 68.98),
        ("llama-3-8b", 8.03, 8.03),
        ("llama-3-70b", 70.55, 70.55),
        ("bloom-176b", 176.25, 176.25),
        ("opt-13b", 12.85, 12.85),
        ("mixtral-8x7b", 46.70, 12.88),
        ("qwen3-235b-a22b", 235.1, 22.2),
        ("deepseek-v3", 671.0, 37.6),
        ("gpt-oss-20b", 20.91, 3.61 + 0.58),  # which count no embedding as active
        ("gpt-oss-120b", 116.83, 5.13 + 0.58),
    ],
)
def test_a_catalogued_model_has_the_parameters_its_makers_state(
    name: str, billions: float, active: float
) -> None:
    assert geometry(name).parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert geometry(name).active_parameters / 1e9 == pytest.approx(active, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "kilobytes"),
    [
        ("llama-3-70b", 320),
        ("qwen3-235b-a22b", 188),
        ("deepseek-v3", 68.625),
        ("gpt-oss-120b", 72),
        ("opt-13b", 800),
        ("bloom-176b", 3920),
    ],
)
def test_kv_bytes_a_token_are_those_of_the_models_heads_or_latent(
    name: str, kilobytes: float
) -> None:
    assert geometry(name).kv_bytes_per_token() == kilobytes * 1024


def test_windows_that_begin_beyond_the_last_layer_cost_what_no_windows_do() -> None:
    without, with_window = (
        CostModel(CostGeometry("m", 64, 26, 100, GroupedAttention(4, 4, 16, window, 0), 256), IDEAL)
        for window in (None, 512)
    )
    assert with_window.decode_of(8, 8e5).seconds == without.decode_of(8, 8e5).seconds
    assert with_window.prefill([(100_000, 0)]).seconds == without.prefill([(100_000, 0)]).seconds
    with pytest.raises(ConfigError, match="windowed_layers=-1 is not within 0..4"):
        CostGeometry("m", 8, 4, 10, GroupedAttention(1, 1, 8, 16, -1), 8)


def test_a_decode_step_of_one_sequence_reads_every_weight_once() -> None:
    model = CostModel(DENSE, IDEAL)
    read = DENSE.parameters - DENSE.vocabulary * DENSE.width  # the input embedding gives one row
    assert model.decode([1]).seconds == pytest.approx(2 * read / 1e12, rel=0.01)
    assert model.decode([1]).compute == 0.0


def test_a_long_prefill_takes_two_flop_a_parameter_and_token_and_the_attention() -> None:
    model, tokens = CostModel(DENSE, IDEAL), 4096
    layers = DENSE.parameters - 2 * DENSE.vocabulary * DENSE.width
    attention = 4 * 16 * 64 * 10 * tokens * (tokens + 1) / 2
    assert model.prefill([(tokens, 0)]).compute == pytest.approx(
        (2 * layers * tokens + attention) / 100e12, rel=1e-6
    )


def test_cached_tokens_cost_their_attention_alone() -> None:
    model = CostModel(DENSE, IDEAL)
    extra = model.prefill([(1024, 3072)]).compute - model.prefill([(1024, 0)]).compute
    assert extra == pytest.approx(4 * 16 * 64 * 10 * 1024 * 3072 / 100e12, rel=1e-6)
    assert model.prefill([(1024, 3072)]).seconds < model.prefill([(4096, 0)]).seconds


def test_a_window_bounds_the_pairs_and_the_context_read() -> None:
    windowed = dataclasses.replace(
        DENSE, attention=GroupedAttention(16, 4, 64, window=128, windowed_layers=10)
    )
    model, plain = CostModel(windowed, IDEAL), CostModel(DENSE, IDEAL)
    pairs = sum(min(position + 1, 128) for position in range(1000))
    base = plain.prefill([(1000, 0)]).compute - 4 * 16 * 64 * 10 * 1000 * 1001 / 2 / 100e12
    assert model.prefill([(1000, 0)]).compute == pytest.approx(
        base + 4 * 16 * 64 * 10 * pairs / 100e12, rel=1e-6
    )
    assert model.decode([5000]).seconds == pytest.approx(model.decode([128]).seconds, rel=1e-9)
    assert plain.decode([5000]).seconds > plain.decode([128]).seconds


def test_experts_touched_grow_from_the_active_ones_to_all() -> None:
    experts = Experts(128, 8, 1536)
    assert experts.touched(1) == pytest.approx(8)
    assert experts.touched(2) == pytest.approx(8 + 8 * (1 - 8 / 128))
    assert experts.touched(10_000) == pytest.approx(128)
    model = CostModel(QWEN_235B, IDEAL)
    read = model.decode([1]).seconds * 1e12 / 2
    assert read == pytest.approx(QWEN_235B.active_parameters - 151936 * 4096, rel=0.01)


def test_tensor_parallelism_divides_the_work_and_adds_two_all_reduces_a_layer() -> None:
    slow = dataclasses.replace(
        IDEAL,
        scale_up=Link("slow", 1e9, 0.0, 1.0),
        efficiency=dataclasses.replace(IDEAL.efficiency, collective_seconds=1e-5),
    )
    cost = CostModel(DENSE, slow, Layout(tp=4)).prefill([(512, 0)])
    message = 512 * 1024 * 2
    assert cost.communication == pytest.approx(2 * 10 * (2e-5 + 2 * 3 / 4 * message / 1e9))
    assert cost.exchange == 0.0
    assert CostModel(DENSE, slow).prefill([(512, 0)]).communication == 0.0


def test_experts_over_all_ranks_pay_an_exchange_of_their_own() -> None:
    shape, hardware = QWEN_235B, H200
    assert CostModel(shape, hardware, Layout(dp=4, tp=4, ep=16)).decode([1000] * 8).exchange > 0
    assert CostModel(shape, hardware, Layout(dp=4, tp=4, ep=4)).decode([1000] * 8).exchange == 0
    gathered = CostModel(shape, hardware, Layout(dp=16, tp=1, ep=16))
    sent = CostModel(shape, hardware, Layout(dp=16, tp=1, ep=16), kernels=Kernels("all_to_all"))
    assert sent.prefill([(4096, 0)]).exchange < gathered.prefill([(4096, 0)]).exchange


def test_pipeline_stages_hand_on_and_let_the_next_batch_in_earlier() -> None:
    one, two = (CostModel(OPT_13B, A100, Layout(pp=pp)) for pp in (1, 2))
    assert two.decode([500]).seconds > one.decode([500]).seconds
    assert two.interval_seconds(two.decode([500])) < 0.6 * one.interval_seconds(one.decode([500]))
    assert two.kv_tokens_per_rank() > 2 * one.kv_tokens_per_rank()


def test_what_leaves_a_domain_goes_over_the_slower_link() -> None:
    """Ranks of a domain each exchange with ranks of others; stages that fill a domain hand on to
    the next one."""
    slow = dataclasses.replace(IDEAL, scale_out=Link("slow", 1e9, 1e-3, 1.0))
    shape = CostGeometry(
        "sparse",
        1024,
        10,
        32000,
        GroupedAttention(16, 4, 64),
        4096,
        experts=Experts(64, 2, 512),
        expert_layers=10,
    )
    row = 1024 * 2
    for layout in (Layout(dp=8, tp=2, ep=16), Layout(dp=16, ep=16)):
        sent = (layout.dp - 1) * 512 * row
        assert CostModel(shape, slow, layout).prefill([(512, 0)]).exchange == pytest.approx(
            2 * 10 * sent / 1e9
        )
        wide = dataclasses.replace(slow, domain_devices=16)
        assert CostModel(shape, wide, layout).prefill([(512, 0)]).exchange == pytest.approx(
            0.0, abs=1e-9
        )
    for tp, stages, out in ((1, 8, 0), (4, 2, 0), (4, 3, 1), (4, 5, 2), (8, 2, 1), (2, 8, 1)):
        dense = dataclasses.replace(DENSE, attention=GroupedAttention(16, 8, 64))
        communication = (
            CostModel(dense, slow, Layout(tp=tp, pp=stages)).prefill([(512, 0)]).communication
        )
        assert communication == pytest.approx(out * (1e-3 + 512 * row / 1e9), abs=1e-9), (
            tp,
            stages,
        )


def test_a_mixed_step_costs_less_than_its_two_parts_and_is_each_where_the_other_is_missing() -> (
    None
):
    model = CostModel(LLAMA_70B, H100, Layout(tp=8))
    prefill = (512, model.pairs(512, 1024), 1536.0, 1)
    chunk, step = model.prefill([(512, 1024)]), model.decode_of(16, 16000.0)
    both = model.mixed_of(*prefill, 16, 16000.0)
    assert max(chunk.seconds, step.seconds) < both.seconds < chunk.seconds + step.seconds
    assert model.mixed_of(*prefill, 0, 0.0) == chunk
    assert model.mixed_of(0, 0.0, 0.0, 0, 16, 16000.0) == step


def test_a_mixed_step_whose_other_ranks_have_few_tokens_exchanges_less() -> None:
    spread = CostModel(geometry("qwen3-30b-a3b"), H100, Layout(dp=2, ep=2))
    rows = (1024, spread.pairs(1024), 1024.0, 1, 8, 8e3)
    alike, alone = spread.mixed_of(*rows), spread.mixed_of(*rows, elsewhere=8)
    assert alone.exchange < 0.75 * alike.exchange and alone.compute <= alike.compute


def test_products_of_whole_waves_take_their_arithmetic_and_one_tile_more_takes_a_wave_more() -> (
    None
):
    # 27 rows of tiles of 128 tokens by 4 of 256 columns are one wave of 108; every product of this
    # model is 1024 wide.
    shape = dataclasses.replace(
        OPT_13B, width=1024, attention=GroupedAttention(8, 4, 64), ffn=1024, vocabulary=1024
    )
    card = dataclasses.replace(
        A100,
        efficiency=Efficiency(
            1.0,
            1.0,
            1.0,
            1.0,
            0.0,
            0.0,
            0.0,
            0.0,
            step_seconds=0.0,
            prefill_seconds=0.0,
            sequence_seconds=0.0,
        ),
    )
    smooth = CostModel(shape, card)
    waves = CostModel(shape, card, kernels=Kernels(multiprocessors=108))
    whole, more = 27 * 128, 27 * 128 + 1
    assert smooth.prefill([(more, 0)]).compute < 1.001 * smooth.prefill([(whole, 0)]).compute
    assert waves.prefill([(more, 0)]).compute > 1.3 * waves.prefill([(whole, 0)]).compute
    assert all(
        waves.prefill([(tokens, 0)]).compute >= smooth.prefill([(tokens, 0)]).compute
        for tokens in (64, 500, whole, more, 8000)
    )


def test_a_latent_is_not_divided_by_tensor_parallelism() -> None:
    shape, hardware = DEEPSEEK, H200
    one, eight = (CostModel(shape, hardware, Layout(tp=tp)) for tp in (1, 8))
    assert eight._kv_bytes() == one._kv_bytes() == 576 * 2


def test_a_token_of_latent_context_costs_each_head_two_products_with_the_latent() -> None:
    model = CostModel(DEEPSEEK, IDEAL)
    added = model.decode_of(1, 3000.0).compute - model.decode_of(1, 2000.0).compute
    # Scores over latent and rope part, the mix over the latent: 2 x 128 x (512 + 64) and 2 x 128 x
    # 512.
    assert added == pytest.approx(1000 * 61 * 2 * 128 * (576 + 512) / 100e12)


@pytest.mark.parametrize("codec", CODEC_BITS)
def test_a_codec_sends_packed_values_and_a_scale_for_each_head(codec: str) -> None:
    packed = {"none": 128 * 2, "int8": 128 + 4, "fp8": 128 + 4, "int4": 64 + 4}[codec]
    assert wire_bytes_per_token(LLAMA_70B, 2, codec) == 80 * 2 * 8 * packed
    model = CostModel(LLAMA_70B, H100, Layout(tp=8))
    wire = link("infiniband-ndr")
    cost = model.transfer(1000, wire, codec)
    assert cost.communication == pytest.approx(5e-6 + 1000 * 80 * 2 * 8 * packed / 45e9)
    assert (cost.memory > 0) == (codec != "none")


def test_a_cost_says_its_terms_largest_first() -> None:
    assert (
        Cost(compute=0.001, communication=0.0025).explain()
        == "3.5 ms: communication 2.5 ms, compute 1 ms"
    )


def test_layouts_names_and_codecs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LayoutError, match="query heads|kv heads"):
        CostModel(DENSE, IDEAL, Layout(tp=3))
    with pytest.raises(ConfigError, match="11 pipeline stages"):
        CostModel(DENSE, IDEAL, Layout(pp=11))
    with pytest.raises(ConfigError, match="no hardware named 'h900'"):
        accelerator("h900")
    with pytest.raises(ConfigError, match="no link named"):
        link("string")
    with pytest.raises(ConfigError, match="no model named"):
        geometry("llama-9")
    with pytest.raises(ConfigError, match="no codec named"):
        wire_bytes_per_token(DENSE, 2, "zip")


def test_hardware_survives_a_file() -> None:
    for known in HARDWARE.values():
        fields = json.loads(json.dumps(dataclasses.asdict(known)))
        assert accelerator_from_fields(fields) == known
    with pytest.raises(ConfigError, match="unknown fields turbo"):
        accelerator_from_fields({**fields, "host": {**fields["host"], "turbo": 1}})


GONE, NAN = object(), float("nan")
NUMBER, MISSING = "must be a number, got ", "is missing"
POSITIVE, NOT_NEGATIVE = "must be a positive number, got ", "must be zero or more, got "
IMPOSSIBLE: list[tuple[str, object, str]] = [
    ("peak_flops", None, NUMBER + "None"),
    ("peak_flops", 10**400, NUMBER + "1000"),
    ("efficiency.gemm_compute", None, NUMBER + "None"),
    ("efficiency.gemm_compute", GONE, MISSING),
    ("efficiency.collective_bandwidth", 0, POSITIVE + "0"),
    ("efficiency.large_bytes", NAN, POSITIVE + "nan"),
    ("scale_up", None, "must be an object, got None"),
    ("scale_up.bytes_per_second", GONE, MISSING),
    ("scale_up.bytes_per_second", 0, POSITIVE + "0"),
    ("scale_out.bytes_per_second", -5, POSITIVE + "-5"),
    ("host.bytes_per_second", NAN, POSITIVE + "nan"),
    ("scale_up.efficiency", 0, POSITIVE + "0"),
    ("scale_up.latency_seconds", -1, NOT_NEGATIVE + "-1"),
    ("name", None, "must be a text, got None"),
    ("host.name", 5, "must be a text, got 5"),
    ("dollars_per_hour", -1, NOT_NEGATIVE + "-1"),
    ("dollars_per_hour", NAN, NOT_NEGATIVE + "nan"),
    ("domain_devices", 2.5, "must be a whole number, got 2.5"),
]


def test_an_impossible_description_is_refused_by_file_and_field() -> None:
    wrong = []
    for path, value, said in IMPOSSIBLE:
        fields = json.loads(json.dumps(dataclasses.asdict(HARDWARE["h100"])))
        *way, last = path.split(".")
        at = fields[way[0]] if way else fields
        if value is GONE:
            del at[last]
        else:
            at[last] = value
        with pytest.raises(ConfigError) as caught:
            accelerator_from_fields(fields, "m.json")
        part = f"{way[0]}: .*" if way else ".*"
        named = f"needed field '{last}'" if said == MISSING else last
        if not re.search(f"m.json: {part}{named} {said}", str(caught.value)):
            wrong.append((path, value, str(caught.value)))
    assert not wrong


def test_a_price_may_be_left_out_or_null() -> None:
    fields = dataclasses.asdict(HARDWARE["h100"])
    assert (
        accelerator_from_fields(
            {**fields, "dollars_per_hour": None, "measured": {}}
        ).dollars_per_hour
        is None
    )
    del fields["dollars_per_hour"]
    assert accelerator_from_fields(fields).dollars_per_hour is None


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(CATALOG)),
    st.sampled_from(sorted(HARDWARE)),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 4000),
    st.integers(0, 4000),
    st.integers(1, 64),
)
def test_more_tokens_more_context_and_more_sequences_never_cost_less(
    name: str, hardware: str, tp: int, new: int, cached: int, batch: int
) -> None:
    model = CostModel(geometry(name), accelerator(hardware), Layout(tp=tp))
    assert 0 < model.prefill([(new, cached)]).seconds <= model.prefill([(new + 1, cached)]).seconds
    assert model.prefill([(new, cached)]).seconds <= model.prefill([(new, cached + 1)]).seconds
    step = model.decode_of(batch, batch * (new + cached)).seconds
    assert 0 < step <= model.decode_of(batch + 1, (batch + 1) * (new + cached)).seconds
    assert step <= model.decode_of(batch, batch * (new + cached) + 1).seconds
    assert all(value >= 0 for value in dataclasses.astuple(model.prefill([(new, cached)])))


def test_a_fit_finds_the_constants_that_made_the_steps() -> None:
    llama = LLAMA_70B
    truth = dataclasses.replace(
        H100,
        efficiency=dataclasses.replace(
            H100.efficiency,
            gemm_compute=0.62,
            gemm_memory=0.7,
            collective_seconds=3e-5,
            collective_bandwidth=0.4,
        ),
    )
    prefills = [
        Observation(llama, Layout(tp=tp), "prefill", ((tokens, 0),), 1.0)
        for tp in (2, 4, 8)
        for tokens in (128, 512, 2048, 8192)
    ]
    decodes = [
        Observation(llama, Layout(tp=tp), "decode", ((sequences, 1000),), 1.0)
        for tp in (2, 4, 8)
        for sequences in (1, 8, 64)
    ]
    wanted = prefills + decodes
    seen = [
        dataclasses.replace(step, seconds=cost.seconds)
        for step, cost in zip(wanted, predict(truth, wanted), strict=True)
    ]
    names = ("gemm_compute", "gemm_memory", "collective_seconds", "collective_bandwidth")
    found = fit(H100, seen, names).efficiency
    for name in names:
        assert getattr(found, name) == pytest.approx(getattr(truth.efficiency, name), rel=0.05)


@pytest.mark.parametrize("machine", ["a100-80gb", "h100-80gb", "h100-80gb-pcap"])
def test_llama_fitted_over_all_tensor_parallel_degrees_predicts_bloom(machine: str) -> None:
    steps = measured_steps()
    llama, bloom = steps["llama-2-70b", machine], steps["bloom-176b", machine]
    fitted = fit(eager_accelerator(machine), llama.cells.all)
    assert Errors.of(relative_errors(fitted, llama.prefill)).median < 0.10
    assert Errors.of(relative_errors(fitted, llama.decode)).median < 0.10
    assert Errors.of(relative_errors(fitted, bloom.prefill)).median < 0.08
    assert Errors.of(relative_errors(fitted, bloom.decode)).median < 0.12


def test_a_fit_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to fit"):
        fit(IDEAL, [])
    with pytest.raises(ConfigError, match="seconds must be positive"):
        Observation(DENSE, Layout(), "decode", ((1, 10),), 0.0)

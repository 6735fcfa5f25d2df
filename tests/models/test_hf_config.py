"""config.json of every family: transformers' defaults for missing fields, and refusal by name of
unsupported ones."""

import math

import pytest

from jdisagg.errors import CheckpointError
from jdisagg.ops.activations import ClampedGate
from models.catalog import FAMILIES, read_config
from models.decoder_config import DecoderConfig
from models.hf_config import HfConfig

BASE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,  # noqa: E501
        "num_key_value_heads": 2, "rope_theta": 10000.0}  # fmt: skip
PARTLY_ROTATED = {
    "phi3",
    "glm",
    "glm4",
    "glm4v_text",
    "glm4_moe",
    "minimax",
    "minimax_m1",
    "minimax_m2",
    "minimax_m3_vl_text",
    "minimax_text_01",
    "mimo_v2_flash",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
}


ROPE_BY_LAYER = {"olmo3", "gemma3_text", "gemma4_text", "mimo_v2_flash", "step3p5"}
MINIMAX: dict[str, object] = {"postnorm": True, "attn_type_list": [0, 1] * 2}
# What a family's config must say beside it.
BESIDE: dict[str, dict[str, object]] = {
    "granitemoehybrid": {"layer_types": ["attention"] * 4, "num_local_experts": 0},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "minimax_m1": MINIMAX,
    "minimax_m3_vl_text": {"index_n_heads": 2},
    "minimax_text_01": MINIMAX,
    "nemotron_h": {"hybrid_override_pattern": "ME*-", "mamba_num_heads": 8, "n_groups": 2},
    # by default the last layer must be one without a window, and there are six to a pattern
    "gemma4_text": {
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
# An option that others refuse.
READ = {
    ("gemma2", "attn_logit_softcapping"),
    ("gemma", "hidden_act"),  # "gelu" means the approximation by a tanh
    ("qwen2_vl_text", "rope_scaling"),
    ("qwen2_5_vl_text", "rope_scaling"),
}
# Published configs of a family leave these out.
LEFT_OUT = {
    ("gemma3_text", "vocab_size"),
    ("gemma3_text", "num_attention_heads"),
    ("llama4_text", "intermediate_size"),
    ("qwen3_5_moe_text", "intermediate_size"),  # all of its layers have experts
    ("nemotron_h", "num_hidden_layers"),  # as many as its pattern
}


def _base(family: str) -> dict[str, object]:
    return {"model_type": family, **BASE, **BESIDE.get(family, {})}


def _read(family: str, **fields: object) -> DecoderConfig:
    return read_config(HfConfig(_base(family) | fields))


def _windows(config: DecoderConfig) -> list[int | None]:
    return [layer.window for layer in config.layers]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "field",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"],
)
def test_a_needed_field_that_is_missing_is_named(family: str, field: str) -> None:
    fields = {name: value for name, value in _base(family).items() if name != field}
    if (family, field) in LEFT_OUT:
        assert read_config(HfConfig(fields)).attention.query_heads in (4, 8)
        return
    with pytest.raises(CheckpointError, match=f"needed field '{field}' is missing"):
        read_config(HfConfig(fields))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quantization_config", {"quant_method": "bitsandbytes"}),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"rope_type": "longrope", "factor": 2.0}),
        ("rope_scaling", {"type": "mrope", "mrope_section": [1]}),
        ("attn_logit_softcapping", 50.0),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", 0),
        ("hidden_size", "32"),
        ("vocab_size", True),
        ("rms_norm_eps", "tiny"),
        ("rms_norm_eps", float("nan")),
        ("tie_word_embeddings", "yes"),
        ("head_dim", 7),
        ("architectures", ["LlamaForSequenceClassification"]),
    ],
)
def test_an_option_we_do_not_have_is_refused_by_name(
    family: str, field: str, value: object
) -> None:
    if (family, field) in READ:
        return
    with pytest.raises(CheckpointError, match=field):
        _read(family, **{field: value})


def test_gemma_2_bounds_what_it_is_not_told_to_leave_alone() -> None:
    # google/gemma-2-27b states both; a config that leaves them out has them, too
    stated = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": None}
    published = {"query_pre_attn_scalar": 144, "sliding_window": 9, "sliding_window_size": 9}
    plain, told = _read("gemma2"), _read("gemma2", **stated, **published)
    assert (plain.attention.cap, plain.logits_cap, plain.attention.head_dim) == (50.0, 30.0, 256)
    assert (told.attention.cap, told.logits_cap, told.attention.scale) == (20.0, 0.0, 1 / 12)
    assert (_windows(plain), _windows(told)) == ([4096, None] * 2, [9, None] * 2)


def test_gpt_oss_is_read_as_its_published_configs_state_it() -> None:
    # openai/gpt-oss-20b, and what transformers takes where nothing is said
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn"}
    yarn |= {"original_max_position_embeddings": 4096, "truncate": False}
    said = {"num_local_experts": 32, "experts_per_token": 4, "initial_context_length": 4096}
    said |= {"swiglu_limit": 7.0, "rope_theta": 150000, "rope_scaling": yarn}
    said |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}}
    silent = {field: value for field, value in BASE.items() if field != "rope_theta"}
    told = read_config(HfConfig({"model_type": "gpt_oss", **silent, **said}))
    plain = read_config(HfConfig({"model_type": "gpt_oss", **silent}))
    assert told.attention == plain.attention and told.context_tokens == 131072
    assert (plain.attention.sinks, plain.attention.head_dim) == (True, 64)
    assert (plain.attention.rope.factor, plain.attention.rope.theta) == (32.0, 150000.0)
    assert _windows(plain) == [128, None] * 2
    experts = told.experts
    assert experts is not None and (experts.experts, experts.experts_per_token) == (32, 4)
    assert experts.clamp == ClampedGate(7.0, 1.702) and experts.biased
    with pytest.raises(CheckpointError, match="swiglu_limit must be above zero, got -1"):
        _read("gpt_oss", swiglu_limit=-1.0)
    with pytest.raises(CheckpointError, match="num_experts_per_tok must be at most 3"):
        _read("gpt_oss", num_local_experts=3)


# half of a head is what Mistral 4 turns where nothing is said
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - PARTLY_ROTATED - {"mistral4"}))
def test_families_that_rotate_whole_heads_refuse_a_part(family: str) -> None:
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        _read(family, partial_rotary_factor=0.5)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - ROPE_BY_LAYER))
def test_families_whose_layers_rotate_alike_refuse_rope_by_layer(family: str) -> None:
    with pytest.raises(CheckpointError, match="rope_parameters"):
        _read(family, rope_parameters={"full_attention": {"rope_type": "default"}})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("is_causal", False),
        ("use_bidirectional_attention", True),
        ("dual_chunk_attention_config", {"chunk_size": 262144}),
        ("nobody_knows_this", 3),
        ("rope_scaling", {"rope_type": "default", "twist": 2}),
    ],
)
def test_nothing_that_is_not_known_to_be_harmless_passes_in_silence(
    family: str, field: str, value: object
) -> None:
    with pytest.raises(CheckpointError, match=field):
        _read(family, **{field: value})


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_change_nothing_pass(family: str) -> None:
    plain = _read(family)
    written = _read(
        family,
        transformers_version="4.46.0",
        torch_dtype="bfloat16",
        use_cache=True,
        pretraining_tp=1,
        attention_dropout=0.1,
        eos_token_id=[1, 2],
        unsloth_fixed=True,
        is_causal=True,
        # in Llama 4, null means attention without chunks
        **({} if family == "llama4_text" else {"attention_chunk_size": None}),
        nobody_knows_this=0,
    )
    assert written == plain


def test_options_that_the_config_itself_switches_off_are_harmless() -> None:
    full = ["full_attention"] * 4
    assert _read("llama", layer_types=full) == _read("llama")
    assert _read("llama", sliding_window=4096, use_sliding_window=False) == _read("llama")
    assert _read("qwen3_moe", layer_types=full, max_window_layers=3) == _read("qwen3_moe")
    assert _read("qwen2", sliding_window=131072, max_window_layers=70) == _read("qwen2")
    assert _read("mistral", layer_types=full, sliding_window=None) == _read(
        "mistral", sliding_window=None
    )


def test_all_that_is_not_supported_is_named_at_once_and_briefly() -> None:
    with pytest.raises(CheckpointError) as raised:
        _read("llama", surprise={"long": list(range(1000))}, attn_logit_softcapping=50.0)
    message = raised.value.message
    assert "surprise" in message and "attn_logit_softcapping=50.0 (capped" in message
    assert len(message) < 400


HYBRID = {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 4, "num_local_experts": 8}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", ["mamba"] * 4),  # nobody attends
        ("layer_types", ["mamba", "attention"]),
        ("layer_types", ["mamba", "conv"] * 2),
        ("mamba_n_heads", 5),
        ("mamba_n_groups", 3),
        ("mamba_d_conv", 1),
        ("num_experts_per_tok", 9),
        ("time_step_limit", [0.1]),
        ("time_step_limit", [0.2, 0.1]),
    ],
)
def test_a_hybrid_that_does_not_fit_itself_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=field):
        _read("granitemoehybrid", **(HYBRID | {field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hybrid_override_pattern", "ME*X"),
        ("hybrid_override_pattern", "ME--"),  # nobody attends
        ("num_hidden_layers", 5),
        ("layers_block_type", ["mamba", "conv"]),
        ("n_groups", 3),
        ("mlp_hidden_act", "silu"),
        ("mamba_hidden_act", "relu"),
        ("norm_eps", 1e-3),
        ("n_shared_experts", 2),
        ("n_group", 3),
        ("residual_in_fp32", True),
    ],
)
def test_a_pattern_that_does_not_fit_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=field):
        _read("nemotron_h", **{field: value})


KIMI_LISTS = {"kda_layers": [1, 2, 4], "full_attn_layers": [3]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mla_use_nope", False),
        ("moe_router_activation_func", "softmax"),
        ("num_expert_group", 2),  # n_group says 1
        ("num_shared_experts", 2),  # n_shared_experts says 1
        ("linear_attn_config", KIMI_LISTS | {"gate_lower_bound": -5.0}),
        ("linear_attn_config", KIMI_LISTS | {"kda_layers": [1, 2]}),
        ("linear_attn_config", KIMI_LISTS | {"kda_layers": [1, 2, 3, 4]}),
        ("linear_attn_config", KIMI_LISTS | {"num_heads": 0}),
        ("linear_attn_config", [1]),
        ("layer_types", ["linear_attention"] * 4),
        ("use_full_rank_gate", True),
    ],
)
def test_a_kimi_linear_that_we_do_not_have_is_refused_by_name(field: str, value: object) -> None:
    beside = {
        "n_shared_experts": 1,
        "n_group": 1,
        "layer_types": None,
        "linear_attn_config": KIMI_LISTS,
    }
    with pytest.raises(CheckpointError, match=field):
        _read("kimi_linear", **(beside | {field: value}))


def test_a_pattern_and_a_list_say_the_same_layers() -> None:
    kinds = ["mamba", "moe", "attention", "mlp"]
    new = ["linear_attention", "moe", "full_attention", "mlp"]
    listed = [_read("nemotron_h", layers_block_type=each) for each in (kinds, new)]
    assert listed[0] == listed[1] == _read("nemotron_h")
    assert [layer.parts for layer in listed[0].layers] == ["mixer", "ffn", "mixer", "ffn"]


def test_a_hybrid_says_the_limits_of_its_steps_in_any_form() -> None:
    forms = (None, [0, math.inf], [0.0, {"__float__": "Infinity"}])
    read = [_read("granitemoehybrid", **HYBRID, time_step_limit=form) for form in forms]
    assert {each.layers[0].mamba for each in read} == {read[0].layers[0].mamba}
    some = _read("granitemoehybrid", **HYBRID, time_step_limit=[0.001, 0.1]).mamba
    assert some and some.step_limits == (0.001, 0.1)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", None, 7])
def test_an_unknown_family_is_refused_with_the_known_ones(family: object) -> None:
    with pytest.raises(CheckpointError, match=r"model_type must be one of llama, .*got"):
        read_config(HfConfig({"model_type": family, **BASE}))


@pytest.mark.parametrize(
    "scaling",
    [{"rope_type": "linear"}, {"rope_type": "dynamic"}, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},  # noqa: E501
     {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 3.0}, {"rope_type": "linear", "factor": 0},  # noqa: E501
     {"rope_type": "linear", "factor": "2"}],
)  # fmt: skip
def test_rope_parameters_that_cannot_work_are_refused(scaling: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="rope_scaling"):
        _read("llama", rope_scaling=scaling)


def test_rope_reads_both_forms_and_rope_scaling_wins() -> None:
    old = _read(
        "llama", rope_theta=7.0, rope_scaling={"type": "linear", "factor": 2}
    ).attention.rope
    new = _read(
        "llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}
    ).attention.rope
    both = _read(
        "llama",
        rope_theta=7.0,
        rope_scaling={"type": "linear", "factor": 2},
        rope_parameters={"rope_type": "default"},
    ).attention.rope
    assert old == new == both
    assert _read("llama", rope_scaling=None, rope_parameters=None).attention.rope.type == "default"


def test_yarn_takes_its_factor_and_temperature_as_transformers_does() -> None:
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 64}
    implicit = _read("llama", max_position_embeddings=256, rope_scaling=yarn).attention.rope
    assert (implicit.factor, implicit.attention_factor) == (4.0, pytest.approx(1.1386294361))
    assert (
        _read(
            "llama", rope_scaling=yarn | {"factor": 4.0, "attention_factor": 0.5}
        ).attention.rope.attention_factor
        == 0.5
    )
    scaled = _read(
        "llama", rope_scaling=yarn | {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    ).attention.rope
    assert scaled.attention_factor == pytest.approx(1.1386294361 / 1.0693147181)


def test_the_context_is_what_the_rope_type_stretches_it_to() -> None:
    assert _read("llama", max_position_embeddings=100).context_tokens == 100
    assert (
        _read(
            "llama", max_position_embeddings=100, rope_scaling={"type": "linear", "factor": 4.0}
        ).context_tokens
        == 400
    )
    dynamic = _read(
        "llama", max_position_embeddings=100, rope_scaling={"type": "dynamic", "factor": 4.0}
    )
    assert (dynamic.context_tokens, dynamic.attention.rope.type) == (100, "default")
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    assert _read("qwen2", max_position_embeddings=100, rope_scaling=yarn).context_tokens == 400
    assert _read("qwen2", max_position_embeddings=400, rope_scaling=yarn).context_tokens == 400


def test_silent_fields_take_the_familys_own_defaults() -> None:
    silent = {
        name: value
        for name, value in BASE.items()
        if name not in ("rope_theta", "num_key_value_heads")
    }

    def read(family: str, **fields: object) -> DecoderConfig:
        return read_config(HfConfig({"model_type": family, **silent, **fields}))

    assert read("llama").attention.kv_heads == 4
    assert read("qwen3", num_key_value_heads=None).attention.kv_heads == 4
    assert (
        read("mixtral", num_attention_heads=8).attention.rope.theta == 1e6
        and read("llama").attention.rope.theta == 1e4
    )
    assert read("mixtral", num_attention_heads=8).norm_epsilon == 1e-5
    assert (
        read("qwen3_moe").attention.head_dim == 8
        and read("qwen3", num_attention_heads=32).attention.head_dim == 128
    )
    with pytest.raises(CheckpointError, match="num_key_value_heads must divide"):
        read("qwen2")


def test_biases_and_norms_follow_the_family() -> None:
    def marks(config: DecoderConfig) -> tuple[bool, ...]:
        attention = config.attention
        return (
            attention.qkv_bias,
            attention.output_bias,
            attention.qk_norm == "head",
            config.mlp_bias,
        )

    assert marks(_read("llama", attention_bias=True)) == (True, True, False, False)
    assert marks(_read("llama", mlp_bias=True)) == (False, False, False, True)
    assert marks(_read("qwen2")) == (True, False, False, False)
    assert marks(_read("qwen3")) == marks(_read("qwen3_moe")) == (False, False, True, False)
    assert marks(_read("qwen3", attention_bias=True)) == (True, True, True, False)
    assert marks(_read("mistral")) == marks(_read("mixtral")) == (False, False, False, False)


def test_latent_attention_is_read_from_configs_in_either_form() -> None:
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.7}
    old = {"rope_scaling": yarn | {"original_max_position_embeddings": 4096}, "head_dim": 64}
    experts = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2}
    v3 = _read("deepseek_v3", **old, **experts, qk_nope_head_dim=128)
    latent = v3.attention.latent
    assert latent is not None and v3.geometry.kv_heads == v3.attention.kv_heads == 1
    assert (latent.query_rank, latent.rank, latent.rope_dim) == (1536, 512, 64)
    assert v3.attention.head_dim == 192 and v3.attention.rope.head_dim == 64
    wider = 1 + 0.1 * 0.7 * math.log(40)
    assert v3.attention.scale == pytest.approx(192**-0.5 * wider**2)
    assert v3.attention.rope.interleaved and v3.left_aside == 1
    assert [layer.experts is not None for layer in v3.layers] == [False] * 3 + [True]
    lite = _read("deepseek_v2", q_lora_rank=None, num_experts_per_tok=6)
    assert lite.attention.latent is not None and lite.attention.latent.query_rank == 0
    assert lite.experts is not None and lite.experts.scores == "softmax"
    assert _read("kimi_k2", **experts).attention.latent == v3.attention.latent
    kinds = ["dense", "sparse", "dense", "sparse"]
    flash = _read("glm4_moe_lite", mlp_layer_types=kinds, rope_interleave=False)
    assert [layer.experts is not None for layer in flash.layers] == [False, True] * 2
    assert not flash.attention.rope.interleaved


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("deepseek_v2", {"norm_topk_prob": True}),
        ("deepseek_v2", {"topk_method": "noaux_tc"}),
        ("deepseek_v3", {"scoring_func": "softmax"}),
        ("deepseek_v3", {"n_group": 3}),
        ("deepseek_v3", {"moe_layer_freq": 2}),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}),
        ("kimi_k2", {"quantization_config": {"quant_method": "nvfp4"}}),
    ],
)
def test_what_of_latent_families_is_not_served_is_refused_by_name(family, fields) -> None:
    with pytest.raises(CheckpointError, match=next(iter(fields))):
        _read(family, num_experts_per_tok=2, **fields)


def test_gemma_3_is_read_as_its_published_configs_state_it() -> None:
    # google/gemma-3-4b-it says so little; google/gemma-3-27b-it states the sizes that differ.
    stated = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    more = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    text = {"model_type": "gemma3_text", **stated, **more}
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    beside = {"mm_tokens_per_image": 256, "boi_token_index": 255999, "vision_config": {}}
    config = read_config(HfConfig({**outer, **beside, "text_config": text}))
    attention = config.attention
    assert (config.vocabulary, config.tied, config.context_tokens) == (262208, True, 131072)
    assert (attention.query_heads, attention.kv_heads, attention.head_dim) == (8, 4, 256)
    assert (attention.scale, attention.rope.factor, attention.rope.theta) == (1 / 16, 8.0, 1e6)
    assert _windows(config)[:7] == [1024] * 5 + [None, 1024]
    local = config.layers[0].rope
    assert local is not None and (local.theta, local.type) == (10000.0, "default")
    wider = {"head_dim": 128, "query_pre_attn_scalar": 168, "num_attention_heads": 32}
    bigger = read_config(HfConfig({**outer, "text_config": text | wider}))
    assert bigger.attention.scale == pytest.approx(168**-0.5)
    for field, value in (("attn_logit_softcapping", 50.0), ("hidden_activation", "silu")):
        with pytest.raises(CheckpointError, match=field):
            read_config(HfConfig({**outer, "text_config": text | {field: value}}))


def test_windows_follow_the_family() -> None:
    assert _windows(_read("mistral")) == [4096] * 4
    assert _windows(_read("mistral", sliding_window=None)) == [None] * 4
    assert (
        _windows(_read("mixtral")) == [None] * 4
        and _windows(_read("mixtral", sliding_window=9)) == [9] * 4
    )
    assert _windows(_read("qwen2", sliding_window=9)) == [None] * 4
    assert _windows(_read("qwen2", sliding_window=9, use_sliding_window=True)) == [None] * 4
    assert _windows(
        _read("qwen3", sliding_window=9, use_sliding_window=True, max_window_layers=2)
    ) == [None, None, 9, 9]
    assert _windows(_read("qwen3", use_sliding_window=True, max_window_layers=0)) == [4096] * 4
    mixed = ["sliding_attention", "full_attention"] * 2
    assert (
        _windows(_read("qwen2", sliding_window=9, use_sliding_window=True, layer_types=mixed))
        == [9, None] * 2
    )
    assert _windows(_read("qwen3_moe", sliding_window=9, use_sliding_window=True)) == [9] * 4
    assert _windows(_read("qwen3_moe", sliding_window=9)) == [None] * 4
    for fields in (
        {"layer_types": mixed},
        {"layer_types": mixed[:1]},
        {"layer_types": ["chunked_attention"] * 4},
    ):
        with pytest.raises(CheckpointError, match="layer_types"):
            _read("qwen2", **fields)
    with pytest.raises(CheckpointError, match="sliding_window"):
        _read("llama", sliding_window=9)


def test_experts_lie_in_the_layers_that_qwen3_moe_says() -> None:
    def sparse(**fields: object) -> list[bool]:
        return [
            layer.experts is not None
            for layer in _read("qwen3_moe", num_experts=8, num_experts_per_tok=2, **fields).layers
        ]

    assert sparse() == [True] * 4
    assert sparse(decoder_sparse_step=2) == [False, True, False, True]
    assert sparse(mlp_only_layers=[1]) == [True, False, True, True]
    config = _read("qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=20)
    assert config.experts is not None and not config.experts.normalised
    assert (config.geometry.ffn, config.geometry.experts, config.geometry.expert_ffn) == (0, 8, 20)
    with pytest.raises(CheckpointError, match="num_experts_per_tok"):
        _read("qwen3_moe", num_experts=4, num_experts_per_tok=5)
    with pytest.raises(CheckpointError, match="mlp_only_layers"):
        _read("qwen3_moe", mlp_only_layers="1")

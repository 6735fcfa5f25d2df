"""config.json of every family: transformers' defaults for missing fields, and refusal by name of
unsupported ones."""

import math
from collections.abc import Iterable, Mapping

import pytest

from jdisagg.errors import CheckpointError
from jdisagg.ops.activations import ClampedGate
from jdisagg.ops.rope_frequencies import Rope
from models.catalog import FAMILIES, read_config
from models.decoder_config import DecoderConfig
from models.hf_config import HfConfig
from tests.models.configs import not_refused

BASE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,  # noqa: E501
        "num_key_value_heads": 2, "rope_theta": 10000.0}  # fmt: skip
PARTLY_ROTATED = {
    *("phi3", "glm", "glm4", "glm4v_text", "glm4_moe", "mimo_v2_flash"),
    *("minimax", "minimax_m1", "minimax_m2", "minimax_m3_vl_text", "minimax_text_01"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    *("glm4v_moe_text", "solar_open", "sarvam_moe"),
    "mistral4",  # half of a head, where nothing is said
}
ROPE_BY_LAYER = {"olmo3", "gemma3_text", "gemma4_text", "mimo_v2_flash", "step3p5"}
MINIMAX: dict[str, object] = {"postnorm": True, "attn_type_list": [0, 1] * 2}
# What a family's config must say beside it.
BESIDE: dict[str, dict[str, object]] = {
    "granitemoehybrid": {"layer_types": ["attention"] * 4, "num_local_experts": 0},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "bailing_hybrid": {"kda_lower_bound": -5.0, "layer_group_size": 2},
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
    "gemma4_unified_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
}
# An option that others refuse.
READ = {
    ("gemma2", "attn_logit_softcapping"),
    ("bailing_hybrid", "head_dim"),  # of layers without rotary positions
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
    ("solar_open", "intermediate_size"),
    ("nemotron_h", "num_hidden_layers"),  # as many as its pattern
}


def _base(family: str) -> dict[str, object]:
    return {"model_type": family, **BASE, **BESIDE.get(family, {})}


def _read(family: str, **fields: object) -> DecoderConfig:
    return read_config(HfConfig(_base(family) | fields))


def _windows(config: DecoderConfig) -> list[int | None]:
    return [layer.window for layer in config.layers]


Row = tuple[str, Mapping[str, object]]
NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
REFUSED: tuple[tuple[str, object], ...] = (
    ("quantization_config", {"quant_method": "bitsandbytes"}),
    ("hidden_act", "gelu"),
    ("rope_scaling", {"rope_type": "longrope", "factor": 2.0}),
    ("rope_scaling", {"type": "mrope", "mrope_section": [1]}),
    ("rope_scaling", {"rope_type": "default", "twist": 2}),
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
    ("is_causal", False),
    ("use_bidirectional_attention", True),
    ("dual_chunk_attention_config", {"chunk_size": 262144}),
    ("nobody_knows_this", 3),
)


def _refused_by_all_families() -> Iterable[Row]:
    for family in FAMILIES:
        base = _base(family)
        for field in NEEDED:
            if (family, field) not in LEFT_OUT:
                fields = {name: value for name, value in base.items() if name != field}
                yield f"needed field '{field}' is missing", fields
        for field, value in REFUSED:
            # READ has no value of REFUSED that is unknown everywhere
            if (family, field) not in READ or "twist" in str(value):
                yield field, base | {field: value}
        if family not in (*PARTLY_ROTATED, "bailing_hybrid"):  # which states it beside its sizes
            yield "partial_rotary_factor", base | {"partial_rotary_factor": 0.5}
        if family not in ROPE_BY_LAYER:
            by_layer = {"full_attention": {"rope_type": "default"}}
            yield "rope_parameters", base | {"rope_parameters": by_layer}


def _read_fields(fields: Mapping[str, object]) -> DecoderConfig:
    return read_config(HfConfig(dict(fields)))


def test_every_family_refuses_by_name_what_is_missing_or_not_known_to_be_harmless() -> None:
    assert not_refused(_read_fields, _refused_by_all_families()) == []


def test_fields_that_published_configs_of_a_family_leave_out_are_not_needed() -> None:
    for family, field in LEFT_OUT:
        fields = {name: value for name, value in _base(family).items() if name != field}
        assert _read_fields(fields).attention.query_heads in (4, 8)


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


def test_fields_that_change_nothing_pass() -> None:
    harmless: dict[str, object] = {
        "transformers_version": "4.46.0",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "pretraining_tp": 1,
        "attention_dropout": 0.1,
        "eos_token_id": [1, 2],
        "unsloth_fixed": True,
        "is_causal": True,
        "nobody_knows_this": 0,
    }
    for family in FAMILIES:
        # in Llama 4, null means attention without chunks
        more = {} if family == "llama4_text" else {"attention_chunk_size": None}
        assert _read(family, **harmless, **more) == _read(family), family


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
KIMI_LISTS = {"kda_layers": [1, 2, 4], "full_attn_layers": [3]}
KIMI_LINEAR = {
    "n_shared_experts": 1,
    "n_group": 1,
    "layer_types": None,
    "linear_attn_config": KIMI_LISTS,
}
MIXED = ["sliding_attention", "full_attention"] * 2
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}
OWN_RULES: dict[str, tuple[Mapping[str, object], tuple[tuple[str, object], ...]]] = {
    "granitemoehybrid": (
        HYBRID,
        (
            ("layer_types", ["mamba"] * 4),  # nobody attends
            ("layer_types", ["mamba", "attention"]),
            ("layer_types", ["mamba", "conv"] * 2),
            ("mamba_n_heads", 5),
            ("mamba_n_groups", 3),
            ("mamba_d_conv", 1),
            ("num_experts_per_tok", 9),
            ("time_step_limit", [0.1]),
            ("time_step_limit", [0.2, 0.1]),
        ),
    ),
    "nemotron_h": (
        {},
        (
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
        ),
    ),
    "kimi_linear": (
        KIMI_LINEAR,
        (
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
        ),
    ),
    "llama": (
        {},
        (
            ("rope_scaling", [1]),
            ("rope_scaling", {"rope_type": "linear"}),
            ("rope_scaling", {"rope_type": "linear", "factor": 0}),
            ("rope_scaling", {"rope_type": "linear", "factor": "2"}),
            ("rope_scaling", {"rope_type": "dynamic"}),
            ("rope_scaling", LLAMA_3 | {"low_freq_factor": 1.0}),
            ("rope_scaling", LLAMA_3 | {"high_freq_factor": 3.0}),
            ("sliding_window", 9),
        ),
    ),
    "deepseek_v2": (
        {"num_experts_per_tok": 2},
        (("norm_topk_prob", True), ("topk_method", "noaux_tc")),
    ),
    "deepseek_v3": (
        {"num_experts_per_tok": 2},
        (("scoring_func", "softmax"), ("n_group", 3), ("moe_layer_freq", 2)),
    ),
    "glm4_moe_lite": ({"num_experts_per_tok": 2}, (("mlp_layer_types", ["dense"]),)),
    "kimi_k2": ({"num_experts_per_tok": 2}, (("quantization_config", {"quant_method": "nvfp4"}),)),
    "qwen2": (
        {},
        (
            ("layer_types", MIXED),
            ("layer_types", MIXED[:1]),
            ("layer_types", ["chunked_attention"] * 4),
        ),
    ),
    "olmo3": ({}, (("rope_parameters", {"full_attention": {}, "sliding_attention": 3}),)),
    "qwen3_moe": (
        {"num_experts": 8, "num_experts_per_tok": 2},
        (("num_experts_per_tok", 9), ("mlp_only_layers", "1")),
    ),
}


def test_families_refuse_by_name_what_does_not_fit_their_own_rules() -> None:
    rows = (
        (field, {**_base(family), **beside, field: value})
        for family, (beside, fields) in OWN_RULES.items()
        for field, value in fields
    )
    assert not_refused(_read_fields, rows) == []


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


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    rows = [
        (r"model_type must be one of llama, .*got", {"model_type": family, **BASE})
        for family in ("gpt2", "gpt_neox", None, 7)
    ]
    assert not_refused(_read_fields, rows) == []


def _rope(**fields: object) -> Rope:
    return _read("llama", **fields).attention.rope


def test_rope_reads_both_forms_and_rope_scaling_wins() -> None:
    old = {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2}}
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}
    assert _rope(**old) == _rope(rope_parameters=new)
    assert _rope(**old) == _rope(**old, rope_parameters={"rope_type": "default"})
    assert _rope(rope_scaling=None, rope_parameters=None).type == "default"
    assert _rope(rope_scaling={"type": "dynamic", "factor": 4.0}).type == "default"


def test_yarn_takes_its_factor_and_temperature_as_transformers_does() -> None:
    yarn: dict[str, object] = {"rope_type": "yarn", "original_max_position_embeddings": 64}
    implicit = _rope(max_position_embeddings=256, rope_scaling=yarn)
    assert (implicit.factor, implicit.attention_factor) == (4.0, pytest.approx(1.1386294361))
    stated = _rope(rope_scaling=yarn | {"factor": 4.0, "attention_factor": 0.5})
    assert stated.attention_factor == 0.5
    scaled = _rope(rope_scaling=yarn | {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5})
    assert scaled.attention_factor == pytest.approx(1.1386294361 / 1.0693147181)


@pytest.mark.parametrize(
    ("positions", "scaling", "context"),
    [
        (100, None, 100),
        (100, {"type": "linear", "factor": 4.0}, 400),
        (100, {"type": "dynamic", "factor": 4.0}, 100),
        (100, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 400),
        (400, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 400),
    ],
)
def test_the_context_is_what_the_rope_type_stretches_it_to(
    positions: int, scaling: object, context: int
) -> None:
    config = _read("qwen2", max_position_embeddings=positions, rope_scaling=scaling)
    assert config.context_tokens == context


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


FULL, WINDOWED = [None] * 4, [9] * 4
USED = {"sliding_window": 9, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("mistral", {}, [4096] * 4),
        ("mistral", {"sliding_window": None}, FULL),
        ("mixtral", {}, FULL),
        ("mixtral", {"sliding_window": 9}, WINDOWED),
        ("qwen2", {"sliding_window": 9}, FULL),
        ("qwen2", USED, FULL),
        ("qwen2", USED | {"layer_types": MIXED}, [9, None] * 2),
        ("qwen3", USED | {"max_window_layers": 2}, [None, None, 9, 9]),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, [4096] * 4),
        ("qwen3_moe", USED, WINDOWED),
        ("qwen3_moe", {"sliding_window": 9}, FULL),
    ],
)
def test_windows_follow_the_family(
    family: str, fields: dict[str, object], windows: list[int | None]
) -> None:
    assert _windows(_read(family, **fields)) == windows


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

"""Configurations of every family drawn at random, for `tests/golden/compare.py`: sizes that are no
multiples of anything, and the options that the family's published checkpoints have, in any mix.

Half of the draws have sizes that four devices divide, so that every layout can be tried on them;
the others need not divide at all. Pure: knows the fields of transformers' configurations and
nothing of our own readers."""

from collections.abc import Callable

from tests.golden import expert_configs
from tests.golden.draw import CONTEXT, FULL, LINEAR, WINDOWED, Draw, Fields
from tests.golden.head_configs import mimo_v2_flash, step3p7
from tests.golden.latent_configs import (
    bailing_hybrid,
    deepseek_v2,
    deepseek_v3,
    glm4_moe_lite,
    glm_moe_dsa,
    indexed,
    kimi_k25,
    kimi_linear,
    mistral4,
    youtu,
)
from tests.golden.llama_configs import (
    arcee,
    cohere,
    cohere2,
    cwm,
    exaone4,
    exaone4_5,
    gemma4_text,
    gemma4_unified_text,
    granite,
    granite_swa,
    granitemoe,
    granitemoe_swa,
    granitemoehybrid,
    granitemoeshared,
    internlm3,
    llama,
)


def llama4(draw: Draw) -> Fields:
    fields = draw.base() | {"head_dim": draw.head_dim, "attention_bias": draw.flag()}
    fields |= draw.experts("num_local_experts") | {"num_experts_per_tok": 1}
    return fields | {
        "intermediate_size": fields.pop("moe_intermediate_size"),
        "intermediate_size_mlp": draw.ffn(),
        "rope_parameters": draw.rope("default", "llama3"),
        "moe_layers": [at for at in range(draw.layers) if draw.flag(0.7)],
        "no_rope_layers": [draw.random.randint(0, 1) for _ in range(draw.layers - 1)] + [1],
        "attention_chunk_size": CONTEXT,
        "use_qk_norm": draw.flag(),
        "attn_temperature_tuning": draw.flag(0.7),
        "floor_scale": draw.one_of(16, 100),
        "attn_scale": draw.one_of(0.1, 0.4),
    }


def mistral(draw: Draw) -> Fields:
    window = {"sliding_window": draw.one_of(None, draw.window())}
    return draw.base() | window | {"rope_parameters": draw.rope()}


def mixtral(draw: Draw) -> Fields:
    fields = draw.base() | {"rope_parameters": draw.rope()}
    experts = draw.experts("num_local_experts")
    ffn = experts.pop("moe_intermediate_size")
    return fields | experts | {"intermediate_size": ffn, "sliding_window": draw.one_of(None, 33)}


def _qwen_windows(draw: Draw) -> Fields:
    fields: Fields = {"use_sliding_window": draw.flag(), "sliding_window": draw.window()}
    if draw.flag():
        return fields | {"max_window_layers": draw.random.randint(0, draw.layers)}
    kinds = draw.kinds(FULL, WINDOWED) if fields["use_sliding_window"] else [FULL] * draw.layers
    return fields | {"layer_types": kinds}


def qwen2(draw: Draw) -> Fields:
    fields = draw.base(own_head_dim=False) | {"rope_parameters": draw.rope()}
    fields.pop("head_dim", None)
    return fields | _qwen_windows(draw)


def qwen3(draw: Draw) -> Fields:
    fields = draw.base() | {"head_dim": draw.head_dim, "attention_bias": draw.flag()}
    return fields | {"rope_parameters": draw.rope()} | _qwen_windows(draw)


def _sparse(draw: Draw) -> Fields:
    return {
        "decoder_sparse_step": draw.one_of(1, 1, 2),
        "mlp_only_layers": draw.one_of([], [draw.random.randrange(draw.layers)]),
        "norm_topk_prob": draw.flag(),
    }


def qwen2_moe(draw: Draw) -> Fields:
    shared = {"shared_expert_intermediate_size": draw.ffn(), "qkv_bias": draw.flag(0.8)}
    fields = draw.base(own_head_dim=False) | {"rope_parameters": draw.rope()}
    fields.pop("head_dim", None)
    return fields | draw.experts() | _sparse(draw) | shared | _qwen_windows(draw)


def qwen3_moe(draw: Draw) -> Fields:
    window = {"use_sliding_window": draw.flag(0.3), "sliding_window": draw.window()}
    fields = draw.base() | {"head_dim": draw.head_dim, "attention_bias": draw.flag()}
    return fields | {"rope_parameters": draw.rope()} | draw.experts() | _sparse(draw) | window


def _in_three_dimensions(draw: Draw) -> Fields:
    pairs = draw.head_dim // 2
    first = draw.random.randint(1, pairs - 2)
    second = draw.random.randint(1, pairs - first - 1)
    sections: Fields = {"mrope_section": [first, second, pairs - first - second]}
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True} | sections


def qwen3_vl(draw: Draw) -> Fields:
    fields = draw.base() | {"head_dim": draw.head_dim, "attention_bias": draw.flag()}
    return fields | {"rope_parameters": _in_three_dimensions(draw)}


def qwen3_vl_moe(draw: Draw) -> Fields:
    return qwen3_vl(draw) | draw.experts() | _sparse(draw)


def ministral(draw: Draw) -> Fields:
    windows = {"sliding_window": draw.window(), "layer_types": draw.kinds(FULL, WINDOWED)}
    return draw.base() | {"head_dim": draw.head_dim} | windows | {"rope_parameters": draw.rope()}


def ministral3(draw: Draw) -> Fields:
    rope = draw.rope("yarn") | {"llama_4_scaling_beta": draw.one_of(0.1, 0.3)}
    fields = draw.base() | {"head_dim": draw.head_dim, "rope_parameters": rope}
    return fields | {"sliding_window": draw.one_of(None, draw.window())}


def mistral3(draw: Draw) -> Fields:
    if draw.flag():
        return ministral3(draw) | {"model_type": "ministral3"}
    return mistral(draw) | {"model_type": "mistral"}


def smollm3(draw: Draw) -> Fields:
    window = {"use_sliding_window": draw.flag(), "sliding_window": draw.window()}
    biases = {"attention_bias": draw.flag(), "mlp_bias": draw.flag()}
    still = draw.one_of(
        {"no_rope_layer_interval": draw.one_of(2, 3, 4)},
        {"no_rope_layers": [draw.random.randint(0, 1) for _ in range(draw.layers)]},
    )
    fields = draw.base(own_head_dim=False) | {"rope_parameters": draw.rope()}
    return fields | window | biases | still  # type: ignore[operator]


def seed_oss(draw: Draw) -> Fields:
    fields = draw.base() | {"head_dim": draw.head_dim, "rope_parameters": draw.rope()}
    biases = ("attention_bias", "attention_out_bias", "mlp_bias")
    return fields | {name: draw.flag() for name in biases}


def olmo2(draw: Draw) -> Fields:
    fields = draw.base(own_head_dim=False) | {"rope_parameters": draw.rope()}
    return fields | {"attention_bias": draw.flag()}


def olmo3(draw: Draw) -> Fields:
    theta = {"rope_theta": draw.one_of(10000.0, 500000.0)}
    ropes = {FULL: draw.rope("default", "yarn") | theta, WINDOWED: {"rope_type": "default"} | theta}
    fields = draw.base(own_head_dim=False) | {"rope_parameters": ropes}
    fields |= {"sliding_window": draw.window(), "attention_bias": draw.flag()}
    return fields | ({"layer_types": draw.kinds(FULL, WINDOWED)} if draw.flag() else {})


def _gemma(draw: Draw) -> Fields:
    fields = draw.base() | {"head_dim": draw.head_dim, "sliding_window": draw.window()}
    fields |= {"query_pre_attn_scalar": draw.one_of(7, 24, 144), "attention_bias": draw.flag()}
    fields["final_logit_softcapping"] = draw.one_of(None, 12.0, 30.0)
    return fields | ({"layer_types": draw.kinds(FULL, WINDOWED)} if draw.flag() else {})


def gemma2(draw: Draw) -> Fields:
    caps = {"attn_logit_softcapping": draw.one_of(None, 3.0, 50.0)}
    return _gemma(draw) | caps | {"rope_parameters": draw.rope("default", "linear", "yarn")}


def gemma3_text(draw: Draw) -> Fields:
    ropes = {FULL: draw.rope("default", "linear", "yarn"), WINDOWED: draw.rope("default")}
    return _gemma(draw) | {"rope_parameters": ropes}


def phi3(draw: Draw) -> Fields:
    fields = draw.base(own_head_dim=False)
    fields.pop("head_dim", None)
    part = draw.random.choice((0.5, 1.0))
    rotated = int(draw.head_dim * part)
    if rotated % 2:
        part, rotated = 1.0, draw.head_dim
    rope = draw.rope("default", "longrope", rotated=rotated)
    rope["partial_rotary_factor"] = part
    if "short_factor" in rope:
        original = rope.pop("original_max_position_embeddings")
        rope.pop("factor", None)
        fields |= {
            "original_max_position_embeddings": original,
            "max_position_embeddings": draw.one_of(CONTEXT, 4 * CONTEXT),
        }
    return fields | {"rope_parameters": rope, "sliding_window": draw.one_of(None, draw.window())}


def _partly(draw: Draw, *kinds: str) -> Fields:
    part = draw.random.choice((0.5, 1.0, 0.25))
    if int(draw.head_dim * part) % 2:
        part = 0.5
    if int(draw.head_dim * part) % 2:
        part = 1.0
    rope = draw.rope(*(kinds or ("default", "linear", "yarn", "llama3")))
    return rope | {"partial_rotary_factor": part}


def glm(draw: Draw) -> Fields:
    fields = draw.base() | {"head_dim": draw.head_dim, "pad_token_id": None}
    return fields | {"attention_bias": draw.flag(), "rope_parameters": _partly(draw)}


def glm4v(draw: Draw) -> Fields:
    fields = draw.base(own_head_dim=False)
    fields.pop("head_dim", None)
    pairs = draw.head_dim // 2 // 2  # of half a head
    first = draw.random.randint(0, pairs)
    rope = draw.rope("default") | {"mrope_section": [first, pairs - first, 0]}
    return fields | {"rope_parameters": rope | {"partial_rotary_factor": 0.5}}


def glm4_moe(draw: Draw) -> Fields:
    fields = draw.base() | {"head_dim": draw.head_dim, "attention_bias": draw.flag()}
    fields |= {"rope_parameters": _partly(draw), "use_qk_norm": draw.flag()}
    dense = {"first_k_dense_replace": draw.random.randint(0, draw.layers - 1)}
    return fields | draw.groups() | dense


def minimax_m2(draw: Draw) -> Fields:
    fields = draw.base() | {"head_dim": draw.head_dim}
    experts = draw.experts("num_local_experts")
    ffn = experts.pop("moe_intermediate_size")
    rope = _partly(draw, "default")
    rotated = int(draw.head_dim * rope.pop("partial_rotary_factor"))  # type: ignore[call-overload]
    return (
        fields
        | experts
        | {
            "intermediate_size": ffn,
            "rotary_dim": rotated,
            "rope_parameters": rope | {"partial_rotary_factor": rotated / draw.head_dim},
        }
    )


def minimax_m3(draw: Draw) -> Fields:
    fields = draw.base() | {"head_dim": draw.head_dim}
    fields |= draw.experts("num_local_experts")
    ffn = fields.pop("moe_intermediate_size")
    rope = _partly(draw, "default")
    rotated = int(draw.head_dim * rope["partial_rotary_factor"])  # type: ignore[call-overload]
    heads, block = draw.kv_heads, draw.random.choice((5, 8, 16, 33, 64))
    return fields | {
        "intermediate_size": ffn,
        "dense_intermediate_size": draw.ffn(),
        "shared_intermediate_size": draw.ffn(),
        "routed_scaling_factor": draw.one_of(1.0, 2.0),
        "swiglu_limit": draw.one_of(0.8, 7.0),
        "rotary_dim": rotated,
        "rope_parameters": rope,
        "layer_types": draw.kinds(FULL, "minimax_m3_sparse"),
        "mlp_layer_types": draw.kinds("dense", "sparse"),
        "index_n_heads": heads,
        "index_head_dim": heads * -(-max(rotated, 6) // heads),
        "index_block_size": block,
        "index_topk_blocks": draw.one_of(2, 3, 9),
        "index_local_blocks": draw.one_of(1, 1, 2),
    }


def apertus(draw: Draw) -> Fields:
    fields = draw.base(own_head_dim=False) | {"attention_bias": draw.flag()}
    fields.pop("head_dim", None)
    return fields | {"rope_parameters": draw.rope("default", "llama3", "yarn")}


def ernie4_5(draw: Draw) -> Fields:
    fields = draw.base() | {"head_dim": draw.head_dim, "use_bias": draw.flag()}
    return fields | {"rope_parameters": draw.rope("default", "yarn")}


def hunyuan_v1_dense(draw: Draw) -> Fields:
    rope = draw.rope("default") | draw.random.choice(
        ({}, {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0})
    )
    biases = {"attention_bias": draw.flag()}
    return draw.base() | biases | {"head_dim": draw.head_dim, "rope_parameters": rope}


def gemma(draw: Draw) -> Fields:
    return draw.base() | {"head_dim": draw.head_dim, "rope_parameters": draw.rope("default")}


def olmoe(draw: Draw) -> Fields:
    fields = draw.base(own_head_dim=False) | draw.experts()
    fields.pop("head_dim", None)
    fields["intermediate_size"] = fields.pop("moe_intermediate_size")
    return fields | {"norm_topk_prob": draw.flag(), "rope_parameters": draw.rope("default")}


def dots1(draw: Draw) -> Fields:
    fields = draw.base() | draw.groups() | {"head_dim": draw.head_dim}
    fields |= {"rope_parameters": draw.rope("default"), "attention_bias": draw.flag()}
    windows = {"sliding_window": draw.one_of(None, draw.window()), "max_window_layers": 1}
    return fields | windows | {"first_k_dense_replace": draw.random.randint(0, draw.layers - 1)}


def minimax(draw: Draw) -> Fields:
    fields = draw.base() | draw.experts("num_local_experts")
    fields |= {"intermediate_size": fields.pop("moe_intermediate_size")}
    kinds = (("full", 1.5), ("linear", 1.3))
    factors = {
        f"{kind}_attn_{part}_factor": draw.one_of(1.0, most)
        for kind, most in kinds
        for part in ("alpha", "beta")
    }
    factors |= {"mlp_alpha_factor": draw.one_of(1.0, 2.0), "mlp_beta_factor": draw.one_of(1.0, 0.7)}
    rope = {"rope_parameters": draw.rope("default", "linear", "yarn")}
    layers = {"layer_types": draw.kinds(LINEAR, FULL), "block_size": draw.one_of(8, 64, 256)}
    return fields | factors | rope | layers


def lfm2(draw: Draw) -> Fields:
    fields = draw.base(own_head_dim=False) | {"rope_parameters": draw.rope("default", "yarn")}
    fields.pop("head_dim", None)
    fields["norm_eps"] = fields.pop("rms_norm_eps")
    return fields | {
        "layer_types": draw.kinds("conv", FULL),
        "conv_L_cache": draw.one_of(2, 3, 4),
        "conv_bias": draw.flag(),
        "block_auto_adjust_ff_dim": draw.flag(),
        "block_ffn_dim_multiplier": draw.one_of(1.0, 1.5),
        "block_multiple_of": draw.one_of(4, 12),
    }


def lfm3(draw: Draw) -> Fields:
    ropes = {FULL: draw.rope("proportional", "default"), WINDOWED: draw.rope("default")}
    ropes[FULL] |= {"partial_rotary_factor": 0.5}  # type: ignore[operator]
    if ropes[FULL]["rope_type"] == "default":  # type: ignore[index]
        del ropes[FULL]["partial_rotary_factor"]  # type: ignore[attr-defined]
    fields = draw.base() | {"head_dim": draw.head_dim, "rope_parameters": ropes}
    fields["norm_eps"] = fields.pop("rms_norm_eps")
    flags = ("conv_bias", "attention_bias", "use_sandwich_norm", "use_attention_gate")
    return (
        fields
        | {name: draw.flag(0.4 if name.endswith("bias") else 0.7) for name in flags}
        | {
            "layer_types": draw.kinds("conv", FULL, WINDOWED),
            "conv_L_cache": draw.one_of(3, 5, 7),
            "sliding_window": draw.window(),
        }
    )


def hy_v3(draw: Draw) -> Fields:
    fields = draw.base() | {"head_dim": draw.head_dim, "attention_bias": draw.flag()}
    fields |= {"rope_parameters": draw.rope(), "mlp_bias": draw.flag(0.3)}
    more = {"router_scaling_factor": 1.7, "num_shared_experts": draw.one_of(1, 2)}
    kinds = draw.kinds("dense", "sparse") if draw.flag() else None
    return fields | draw.experts() | more | ({"mlp_layer_types": kinds} if kinds else {})


def _delta(draw: Draw) -> Fields:
    keys = draw.random.choice((4,) if draw.even else (1, 2, 3))
    fields = draw.base() | {
        "head_dim": draw.head_dim,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * draw.random.choice((1, 2, 3)),
        "linear_key_head_dim": draw.one_of(6, 8, 12),
        "linear_value_head_dim": draw.one_of(6, 10, 12),
        "linear_conv_kernel_dim": draw.one_of(2, 3, 4),
        "layer_types": draw.kinds(LINEAR, FULL),
    }
    part = draw.random.choice([p for p in (0.25, 0.5, 1.0) if int(draw.head_dim * p) % 2 == 0])
    rope = draw.rope("default", "yarn") | {"partial_rotary_factor": part}
    return fields | {"rope_parameters": rope}


def qwen3_next(draw: Draw) -> Fields:
    shared = {"shared_expert_intermediate_size": draw.ffn()}
    return _delta(draw) | draw.experts() | _sparse(draw) | shared


def qwen3_5(draw: Draw) -> Fields:
    fields = _delta(draw)
    rope = fields["rope_parameters"]
    rotated = int(draw.head_dim * rope["partial_rotary_factor"])  # type: ignore[index]
    pairs = rotated // 2
    third = pairs // 3
    sections = [pairs - 2 * third, third, third]
    more = {"mrope_section": sections, "mrope_interleaved": True, "rope_type": "default"}
    kept = ("rope_theta", "partial_rotary_factor")
    plain = {name: rope[name] for name in kept}  # type: ignore[index]
    return fields | {"rope_parameters": plain | more}


def qwen3_5_moe(draw: Draw) -> Fields:
    shared = {"shared_expert_intermediate_size": draw.ffn()}
    return qwen3_5(draw) | draw.experts() | shared


def gpt_oss(draw: Draw) -> Fields:
    fields = draw.base() | {"head_dim": draw.head_dim, "tie_word_embeddings": False}
    experts = draw.experts("num_local_experts")
    ffn = experts.pop("moe_intermediate_size")
    windows = {"layer_types": draw.kinds(FULL, WINDOWED)} if draw.flag() else {}
    return (
        fields
        | experts
        | windows
        | {
            "intermediate_size": ffn,
            "sliding_window": draw.window(),
            "swiglu_limit": draw.one_of(0.8, 7.0),
            "rope_parameters": draw.rope("yarn", "default"),
            "attention_bias": draw.flag(0.8),
        }
    )


def nemotron_h(draw: Draw) -> Fields:
    heads = draw.random.choice((4, 8) if draw.even else (2, 3, 6))
    fields = (
        draw.base()
        | draw.groups()
        | {
            "head_dim": draw.head_dim,
            "layers_block_type": draw.kinds(LINEAR, FULL, "mlp", "moe"),
            "mamba_num_heads": heads,
            "mamba_head_dim": draw.one_of(6, 8, 16),
            "ssm_state_size": draw.one_of(8, 12, 20),
            "n_groups": draw.random.choice([g for g in (1, 2, 3, 4) if heads % g == 0]),
            "conv_kernel": draw.one_of(2, 3, 4),
            "chunk_size": draw.one_of(8, 64),
            "moe_shared_expert_intermediate_size": draw.ffn(),
            "moe_latent_size": draw.one_of(None, 12),
            "mlp_bias": draw.flag(),
            "use_bias": draw.flag(),
            "use_conv_bias": draw.flag(),
            "n_shared_experts": 1,
        }
    )
    fields["layer_norm_epsilon"] = fields.pop("rms_norm_eps")
    return fields


CONFIGS: dict[str, Callable[[Draw], Fields]] = {
    "llama": llama,
    "llama4": llama4,
    "mistral": mistral,
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "qwen3_omni_moe_thinker": qwen3_vl_moe,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "mistral3": mistral3,
    "ministral": ministral,
    "ministral3": ministral3,
    "smollm3": smollm3,
    "seed_oss": seed_oss,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "gemma2": gemma2,
    "gemma3": gemma3_text,
    "gemma3_text": gemma3_text,
    "gemma4": gemma4_text,
    "gemma4_text": gemma4_text,
    "granite": granite,
    "granitemoehybrid": granitemoehybrid,
    "phi3": phi3,
    "glm": glm,
    "glm4": glm,
    "glm4_moe": glm4_moe,
    "glm4v": glm4v,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "apertus": apertus,
    "arcee": arcee,
    "ernie4_5": ernie4_5,
    "hunyuan_v1_dense": hunyuan_v1_dense,
    "cohere": cohere,
    "cohere2": cohere2,
    "exaone4": exaone4,
    "gemma": gemma,
    "olmoe": olmoe,
    "granitemoe": granitemoe,
    "dots1": dots1,
    "deepseek_v32": indexed,
    "glm_moe_dsa": glm_moe_dsa,
    "lfm2": lfm2,
    "lfm3": lfm3,
    "bailing_hybrid": bailing_hybrid,
    "kimi_k25": kimi_k25,
    "kimi_linear": kimi_linear,
    "mistral4": mistral4,
    "glm4_moe_lite": glm4_moe_lite,
    "gpt_oss": gpt_oss,
    "hy_v3": hy_v3,
    "nemotron_h": nemotron_h,
    "minimax": minimax,
    "minimax_m2": minimax_m2,
    "mimo_v2_flash": mimo_v2_flash,
    "step3p7": step3p7,
    "minimax_m3_vl": minimax_m3,
    "minimax_m3_vl_text": minimax_m3,
    "afmoe": expert_configs.afmoe,
    "cohere2_moe": expert_configs.cohere2_moe,
    "ernie4_5_moe": expert_configs.ernie4_5_moe,
    "exaone_moe": expert_configs.exaone_moe,
    "glm4v_moe": expert_configs.glm4v_moe,
    "hunyuan_v1_moe": expert_configs.hunyuan_v1_moe,
    "laguna": expert_configs.laguna,
    "lfm2_moe": expert_configs.lfm2_moe,
    "mellum": expert_configs.mellum,
    "sarvam_moe": expert_configs.sarvam_moe,
    "solar_open": expert_configs.solar_open,
    "exaone4_5": exaone4_5,
    "glm46v": glm4v,
    "gemma4_unified_text": gemma4_unified_text,
    "internlm3": internlm3,
    "iquestcoder": llama,
    "cwm": cwm,
    "granitemoeshared": granitemoeshared,
    "granite_swa": granite_swa,
    "granitemoe_swa": granitemoe_swa,
    "sarvam_mla": deepseek_v3,
    "youtu": youtu,
}


def random_fields(family: str, seed: int) -> Fields:
    """The same for the same family and seed."""
    return CONFIGS[family](Draw(family, seed))

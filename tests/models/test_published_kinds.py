"""config.json of published models with all their fields, of families with sparse attention, short
convolutions, blocks side by side, and several kinds of layers."""

from dataclasses import replace

import pytest

from jdisagg.costs.catalog import CATALOG
from jdisagg.errors import CheckpointError
from models.catalog import read_config
from models.hf_config import HfConfig

# MiniMaxAI/MiniMax-M3
MINIMAX_M3 = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "model_type": "minimax_m3_vl",
    "image_token_index": 200025,
    "video_token_index": 200026,
    "projector_hidden_size": 6144,
    "vision_config": {"num_hidden_layers": 32},
    "text_config": {
        "dense_intermediate_size": 12288,
        "head_dim": 128,
        "hidden_act": "swigluoai",
        "hidden_size": 6144,
        "intermediate_size": 3072,
        "max_position_embeddings": 524288,
        "moe_layer_freq": [0] * 3 + [1] * 57,
        "n_shared_experts": 1,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "num_mtp_modules": 0,
        "partial_rotary_factor": 0.5,
        "qk_norm_type": "per_head",
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "routed_scaling_factor": 2.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 3072,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": 128,
            "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 16,
            "sparse_block_size": 128,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0] * 3 + [1] * 57,
            "sparse_disable_index_value": [0] * 3 + [1] * 57,
        },
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": 200064,
    },
}


def test_minimax_m3_is_in_the_catalogue_as_published() -> None:
    config, known = read_config(HfConfig(MINIMAX_M3)), CATALOG["minimax-m3"]
    assert config.cost_geometry(known.name) == known
    spec = config.kv_spec("bfloat16")
    kv, index = 60 * 2 * 4 * 128 * 2, 57 * 128 * 2
    assert spec.bytes_per_token == known.kv_bytes_per_token() == kv + index
    # each device has the whole key of the indexer, of which a transfer sends each part once
    assert spec.bytes_per_device(4) == kv // 4 + index
    assert known.kv_rows() == [(60 * 2 * 4 * 4, 32), (57 * 4, 32)]
    in_fp8 = replace(config, kv_dtype="fp8").kv_spec("bfloat16")
    assert in_fp8.bytes_per_token == kv // 2 + index


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sparse_init_block", 1),
        ("sparse_score_type", "mean"),
        ("sparse_num_index_heads", 8),
        ("sparse_local_block", 0),
        ("sparse_disable_index_value", [0] * 60),
        ("sparse_something_new", 1),
    ],
)
def test_a_minimax_m3_that_we_do_not_have_is_refused_by_name(field: str, value: object) -> None:
    text: dict[str, object] = MINIMAX_M3["text_config"]  # type: ignore[assignment]
    sparse = text["sparse_attention_config"] | {field: value}  # type: ignore[operator]
    changed = {"text_config": text | {"sparse_attention_config": sparse}}
    with pytest.raises(CheckpointError, match="sparse_attention_config"):
        read_config(HfConfig(MINIMAX_M3 | changed))


# CohereLabs/c4ai-command-r7b-12-2024
COMMAND_R7B = {
    "architectures": ["Cohere2ForCausalLM"],
    "model_type": "cohere2",
    "attention_bias": False,
    "cache_implementation": "hybrid",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "layer_norm_eps": 1e-5,
    "layer_switch": 4,
    "logit_scale": 0.25,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
    "vocab_size": 256000,
}
# LiquidAI/LFM2-1.2B
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-5,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "intermediate_size": 12288,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
# MiniMaxAI/MiniMax-Text-01
MINIMAX_TEXT_01 = {
    "architectures": ["MiniMaxText01ForCausalLM"],
    "model_type": "minimax_text_01",
    "attention_dropout": 0.0,
    "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "intermediate_size": 9216,
    "layernorm_full_attention_alpha": 3.5565588200778455,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_alpha": 3.5565588200778455,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_alpha": 3.5565588200778455,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 10240000,
    "num_attention_heads": 64,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "postnorm": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000000,
    "rotary_dim": 64,
    "router_jitter_noise": 0.0,
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 200064,
}
# XiaomiMiMo/MiMo-V2-Flash
MIMO_V2 = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "attention_bias": False,
    "attention_chunk_size": 128,
    "attention_value_scale": 0.707,
    "head_dim": 192,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "hybrid_layer_pattern": [0, *[1, 1, 1, 1, 0, 1] * 7, 1, 1, 1, 1, 0],
    "intermediate_size": 16384,
    "layernorm_epsilon": 1e-5,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": [0] + [1] * 47,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": None,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5000000,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "sliding_window": 128,
    "sliding_window_size": 128,
    "swa_head_dim": 192,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_rope_theta": 10000,
    "swa_v_head_dim": 128,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 152576,
}
# stepfun-ai/Step-3.5-Flash
STEP_3_5 = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "att_impl_type": "GQA",
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "head_dim": 128,
        "num_attention_groups": 8,
        "num_attention_heads": 96,
        "true_head_dim": 128,
    },
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "layer_types": ["full_attention", *["sliding_attention"] * 3] * 12,
    "max_position_embeddings": 262144,
    "max_seq_len": 262144,
    "moe_every_n_layer": 1,
    "moe_intermediate_size": 1280,
    "moe_layer_offset": 0,
    "moe_layers_enum": ",".join(map(str, range(3, 45))),
    "moe_num_experts": 288,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "moe_top_k": 8,
    "need_fp32_gate": True,
    "norm_expert_weight": True,
    "num_attention_groups": 8,
    "num_attention_heads": 64,
    "num_hidden_layers": 45,
    "num_nextn_predict_layers": 3,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 2.0,
        "high_freq_factor": 32.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 131072,
        "rope_type": "llama3",
    },
    "rope_theta": [5000000.0, 10000.0, 10000.0, 10000.0] * 12,
    "share_expert_dim": 1280,
    "sliding_window": 512,
    "swiglu_limits": [0.0] * 43 + [7, 7, 0.0, 0.0, 0.0],
    "swiglu_limits_shared": [0.0] * 44 + [16, 0.0, 0.0, 0.0],
    "use_head_wise_attn_gate": True,
    "use_moe": True,
    "use_moe_router_bias": True,
    "use_qk_norm": True,
    "vocab_size": 128896,
    "yarn_only_types": ["full_attention"],
    "zero_centered": True,
}
# meta-llama/Llama-4-Scout-17B-16E-Instruct
LLAMA_4 = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "boi_token_index": 200080,
    "eoi_token_index": 200081,
    "image_token_index": 200092,
    "tie_word_embeddings": False,
    "vision_config": {"num_hidden_layers": 34},
    "text_config": {
        "model_type": "llama4_text",
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": 4,
        "floor_scale": 8192,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "moe_layers": list(range(48)),
        "no_rope_layers": [1, 1, 1, 0] * 12,
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "use_qk_norm": True,
        "vocab_size": 202048,
    },
}


@pytest.mark.parametrize(
    ("fields", "billions", "active", "kv"),
    [
        (COMMAND_R7B, 8.03, 8.03, 32 * 2 * 8 * 128 * 2),
        (LFM2, 1.17, 1.17, 6 * 2 * 8 * 64 * 2),
        (MINIMAX_TEXT_01, 456, 45.9 + 2.5, 10 * 2 * 8 * 128 * 2),  # published without embeddings
        (MIMO_V2, 309, 15, (9 * 4 + 39 * 8) * (192 + 128) * 2),
        (LLAMA_4, 107.8, 17.2, 48 * 2 * 8 * 128 * 2),
    ],
    ids=["command-r7b", "lfm2-1.2b", "minimax-text-01", "mimo-v2-flash", "llama-4-scout"],
)
def test_parameters_and_kv_are_those_published(
    fields: dict[str, object], billions: float, active: float, kv: int
) -> None:
    config = read_config(HfConfig(fields))
    geometry = config.cost_geometry("m")
    assert geometry.parameters == pytest.approx(billions * 1e9, rel=0.01)
    assert geometry.active_parameters == pytest.approx(active * 1e9, rel=0.05)
    assert config.kv_spec("bfloat16").bytes_per_token == geometry.kv_bytes_per_token() == kv


def test_windows_and_contexts_of_published_configs_are_as_transformers_reads_them() -> None:
    command = read_config(HfConfig(COMMAND_R7B))
    assert [layer.window for layer in command.layers] == [4096, 4096, 4096, None] * 8
    assert [layer.rotated for layer in command.layers] == [True, True, True, False] * 8
    mimo = read_config(HfConfig(MIMO_V2))
    assert {layer.window for layer in mimo.layers} == {None, 129}
    assert sum(layer.window is None for layer in mimo.layers) == 9
    assert {layer.rope.head_dim for layer in mimo.layers if layer.rope} == {64}
    assert read_config(HfConfig(LFM2)).ffn == 8192
    minimax = read_config(HfConfig(MINIMAX_TEXT_01))
    assert minimax.attention.rope.head_dim == 64 and minimax.attention.head_dim == 128
    assert [layer.lightning is None for layer in minimax.layers] == ([False] * 7 + [True]) * 10
    assert {layer.factors for layer in minimax.layers} == {((3.5565588200778455, 1.0),) * 2}
    assert minimax.cost_geometry("minimax-text-01") == CATALOG["minimax-text-01"]
    step = read_config(HfConfig(STEP_3_5))
    heads = [(step.attention_of(layer).query_heads, layer.window) for layer in step.layers]
    assert heads == ([(64, None), *[(96, 512)] * 3] * 12)[:45]
    assert [layer.rope.head_dim for layer in step.layers if layer.rope] == (
        [64] + [128] * 3
    ) * 11 + [64]
    assert sum(layer.experts is not None for layer in step.layers) == 42
    assert [bool(layer.gate) for layer in step.layers] == [False] * 44 + [True]
    # attention in chunks equals full attention up to one chunk
    assert read_config(HfConfig(LLAMA_4)).context_tokens == 8192

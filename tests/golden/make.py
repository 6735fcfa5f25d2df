"""Makes the golden fixtures: tiny random checkpoints of every family, with logits and greedy tokens
of Hugging Face transformers.

Run in an environment of its own, never at test time (BUILD.md): `pip install torch==2.13.0
transformers==5.23.0`, then `python -m tests.golden.make`. Each folder gets config.json, the
weights, and expected.npz (prompt ids, logits of each prompt position, 64 greedy tokens with the
cache). Computed in float32 from weights rounded to the stored dtype. Weights are large enough that
greedy margins are far above float noise: a seed whose smallest margin is under 0.01, or that
repeats itself, is passed over. Names given as arguments make those fixtures alone."""

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Mistral4ForCausalLM,
    VoxtralForConditionalGeneration,
)  # pyright: ignore[reportMissingImports]

from tests.golden.mxfp4 import draw_mxfp4, kept_experts, to_mxfp4
from tests.golden.published import (
    mend,
    to_legacy,
    to_published_kimi,
    to_published_kimi_linear,
    to_published_minimax,
    to_published_minimax_m3,
)

HERE = Path(__file__).parent
PROMPT_TOKENS, GREEDY_TOKENS, LEAST_MARGIN, LEAST_DIFFERENT = 24, 64, 0.01, 20
COMMON = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Variant:
    """`family` is the model_type. `legacy`: config.json is written in the form of transformers 4
    (rope_theta, rope_scaling). `called`: the model_type that config.json states, of a family that
    transformers has no class for. `mxfp4`: experts are kept so, as gpt-oss publishes them.
    `resaved`: loaded and saved once more as a model of text alone, as fine-tuning does."""

    family: str
    fields: Mapping[str, object] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    legacy: bool = False
    called: str = ""
    shard_size: str = "5GB"
    mxfp4: bool = False
    resaved: bool = False


LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,  # noqa: E501
          "original_max_position_embeddings": 32}  # fmt: skip
DEEPSEEK = {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16.0, "truncate": False}
WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 12}
MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [2, 2, 2],
    "mrope_interleaved": True,
}
FLAT_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
GLM_MOE = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 12,
    "routed_scaling_factor": 1.5,
}
GEMMA = {
    "tie_word_embeddings": False,
    "head_dim": 12,
    "sliding_window": 9,
    "query_pre_attn_scalar": 7,
}
# Other kv heads of another size where there is no window; of 20 values 4 are turned.
GEMMA4 = {
    "tie_word_embeddings": False,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 9,
    "head_dim": 12,
    "global_head_dim": 20,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 12.0,
}
# Heads of 10 + 6 values for scores and 12 for values; of each token 20 + 6 are cached.
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 12,
    "q_lora_rank": 14,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
# An indexer of 24 heads of 10 values, of which 6 turn; it selects 16 of up to 87 positions. With
# few heads many scores are zero, and transformers leaves open which of equal ones it selects.
INDEXED = {
    "index_topk": 16,
    "index_n_heads": 24,
    "index_head_dim": 10,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# 6 of the 16 values of a head are turned; queries grow every 16 positions.
MISTRAL4 = {
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
    "partial_rotary_factor": 0.375,
}
# Gated DeltaNet: two key heads of 8 values, each for two value heads of 12.
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "head_dim": 16,
}
# Kimi Delta Attention: four heads of 8 channels; latent attention has heads of other sizes.
KIMI = {name: size for name, size in LATENT.items() if name != "n_routed_experts"} | {
    "q_lora_rank": None,
    "num_experts": 8,
}
KDA = {
    "num_hidden_layers": 4,
    "linear_attn_config": {
        "kda_layers": [1, 3, 4],
        "full_attn_layers": [2],
        "num_heads": 4,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
    },
}
# The same, and layers of one part each.
NEMOTRON = {
    "head_dim": 12,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 12,
    "n_groups": 2,
    "chunk_size": 8,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
# Keys of 12 values, of which 6 turn, and values of 8; twice the kv heads in layers with a window.
MIMO_V2 = {
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "head_dim": 12,
    "v_head_dim": 8,
    "sliding_window": 9,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "n_group": 2,
    "topk_group": 1,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "default",
            "rope_theta": 50000.0,
            "partial_rotary_factor": 0.5,
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
}
# Queries grow every 16 positions. Attention in chunks equals full attention within the context.
LLAMA4 = {
    "head_dim": 12,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 256,
    "floor_scale": 16,
    "attn_scale": 0.3,
}
# Heads of 12 values, of which 6 turn. An indexer selects 3 blocks of 8 positions of up to 11.
MINIMAX_M3 = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
    "mlp_layer_types": ["dense", *["sparse"] * 3],
    "head_dim": 12,
    "rotary_dim": 6,
    "partial_rotary_factor": 0.5,
    "intermediate_size": 24,
    "dense_intermediate_size": 48,
    "shared_intermediate_size": 20,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "swiglu_limit": 0.8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 8,
    "index_topk_blocks": 3,
}
# Six query heads in layers with a window and four in others; of 12 values 6 or all turn.
STEP3P5 = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
    "mlp_layer_types": ["dense", *["sparse"] * 3],
    "num_sliding_attention_heads": 6,
    "head_dim": 12,
    "sliding_window": 9,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "share_expert_dim": 20,
    "moe_router_scaling_factor": 1.5,
    "swiglu_limits": [None, None, 0.4, 0.3],
    "swiglu_limits_shared": [0.5, None, None, 0.2],
    "rope_theta": [50000.0, 10000.0, 10000.0, 50000.0],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
    "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32},
}
GPT_OSS = {
    "head_dim": 12,
    "intermediate_size": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 9,
    "swiglu_limit": 0.8,
    "rope_parameters": YARN
    | {"rope_theta": 150000.0, "original_max_position_embeddings": 16, "truncate": False},
}
LINEAR, FULL = "linear_attention", "full_attention"
# Mamba-2: four heads of 16 values with a state of 12 each.
GRANITE_HYBRID = {
    "num_hidden_layers": 3,
    "layer_types": [LINEAR, FULL, LINEAR],
    "shared_intermediate_size": 40,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.8,
    "mamba_n_heads": 4,
    "mamba_d_state": 12,
    "mamba_chunk_size": 8,
}
MINIMAX = {"head_dim": 12, "block_size": 8, "num_local_experts": 4, "intermediate_size": 24, "layer_types": [LINEAR, FULL],  # noqa: E501
           "full_attn_alpha_factor": 1.5, "linear_attn_alpha_factor": 1.2, "mlp_alpha_factor": 1.3}  # fmt: skip  # noqa: E501
VARIANTS: dict[str, Variant] = {
    "llama_tied": Variant("llama", {"tie_word_embeddings": True}, torch.float32),
    "llama_biased": Variant("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}, torch.float16, legacy=True),  # noqa: E501
    "llama_sharded": Variant("llama", {"num_key_value_heads": 4, "num_hidden_layers": 3}, shard_size="20KB"),  # noqa: E501
    "llama_llama3": Variant("llama", {"rope_parameters": LLAMA3}),
    "llama_linear": Variant("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}, legacy=True),  # noqa: E501
    "llama_dynamic": Variant("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},  # noqa: E501
                                       "max_position_embeddings": 96}),
    "llama_yarn": Variant("llama", {"rope_parameters": YARN}, legacy=True),
    "qwen2_yarn": Variant("qwen2", {"rope_parameters": YARN | DEEPSEEK}),
    "qwen2_windows": Variant("qwen2", WINDOWS | {"tie_word_embeddings": True}),
    "qwen3": Variant("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),  # noqa: E501
    "mistral_window": Variant("mistral", {"sliding_window": 7, "head_dim": 16}),
    "mixtral": Variant("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),  # noqa: E501
    "qwen3_moe": Variant("qwen3_moe", MOE | {"norm_topk_prob": True, "mlp_only_layers": [0], "num_hidden_layers": 3}),  # noqa: E501
    "qwen3_moe_step": Variant("qwen3_moe", MOE | {"norm_topk_prob": False, "decoder_sparse_step": 2, "use_sliding_window": True,  # noqa: E501
                                                  "sliding_window": 11}),
    "qwen2_moe": Variant("qwen2_moe", MOE | {"head_dim": 8, "shared_expert_intermediate_size": 20, "mlp_only_layers": [0], "num_hidden_layers": 3}),  # noqa: E501
    "qwen3_vl": Variant("qwen3_vl", {"head_dim": 12, "rope_parameters": MROPE}),
    "qwen3_vl_moe": Variant("qwen3_vl_moe", MOE | {"rope_parameters": MROPE}),
    "mistral3": Variant("mistral3", {"model_type": "mistral", "head_dim": 12, "sliding_window": None}),  # noqa: E501
    "ministral": Variant("ministral", {"head_dim": 12, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}),  # noqa: E501
    "ministral3": Variant("ministral3", {"head_dim": 12, "rope_parameters": YARN | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}}),  # noqa: E501
    "smollm3": Variant("smollm3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 11}, legacy=True),  # noqa: E501
    "seed_oss": Variant("seed_oss", {"head_dim": 12, "attention_out_bias": True}),
    "olmo2": Variant("olmo2", {"attention_bias": True}),
    "olmo3": Variant("olmo3", {"num_hidden_layers": 4, "sliding_window": 11, "rope_parameters": {
        "full_attention": YARN | {"rope_theta": 500000.0}, "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}}}),  # noqa: E501
    "gemma2": Variant("gemma2", GEMMA | {"num_hidden_layers": 3, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 12.0}),  # noqa: E501
    "gemma3": Variant("gemma3", GEMMA | {"num_hidden_layers": 3, "layer_types": None, "sliding_window_pattern": 3,  # noqa: E501
                                         "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "gemma3_text": Variant("gemma3_text", GEMMA | {"final_logit_softcapping": 30.0, "attention_bias": True, "layer_types": ["full_attention", "sliding_attention"]}),  # noqa: E501
    "gemma4": Variant("gemma4", GEMMA4 | {"use_bidirectional_attention": "vision"}),
    "gemma4_moe": Variant("gemma4_text", GEMMA4 | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "attention_k_eq_v": False,  # noqa: E501
                                                   "num_attention_heads": 8, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3,  # noqa: E501
                                                   "moe_intermediate_size": 24, "intermediate_size": 40}),  # noqa: E501
    "gemma": Variant("gemma", {"head_dim": 12, "tie_word_embeddings": False}),
    "llama4": Variant("llama4", LLAMA4 | {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0, "high_freq_factor": 1.0}}),  # noqa: E501
    "llama4_dense": Variant("llama4_text", LLAMA4 | {"num_hidden_layers": 3, "moe_layers": [1], "use_qk_norm": False, "attention_bias": True,  # noqa: E501
                                                     "no_rope_layers": [1, 0, 1]}),
    "arcee": Variant("arcee", {"head_dim": 12, "mlp_bias": True}),
    "ernie4_5": Variant("ernie4_5", {"head_dim": 12, "use_bias": True}),
    "hunyuan_dense": Variant("hunyuan_v1_dense", {"head_dim": 12, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0}}),  # noqa: E501
    "cohere": Variant("cohere", {"attention_bias": True, "logit_scale": 0.5, "tie_word_embeddings": True}),  # noqa: E501
    "cohere2": Variant("cohere2", {"num_hidden_layers": 3, "sliding_window": 9, "sliding_window_pattern": 3, "logit_scale": 0.5, "tie_word_embeddings": False}),  # noqa: E501
    "exaone4": Variant("exaone4", {"num_hidden_layers": 3, "sliding_window": 9, "sliding_window_pattern": 3}),  # noqa: E501
    "olmoe": Variant("olmoe", {"intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2}),  # noqa: E501
    "granitemoe": Variant("granitemoe", {"intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2, "attention_multiplier": 0.3,  # noqa: E501
                                         "embedding_multiplier": 2.0, "residual_multiplier": 0.8, "logits_scaling": 0.5}),  # noqa: E501
    "dots1": Variant("dots1", GLM_MOE | {"num_hidden_layers": 3, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,  # noqa: E501
                                         "norm_topk_prob": True, "sliding_window": 9, "max_window_layers": 2}),  # noqa: E501
    "qwen2_vl": Variant("qwen2_vl", {"rope_parameters": FLAT_MROPE}),
    "qwen2_5_vl": Variant("qwen2_5_vl", {"rope_parameters": FLAT_MROPE}),
    "internvl": Variant("internvl", {"model_type": "qwen2"}),
    "voxtral": Variant("voxtral", {"model_type": "llama", "head_dim": 12}),
    "granite": Variant("granite", {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 1.3, "logits_scaling": 0.5}),  # noqa: E501
    "phi3": Variant("phi3", {"sliding_window": 13, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),  # noqa: E501
    "phi3_longrope": Variant("phi3", {"original_max_position_embeddings": 128, "max_position_embeddings": 512,  # noqa: E501
                                      "rope_parameters": LONGROPE}),
    "glm": Variant("glm", {"head_dim": 12, "pad_token_id": None, "attention_bias": True}),
    "glm4": Variant("glm4", {"head_dim": 12, "pad_token_id": None}),
    "glm4v": Variant("glm4v", {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": FLAT_MROPE | {"partial_rotary_factor": 0.5}}),  # noqa: E501
    "apertus": Variant("apertus", {"attention_bias": True, "rope_parameters": LLAMA3}),
    "glm4_moe": Variant("glm4_moe", GLM_MOE | {"num_hidden_layers": 3, "use_qk_norm": True}),
    "glm4_moe_groups": Variant("glm4_moe", GLM_MOE | {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "attention_bias": True}),  # noqa: E501
    "minimax": Variant("minimax", MINIMAX | {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR], "mlp_beta_factor": 0.8}),  # noqa: E501
    "minimax_text_01": Variant("minimax", MINIMAX | {"linear_attn_beta_factor": 0.7}, called="minimax_text_01"),  # noqa: E501
    "minimax_m1": Variant("minimax", MINIMAX, called="minimax_m1"),
    "minimax_m2": Variant("minimax_m2", {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 12, "rotary_dim": 6, "intermediate_size": 24}),  # noqa: E501
    "mimo_v2_flash": Variant("mimo_v2_flash", GLM_MOE | MIMO_V2),
    "step3p7": Variant("step3p7", STEP3P5),
    "minimax_m3": Variant("minimax_m3_vl", MINIMAX_M3),
    "granite4": Variant("granitemoehybrid", {"layer_types": ["attention"] * 2, "num_local_experts": 0, "shared_intermediate_size": 40,  # noqa: E501
                                             "position_embedding_type": "rope", "attention_multiplier": 0.3, "mamba_n_heads": 4}),  # noqa: E501
    "granite4_hybrid": Variant("granitemoehybrid", GRANITE_HYBRID | {"num_local_experts": 0, "position_embedding_type": "rope",  # noqa: E501
                                                                     "mamba_proj_bias": True, "mamba_n_groups": 2}),  # noqa: E501
    "granite4_moe": Variant("granitemoehybrid", GRANITE_HYBRID | {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24,  # noqa: E501
                                                                  "mamba_d_conv": 3, "mamba_conv_bias": False, "tie_word_embeddings": True,  # noqa: E501
                                                                  "logits_scaling": 2.0}, legacy=True),  # noqa: E501
    "nemotron_h": Variant("nemotron_h", NEMOTRON | {"layers_block_type": [LINEAR, "mlp", LINEAR, FULL, "mlp"], "mlp_bias": True,  # noqa: E501
                                                    "use_bias": True}),
    "nemotron_h_moe": Variant("nemotron_h", NEMOTRON | {"layers_block_type": [LINEAR, "moe", FULL, LINEAR, "moe"], "n_groups": 1,  # noqa: E501
                                                        "use_conv_bias": False, "conv_kernel": 3, "moe_latent_size": 20}),  # noqa: E501
    "deepseek_v2": Variant("deepseek_v2", LATENT | {"q_lora_rank": None, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}}, legacy=True),  # noqa: E501
    "deepseek_v2_groups": Variant("deepseek_v2", LATENT | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),  # noqa: E501
    "deepseek_v3": Variant("deepseek_v3", LATENT | {"num_hidden_layers": 3, "n_group": 4, "topk_group": 2, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, legacy=True),  # noqa: E501
    "kimi_k2": Variant("deepseek_v3", LATENT | {"n_group": 1, "topk_group": 1, "attention_bias": True, "n_shared_experts": 2}, called="kimi_k2"),  # noqa: E501
    "kimi_k25": Variant("kimi_k25", LATENT | {"model_type": "deepseek_v3", "n_group": 1, "topk_group": 1}),  # noqa: E501
    "lfm2": Variant("lfm2", {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "conv_bias": True,  # noqa: E501
                             "block_multiple_of": 8, "intermediate_size": 60, "tie_word_embeddings": False}),  # noqa: E501
    "mistral4": Variant("mistral4", LATENT | {"num_hidden_layers": 3, "n_group": 1, "topk_group": 1, "rope_parameters": YARN | MISTRAL4}),  # noqa: E501
    "glm4_moe_lite": Variant("glm4_moe_lite", LATENT | {"num_hidden_layers": 3, "rope_interleave": False}),  # noqa: E501
    "deepseek_v32": Variant("deepseek_v32", LATENT | INDEXED | {"num_hidden_layers": 3, "n_group": 4, "topk_group": 2, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, legacy=True),  # noqa: E501
    "glm_moe_dsa": Variant("glm_moe_dsa", LATENT | INDEXED),
    "kimi_linear": Variant("kimi_linear", KIMI | KDA | {"n_group": 4, "topk_group": 2}),
    "kimi_linear_shared": Variant("kimi_linear", KIMI | {"n_shared_experts": 2, "num_hidden_layers": 3,  # noqa: E501
                                                                 "layer_types": [LINEAR, FULL, LINEAR], "linear_num_heads": 2, "linear_head_dim": 12,  # noqa: E501
                                                                 "linear_conv_kernel_dim": 3}, torch.float32),  # noqa: E501
    "qwen3_next": Variant("qwen3_next", MOE | DELTA | {"num_hidden_layers": 4, "shared_expert_intermediate_size": 20, "mlp_only_layers": [1],  # noqa: E501
                                                       "full_attention_interval": 2}),
    "qwen3_5": Variant("qwen3_5", DELTA | {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR], "linear_conv_kernel_dim": 3}),  # noqa: E501
    "qwen3_5_resaved": Variant("qwen3_5", DELTA | {"num_hidden_layers": 2, "layer_types": [LINEAR, FULL]}, resaved=True),  # noqa: E501
    "qwen3_5_moe": Variant("qwen3_5_moe", MOE | DELTA | {"shared_expert_intermediate_size": 20, "layer_types": [LINEAR, FULL]}),  # noqa: E501
    "gpt_oss": Variant("gpt_oss", GPT_OSS, legacy=True),
    "gpt_oss_mxfp4": Variant("gpt_oss", GPT_OSS | {"num_hidden_layers": 3, "intermediate_size": 64}, mxfp4=True),  # noqa: E501
    "hy_v3": Variant("hy_v3", MOE | {"num_hidden_layers": 3, "router_scaling_factor": 1.5}),
}  # fmt: skip
EYES: dict[str, dict[str, object]] = {
    "qwen3_vl": {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 32,  # noqa: E501
                 "deepstack_visual_indexes": [0], "num_position_embeddings": 4, "patch_size": 2},
    "mistral3": {"model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,  # noqa: E501
                 "num_attention_heads": 2, "image_size": 4, "patch_size": 2},
}  # fmt: skip
EYES["gemma3"] = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 4, "patch_size": 2,
}  # fmt: skip
EYES["gemma4"] = EYES["gemma3"] | {
    "head_dim": 4, "num_key_value_heads": 2, "position_embedding_size": 16,
}  # fmt: skip
EYES["qwen2_vl"] = {
    "depth": 1,
    "embed_dim": 8,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 2,
    "mlp_ratio": 1,
}
EYES["qwen2_5_vl"] = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 2,
    "fullatt_block_indexes": [0],
}
EYES["glm4v"] = EYES["qwen2_5_vl"] | {"image_size": 4}
EYES["internvl"] = EYES["gemma3"] | {"image_size": [4, 4], "patch_size": [2, 2]}
EYES["voxtral"] = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_mel_bins": 4, "max_source_positions": 4,
}  # fmt: skip
EYES["qwen3_vl_moe"] = EYES["qwen3_vl"]
EYES["minimax_m3_vl"] = EYES["gemma3"] | {"spatial_merge_size": 1}
EYES["llama4"] = EYES["gemma3"] | {
    "vision_output_dim": 8,
    "projector_input_dim": 8,
    "projector_output_dim": 8,
}
EYES["kimi_k25"] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
EYES["step3p7"] = {
    "width": 8, "layers": 1, "heads": 2, "image_size": 16, "patch_size": 2, "mlp_ratio": 1.0,
}  # fmt: skip
BESIDE_EYES: dict[str, dict[str, object]] = {"kimi_k25": {"projection_hidden_size": 32}}
EYES["qwen3_5"] = EYES["qwen3_5_moe"] = {
    "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 4, "patch_size": 2,
}  # fmt: skip


def make(name: str, variant: Variant) -> None:
    """Writes one fixture's folder anew."""
    directory = HERE / name
    shutil.rmtree(directory, ignore_errors=True)
    for seed in range(200):
        model = random_model(variant, seed)
        prompt, logits, greedy, margin = reference(model, seed)
        if margin >= LEAST_MARGIN and len(set(greedy.tolist())) >= LEAST_DIFFERENT:
            break
    else:
        raise SystemExit(
            f"{name}: no seed gives margins of {LEAST_MARGIN} and {LEAST_DIFFERENT} different"
            " tokens"
        )
    kept = kept_experts(model) if variant.mxfp4 else {}
    model.to(variant.dtype).save_pretrained(directory, max_shard_size=variant.shard_size)
    (directory / "generation_config.json").unlink(missing_ok=True)
    if variant.resaved:
        save_as_text(directory)
    if variant.mxfp4:
        to_mxfp4(directory, kept)
    if variant.family == "kimi_k25":
        to_published_kimi(directory)
    if variant.family == "minimax_m3_vl":
        to_published_minimax_m3(directory)
    if "linear_attn_config" in variant.fields:
        to_published_kimi_linear(directory)
    if variant.called.startswith("minimax"):
        to_published_minimax(directory)
    if variant.called:
        path = directory / "config.json"
        path.write_text(path.read_text().replace(f'"{variant.family}"', f'"{variant.called}"'))
    if variant.legacy:
        to_legacy(directory / "config.json")
    np.savez_compressed(directory / "expected.npz", prompt=prompt, logits=logits, greedy=greedy)
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(
        f"{name}: seed {seed}, smallest margin {margin:.3f}, {len(set(greedy.tolist()))} different"
        f" tokens, {size} bytes"
    )


def random_model(variant: Variant, seed: int, gain: float = 1.6) -> torch.nn.Module:
    """Weights drawn anew, rounded to the stored dtype, computed with in float32. `gain`: of a
    matrix; beyond one, float noise grows with the layers, and margins do."""
    torch.manual_seed(seed)
    fields = COMMON | dict(variant.fields)
    if (eyes := EYES.get(variant.family)) is None:
        config = AutoConfig.for_model(variant.family, **fields)
        # transformers 5.23 gives Mistral 4 no automatic class for text
        made = (
            Mistral4ForCausalLM
            if variant.family == "mistral4"
            else AutoModelForCausalLM.from_config
        )
        model = made(config).eval()
    else:
        if "out_hidden_size" in eyes:
            eyes = eyes | {"out_hidden_size": fields["hidden_size"]}
        part = "audio_config" if variant.family == "voxtral" else "vision_config"
        config = AutoConfig.for_model(
            variant.family,
            text_config=fields,
            **{part: eyes},
            tie_word_embeddings=False,
            **BESIDE_EYES.get(variant.family, {}),
        )
        speech = variant.family == "voxtral"
        made = (
            VoxtralForConditionalGeneration if speech else AutoModelForImageTextToText.from_config
        )
        model = made(config).eval()
    mend(model)
    stored = ("correction_bias", "layer_scalar")
    buffers = [each for each in model.named_buffers() if each[0].endswith(stored)]
    added_to_one = variant.family.startswith(("gemma", "minimax_m3", "step3p"))
    added_to_one &= not variant.family.startswith("gemma4")
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *buffers]:
            if "norm" in name or name.endswith(("scale", "layer_scalar")):
                least = -0.5 if added_to_one else 0.5
                weight.uniform_(least, least + 1)
            elif name.endswith("A_log"):
                weight.uniform_(-4.0, 1.0)  # some heads remember long
            elif name.endswith("dt_bias"):
                weight.uniform_(-4.0, 1.0)
            elif name.endswith("bias"):
                weight.normal_(std=0.3)
            elif "embed_tokens" in name or name == "model.embeddings.weight":
                weight.normal_(std=0.7)
            else:
                weight.normal_(std=gain / weight.shape[-1] ** 0.5)
            weight.copy_(weight.to(variant.dtype).float())
    if variant.mxfp4:
        draw_mxfp4(model)
    return model.float()


def save_as_text(directory: Path) -> None:
    """Loaded and saved by the class of causal language models: a text part keeps its names."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    for path in directory.iterdir():
        path.unlink()
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)


def text_of(model: torch.nn.Module) -> torch.nn.Module:
    """The part that gives logits without images: transformers 5.24 fails on Llama 4 without any."""
    is_llama = type(model).__name__ == "Llama4ForConditionalGeneration"
    return model.language_model if is_llama else model


@torch.no_grad()
def reference(
    model: torch.nn.Module, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Prompt, its logits, the greedy tokens that follow, and the smallest margin by which one was
    chosen."""
    prompt = torch.randint(
        3, COMMON["vocab_size"], (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(seed)
    )
    model = text_of(model)
    out = model(prompt, use_cache=True)
    logits, greedy, margin = out.logits[0].numpy(), [], float("inf")
    for _ in range(GREEDY_TOKENS):
        best = out.logits[0, -1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        greedy.append(int(best.indices[0]))
        out = model(best.indices[None, :1], past_key_values=out.past_key_values, use_cache=True)
    return prompt[0].numpy().astype(np.int32), logits, np.array(greedy, np.int32), margin


if __name__ == "__main__":
    for variant_name in sys.argv[1:] or VARIANTS:
        make(variant_name, VARIANTS[variant_name])

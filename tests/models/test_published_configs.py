"""config.json of published models with all their fields: each is read, and gives the published
parameter count and KV size."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.costs.catalog import CATALOG
from jdisagg.errors import CheckpointError
from models.catalog import read_config
from models.hf_config import HfConfig
from models.inspection import inspect

HYBRID = [*["linear_attention"] * 3, "full_attention"]
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}
# Qwen/Qwen3.6-35B-A3B: the part of a head that turns is stated twice
QWEN = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "image_token_id": 248056,
    "vision_config": {"depth": 27},
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "layer_types": HYBRID * 10,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
    },
}
LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "moe_intermediate_size": 2048,
    "hidden_act": "silu",
}
# moonshotai/Kimi-K2.5: what is quantized is said in the text part
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "ignore_index": -100,
    "media_placeholder_token_id": 163605,
    "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "vision_config": {"patch_size": 14},
    "tie_word_embeddings": False,
    "text_config": LATENT
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "max_position_embeddings": 262144,
        "moe_layer_freq": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "quantization_config": {
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "group_size": 32,
                        "num_bits": 4,
                        "strategy": "group",
                        "type": "int",
                    },
                }
            },
            "format": "pack-quantized",
            "ignore": ["lm_head", "re:.*self_attn.*"],
            "quant_method": "compressed-tensors",
        },
        "rope_scaling": YARN | {"factor": 64.0, "original_max_position_embeddings": 4096},
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_method": "noaux_tc",
        "vocab_size": 163840,
    },
}
# mistralai/Mistral-Small-4-119B-2603
MISTRAL = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "image_token_index": 10,
    "multimodal_projector_bias": False,
    "spatial_merge_size": 2,
    "vision_config": {"model_type": "pixtral"},
    "tie_word_embeddings": False,
    "text_config": LATENT
    | {
        "model_type": "mistral4",
        "first_k_dense_replace": 0,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "kv_lora_rank": 256,
        "max_position_embeddings": 1048576,
        "n_routed_experts": 128,
        "num_attention_heads": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 36,
        "num_key_value_heads": 32,
        "q_lora_rank": 1024,
        "qk_head_dim": 128,
        "qk_nope_head_dim": 64,
        "rope_interleave": True,
        "rope_parameters": YARN
        | {
            "factor": 128.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 8192,
            "partial_rotary_factor": 0.5,
            "rope_theta": 10000.0,
            "rope_type": "yarn",
        },
        "routed_scaling_factor": 1.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
}
# tencent/Hy3
HY = {
    "architectures": ["HYV3ForCausalLM"],
    "model_type": "hy_v3",
    "enable_attention_fp32_softmax": False,
    "enable_lm_head_fp32": True,
    "enable_moe_fp32_combine": False,
    "expert_hidden_dim": 1536,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 13312,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 1536,
    "moe_router_enable_expert_bias": True,
    "moe_router_use_sigmoid": True,
    "num_attention_heads": 64,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 1,
    "qk_norm": True,
    "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
    "route_norm": True,
    "router_scaling_factor": 2.826,
    "use_grouped_mm": False,
    "vocab_size": 120832,
}
# microsoft/Phi-3-mini-128k-instruct as first published
PHI = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "embd_pdrop": 0.0,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"long_factor": [1.05] * 48, "short_factor": [1.0] * 48, "type": "su"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "vocab_size": 32064,
}


@pytest.mark.parametrize(
    ("fields", "billions", "a_token"),
    [
        # published: 35B with the eyes; 1T; 119B with the eyes; 295B; 3.8B
        pytest.param(QWEN, 34.7, 2 * 10 * 2 * 256 * 2, id="Qwen3.6-35B-A3B"),
        pytest.param(KIMI, 1026.4, 61 * (512 + 64) * 2, id="Kimi-K2.5"),
        pytest.param(MISTRAL, 119.0, 36 * (256 + 64) * 2, id="Mistral-Small-4"),
        pytest.param(HY, 295.0, 2 * 80 * 8 * 128 * 2, id="Hy3"),
        pytest.param(PHI, 3.8, 2 * 32 * 32 * 96 * 2, id="Phi-3-mini-128k"),
    ],
)
def test_a_published_config_is_read(
    fields: dict[str, object], billions: float, a_token: int, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    found = inspect(path)
    assert found.missing == []
    assert found.geometry is not None
    assert round(found.geometry.parameters / 1e9, 1) == billions
    assert found.geometry.kv_bytes_per_token("bfloat16") == a_token


def _text(outer: dict[str, object], **fields: object) -> dict[str, object]:
    text = outer["text_config"]
    assert isinstance(text, dict)
    return outer | {"text_config": text | fields}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (_text(QWEN, partial_rotary_factor=0.5), "0.5 contradicts .* which state 0.25"),
        (_text(MISTRAL, n_group=4, topk_group=2), "n_group must be 1"),
        (_text(MISTRAL, qk_rope_head_dim=32), "must be partial_rotary_factor=0.5 times 96 values"),
        (HY | {"route_norm": False}, "route_norm must be true"),
        (HY | {"expert_hidden_dim": 768}, "expert_hidden_dim must be moe_intermediate_size=1536"),
        (KIMI | {"architectures": ["KimiVLForConditionalGeneration"]}, "must hold 'KimiK25For"),
    ],
)
def test_one_that_says_something_else_is_refused(fields: dict[str, object], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        read_config(HfConfig(fields))


def test_what_is_named_as_missing_is_missing(tmp_path: Path) -> None:
    """A disabled window is not listed, nor are fields beside refused rotary positions."""
    path = tmp_path / "config.json"
    off = {"model_type": "stablelm", "sliding_window": 9, "use_sliding_window": False}
    path.write_text(json.dumps(PHI | off | {"rope_scaling": None}))
    assert inspect(path).missing == ["the family 'stablelm'"]
    path.write_text(json.dumps(PHI | {"rope_scaling": {"type": "spiral"}}))
    (said,) = inspect(path).missing
    assert "rope_type 'spiral'" in said


def test_a_gemma_3_that_sees_bounds_no_logits_as_transformers_has_it() -> None:
    text = {"head_dim": 8, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"final_logit_softcapping": 30.0}
    alone = read_config(HfConfig({"model_type": "gemma3_text"} | text))
    seeing = read_config(HfConfig({"model_type": "gemma3", "text_config": text}))
    assert (alone.logits_cap, seeing.logits_cap) == (30.0, 0.0)


DEEPSEEK_V32 = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": YARN | {"factor": 40, "original_max_position_embeddings": 4096},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GLM_5 = DEEPSEEK_V32 | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "head_dim": 64,
    "hidden_size": 6144,
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "n_group": 1,
    "num_attention_heads": 64,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "quantization_config": None,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "rope_scaling": None,
    "rope_theta": None,
    "topk_group": 1,
    "v_head_dim": 256,
    "vocab_size": 154880,
}


@pytest.mark.parametrize(
    ("name", "fields", "latent", "index"),
    [("deepseek-v3.2", DEEPSEEK_V32, 70272, 15616), ("glm-5", GLM_5, 89856, 19968)],
)
def test_models_with_an_indexer_are_in_the_catalogue_as_published(
    name: str, fields: dict[str, object], latent: int, index: int
) -> None:
    config = read_config(HfConfig(fields))
    assert config.cost_geometry(name) == CATALOG[name]
    assert CATALOG[name].kv_bytes_per_token("bfloat16") == latent + index
    parts = config.kv_spec("bfloat16").components
    for part, kept in (("latent", latent), ("index", index)):
        assert sum(2 * each.width for each in parts if each.name == part) == kept
    in_fp8 = replace(config, kv_dtype="fp8")
    assert in_fp8.kv_spec("bfloat16").bytes_per_token == latent // 2 + index


# deepseek-ai/DeepSeek-V3
DEEPSEEK_V3 = {name: value for name, value in DEEPSEEK_V32.items() if "index" not in name} | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
}
# zai-org/GLM-4.6
GLM_4_6 = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": True,
    "vocab_size": 151552,
}


@pytest.mark.parametrize(
    ("name", "fields", "layers"),
    [
        ("deepseek-v3", DEEPSEEK_V3, 1),
        ("glm-4.6", GLM_4_6, 1),
        ("kimi-k2.5", KIMI, 0),
        ("deepseek-v3.2", DEEPSEEK_V32, 0),
        ("glm-5", GLM_5, 0),
    ],
)
def test_next_token_layers_that_can_be_loaded_are_in_the_catalogue(
    name: str, fields: dict[str, object], layers: int
) -> None:
    """Layers with an indexer cannot."""
    found = read_config(HfConfig(fields)).cost_geometry(name)
    assert found == CATALOG[name]
    assert found.next_token_layers == CATALOG[name].next_token_layers == layers


@pytest.mark.parametrize(
    "shared", [{"index_topk_freq": 4}, {"index_topk_pattern": "FSS"}, {"indexer_types": ["shared"]}]
)
def test_a_selection_that_layers_share_is_refused_by_name(shared: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="a selection that several layers share"):
        read_config(HfConfig(GLM_5 | shared))


# moonshotai/Kimi-Linear-48B-A3B-Instruct
KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [at for at in range(1, 27) if at % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def test_kimi_linear_is_in_the_catalogue_as_published() -> None:
    config, known = read_config(HfConfig(KIMI_LINEAR)), CATALOG["kimi-linear-48b-a3b"]
    assert config.cost_geometry(known.name) == known
    assert 48.5e9 < known.parameters < 50e9 and 2.9e9 < known.active_parameters < 3.6e9
    spec = config.kv_spec("bfloat16")
    assert spec.bytes_per_token == known.kv_bytes_per_token() == 7 * 576 * 2
    # 20 layers: a float32 matrix of 128 x 128 for each of 32 heads, three inputs of q, k and v
    state = 20 * 32 * (128 * 128 * 4 + 3 * 3 * 128 * 2)
    assert spec.state.bytes_per_token == known.state_bytes() == state
    assert config.kv_heads == 32 and spec.bytes_per_device(8) == spec.bytes_per_token

"""Reads the configuration of Hy3. It has Qwen3's attention, experts that are chosen by corrected
sigmoid scores, a shared expert, and a dense first layer."""

from dataclasses import replace

from models.decoder_config import DecoderConfig, ExpertConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, refuse_windows
from models.hf_experts import count_experts, sparse_layers, with_experts

DEFAULTS = FamilyDefaults(
    kv_heads=8, context_tokens=131072, norm_epsilon=1e-5, rope_theta=11_158_840.0
)
# Fields of released checkpoints with a single supported value.
_ONLY = ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias")


def read_config(hf: HfConfig) -> DecoderConfig:
    refuse_windows(hf, "this family uses full attention")
    hf.require(dict.fromkeys(_ONLY, True))
    # These fields select bfloat16 roundings, and how transformers computes experts.
    hf.pass_over("enable_moe_fp32_combine", "enable_lm_head_fp32")
    hf.pass_over("enable_attention_fp32_softmax", "use_grouped_mm")
    bias = hf.flag("attention_bias", False)
    config = read_decoder(
        hf, DEFAULTS, qkv_bias=bias, output_bias=bias, qk_norm="head", head_dim_default=128
    )
    ffn = hf.count("moe_intermediate_size", hf.count("expert_hidden_dim", 1536))
    if hf.count("expert_hidden_dim", ffn) != ffn:
        raise hf.error("expert_hidden_dim", f"must be moe_intermediate_size={ffn}", "correct it")
    experts = ExpertConfig(
        count_experts(hf, 192),
        hf.count("num_experts_per_tok", 8),
        ffn,
        normalised=True,
        shared_ffn=ffn * hf.count("num_shared_experts", 1, least=0),
        scores="sigmoid",
        correction=True,
        scaling=hf.number("router_scaling_factor", 2.826),
    )
    config = replace(config, mlp_bias=hf.flag("mlp_bias", False), left_aside=1)
    return with_experts(hf, config, experts, sparse_layers(hf, config, 1))

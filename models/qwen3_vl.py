"""Reads the configuration of Qwen3-VL's text model, which is Qwen3 or Qwen3-MoE. For text,
three-dimensional rotary positions equal ordinary ones."""

from models import qwen3
from models.decoder_config import DecoderConfig, ExpertConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder
from models.hf_experts import count_experts
from models.qwen3_moe import with_sparse_layers

DEFAULTS = FamilyDefaults(kv_heads=32, context_tokens=128000, rope_theta=500000.0)
MOE_DEFAULTS = FamilyDefaults(kv_heads=16, context_tokens=128000, rope_theta=500000.0)


def read_config(hf: HfConfig) -> DecoderConfig:
    return qwen3.read_config(hf, DEFAULTS)


def read_moe_config(hf: HfConfig) -> DecoderConfig:
    """Expert weights are always normalised, even if `norm_topk_prob` is false."""
    bias = hf.flag("attention_bias", False)
    config = read_decoder(
        hf, MOE_DEFAULTS, qkv_bias=bias, output_bias=bias, qk_norm="head", head_dim_default=128
    )
    hf.pass_over("norm_topk_prob")
    experts = ExpertConfig(
        count_experts(hf, 60),
        hf.count("num_experts_per_tok", 4),
        hf.count("moe_intermediate_size", 1408),
        normalised=True,
    )
    return with_sparse_layers(hf, config, experts)

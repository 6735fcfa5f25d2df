"""Reads the configuration of Qwen1.5-MoE and Qwen2-MoE, which have biases on q, k and v, experts,
and a shared expert with a sigmoid gate on its output."""

from models.decoder_config import DecoderConfig, ExpertConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, with_windows
from models.hf_experts import count_experts
from models.qwen2 import read_windows
from models.qwen3_moe import with_sparse_layers

DEFAULTS = FamilyDefaults(kv_heads=16, context_tokens=32768)


def read_config(hf: HfConfig) -> DecoderConfig:
    config = read_decoder(hf, DEFAULTS, qkv_bias=hf.flag("qkv_bias", True))
    experts = ExpertConfig(
        count_experts(hf, 60),
        hf.count("num_experts_per_tok", 4),
        hf.count("moe_intermediate_size", 1408),
        hf.flag("norm_topk_prob", False),
        shared_ffn=hf.count("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    config = with_sparse_layers(hf, config, experts)
    return with_windows(config, read_windows(hf, len(config.layers)))

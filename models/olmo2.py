"""Reads the configuration of OLMo 2 and OLMoE. Both have one norm over all heads of q and another
over all heads of k. OLMo 2 has norms after attention and feed-forward. OLMoE has experts."""

from dataclasses import replace

from models.decoder_config import DecoderConfig, ExpertConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, refuse_windows
from models.hf_experts import count_experts, with_experts

DEFAULTS = FamilyDefaults(kv_heads=None, context_tokens=2048, norm_epsilon=1e-5)


def read_config(hf: HfConfig, defaults: FamilyDefaults = DEFAULTS) -> DecoderConfig:
    refuse_windows(hf, "this family uses full attention")
    bias = hf.flag("attention_bias", False)
    config = read_decoder(hf, defaults, qkv_bias=bias, output_bias=bias, qk_norm="all")
    return replace(config, norms="after")


def read_moe_config(hf: HfConfig) -> DecoderConfig:
    refuse_windows(hf, "this family uses full attention")
    bias = hf.flag("attention_bias", False)
    defaults = replace(DEFAULTS, context_tokens=4096)
    config = read_decoder(hf, defaults, qkv_bias=bias, output_bias=bias, qk_norm="all")
    total, chosen = count_experts(hf, 64), hf.count("num_experts_per_tok", 8)
    experts = ExpertConfig(total, chosen, config.ffn, hf.flag("norm_topk_prob", False))
    return with_experts(hf, config, experts)

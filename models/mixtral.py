"""Reads the configuration of Mixtral: Mistral's attention, and experts in every layer whose weights
are normalised."""

from models.decoder_config import DecoderConfig, ExpertConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, read_window, with_one_window
from models.hf_experts import count_experts, with_experts

DEFAULTS = FamilyDefaults(kv_heads=8, context_tokens=4096 * 32, norm_epsilon=1e-5, rope_theta=1e6)


def read_config(hf: HfConfig) -> DecoderConfig:
    config = read_decoder(hf, DEFAULTS)
    total, chosen = count_experts(hf, 8), hf.count("num_experts_per_tok", 2)
    experts = ExpertConfig(total, chosen, config.ffn, normalised=True)
    return with_one_window(hf, with_experts(hf, config, experts), read_window(hf))

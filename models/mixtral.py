"""Reads the configuration of Mixtral: Mistral's attention, and experts in every layer whose weights
are normalised."""

from dataclasses import replace

from models.decoder_config import DecoderConfig, ExpertConfig, LayerConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, read_window, with_one_window

DEFAULTS = FamilyDefaults(kv_heads=8, context_tokens=4096 * 32, norm_epsilon=1e-5, rope_theta=1e6)


def read_config(hf: HfConfig) -> DecoderConfig:
    config = read_decoder(hf, DEFAULTS)
    total = hf.count("num_local_experts", hf.count("num_experts", 8))
    chosen = hf.count("num_experts_per_tok", 2)
    if chosen > total:
        raise hf.error(
            "num_experts_per_tok", f"must be at most num_local_experts={total}", "correct it"
        )
    experts = ExpertConfig(total, chosen, config.ffn, normalised=True)
    config = replace(config, layers=(LayerConfig(experts=experts),) * len(config.layers))
    return with_one_window(hf, config, read_window(hf))

"""Mixtral: Mistral's attention and experts in every layer, the chosen ones' weights normalised."""

from dataclasses import replace

from models.decoder_config import DecoderConfig, ExpertConfig, LayerConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, read_layer_types

DEFAULTS = FamilyDefaults(kv_heads=8, context_tokens=4096 * 32, norm_epsilon=1e-5, rope_theta=1e6)


def read_config(hf: HfConfig) -> DecoderConfig:
    config = read_decoder(hf, DEFAULTS)
    window = hf.count("sliding_window") if hf.has("sliding_window") else None
    total = hf.count("num_local_experts", hf.count("num_experts", 8))
    chosen = hf.count("num_experts_per_tok", 2)
    if chosen > total:
        raise hf.error(
            "num_experts_per_tok", f"must be at most num_local_experts={total}", "correct it"
        )
    experts = ExpertConfig(total, chosen, config.ffn, normalised=True)
    layers = len(config.layers)
    if read_layer_types(hf, layers, window, [True] * layers) != (window,) * layers:
        raise hf.error("layer_types", "must agree with sliding_window", "one window serves all")
    return replace(config, layers=(LayerConfig(window, experts),) * layers)

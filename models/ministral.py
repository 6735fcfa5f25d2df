"""Ministral 8B of 2024: Mistral with windows in some layers; and Ministral 3, with Devstral 2:
Mistral whose queries grow with their position."""

from dataclasses import replace

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig, checked_number
from models.hf_decoder import read_decoder, read_layer_types, with_windows

DEFAULTS = FamilyDefaults(kv_heads=8, context_tokens=4096 * 32)
DEFAULTS_3 = FamilyDefaults(kv_heads=8, context_tokens=262144, norm_epsilon=1e-5, rope_theta=1e6)
ROPE_3: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_config(hf: HfConfig) -> DecoderConfig:
    config = read_decoder(hf, DEFAULTS)
    silent = "sliding_window" not in hf.fields
    window = 4096 if silent else (hf.count("sliding_window") if hf.has("sliding_window") else None)
    count = len(config.layers)
    return with_windows(config, read_layer_types(hf, count, window, [True] * count))


def read_3_config(hf: HfConfig) -> DecoderConfig:
    field = "rope_scaling" if hf.raw("rope_scaling") else "rope_parameters"
    given = hf.raw(field) or ROPE_3
    if not isinstance(given, dict):
        raise hf.error(field, "must be an object", "correct it")
    beta = checked_number(given.get("llama_4_scaling_beta"), 0.0, f"{field}.beta", hf.where)
    rest = {key: value for key, value in given.items() if key != "llama_4_scaling_beta"}
    config = read_decoder(hf.changed(**{field: rest}), DEFAULTS_3, head_dim_default=128)
    window = hf.count("sliding_window") if hf.has("sliding_window") else None
    rope = replace(config.attention.rope, query_beta=beta)
    if beta and not rope.original_tokens:
        raise hf.error(field, "must have original_max_position_embeddings", "correct it")
    config = replace(config, attention=replace(config.attention, rope=rope))
    return with_windows(config, (window,) * len(config.layers))

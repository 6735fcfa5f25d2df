"""Mistral: Llama's form with one sliding window for all layers (4096 where config.json is silent,
none where it says null)."""

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig, read_decoder, with_windows

DEFAULTS = FamilyDefaults(kv_heads=8, context_tokens=4096 * 32)


def read_config(hf: HfConfig) -> DecoderConfig:
    hf.refuse("layer_types", "one window serves all layers of this family")
    config = read_decoder(hf, DEFAULTS)
    silent = "sliding_window" not in hf.fields
    window = 4096 if silent else (hf.count("sliding_window") if hf.has("sliding_window") else None)
    return with_windows(config, (window,) * len(config.layers))

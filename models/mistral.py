"""Mistral: Llama's form with one sliding window for all layers (4096 where config.json is silent,
none where it says null)."""

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, read_layer_types, with_windows

DEFAULTS = FamilyDefaults(kv_heads=8, context_tokens=4096 * 32)


def read_config(hf: HfConfig) -> DecoderConfig:
    config = read_decoder(hf, DEFAULTS)
    silent = "sliding_window" not in hf.fields
    window = 4096 if silent else (hf.count("sliding_window") if hf.has("sliding_window") else None)
    windows = (window,) * len(config.layers)
    if read_layer_types(hf, len(windows), window, [True] * len(windows)) != windows:
        raise hf.error("layer_types", "must agree with sliding_window", "one window serves all")
    return with_windows(config, windows)

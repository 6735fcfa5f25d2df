"""Reads the configuration of EXAONE 4. It has norms after blocks as in OLMo 2, and norms on each
head of q and k. The larger model has windows in most layers, and rotary positions only in these
layers."""

from dataclasses import replace

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, read_layer_types, read_window, with_windows

DEFAULTS = FamilyDefaults(kv_heads=32, context_tokens=2048, norm_epsilon=1e-5)


def read_config(hf: HfConfig) -> DecoderConfig:
    config = read_decoder(hf, DEFAULTS, qk_norm="head")
    count, window = len(config.layers), read_window(hf, 4096)
    pattern = hf.raw("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        local = [pattern[at % len(pattern)] == "L" for at in range(count - 1)] + [False]
    else:
        every = hf.count("sliding_window_pattern", 4) if window else 1
        local = [(at + 1) % every != 0 for at in range(count)]
    windows = read_layer_types(hf, count, window, local)
    config = replace(with_windows(config, windows), norms="after")
    if window is None:
        return config
    layers = (replace(layer, rotated=layer.window is not None) for layer in config.layers)
    return replace(config, layers=tuple(layers))

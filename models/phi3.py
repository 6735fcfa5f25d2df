"""Phi-3 and Phi-4: queries, keys and values in one tensor, gate and up in one; heads perhaps
rotated in part, positions perhaps by longrope, all layers perhaps with one window."""

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, with_windows

DEFAULTS = FamilyDefaults(kv_heads=None, context_tokens=4096, norm_epsilon=1e-5, partial_rotary=1.0)


def read_config(hf: HfConfig) -> DecoderConfig:
    config = read_decoder(hf, DEFAULTS)
    window = hf.count("sliding_window") if hf.has("sliding_window") else None
    return with_windows(config, (window,) * len(config.layers))

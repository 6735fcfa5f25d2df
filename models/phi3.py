"""Reads the configuration of Phi-3 and Phi-4. They have fused queries, keys and values, fused gate
and up, one window for all layers, longrope, and optionally rotary positions on a part of each
head."""

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, read_window, with_windows

DEFAULTS = FamilyDefaults(kv_heads=None, context_tokens=4096, norm_epsilon=1e-5, partial_rotary=1.0)


def read_config(hf: HfConfig) -> DecoderConfig:
    config = read_decoder(hf, DEFAULTS)
    return with_windows(config, (read_window(hf),) * len(config.layers))
